"""`sparring eval`: a checkpoint, its env, held-out episodes. Of a policy, an explorer or a world model."""

import os
from dataclasses import replace
from pathlib import Path

from sparring.api import load_policy, load_world_model
from sparring.checkpoint import CheckpointError, checkpoint_folder, load_spec, load_training_state, spec_differences
from sparring.config_text import Setting, flatten
from sparring.distributed import pick_device
from sparring.envs.backend import EnvSpec
from sparring.envs.make import make_env
from sparring.errors import UserError
from sparring.evaluate import Evaluation, evaluate_config
from sparring.measures.evaluation import WorldModelEvaluation, evaluate_world_model
from sparring.measures.exploration import ExplorationEvaluation, evaluate_exploration
from sparring.phases.phase import Progress
from sparring.record.films import Films
from sparring.tree import Config, load_config
from sparring.world_models.world_model import WorldModel

# what an evaluation may choose anew; the rest was decided when the policy was trained
FREE_TO_CHOOSE = ("env.", "rollout.n_envs", "rollout.max_episode_steps", "evaluation.", "seed", "device", "threads")


def evaluate_checkpoint(
    path: str,
    settings: list[Setting],
    greedy: bool = True,
    videos: int = 0,
    json_file: Path | None = None,
    both: bool = False,
) -> Evaluation:
    """Print the table, write the numbers (and videos) beside the checkpoint."""
    # beside evaluation.json, which is the run's own
    checkpoint, folder, json_file = _places(path, json_file, "eval.json")
    if videos:
        _refuse_unwritable(folder, "leave out --videos")
    config = config_of(checkpoint, settings)
    refuse_world_model(path, config)
    device = pick_device(config.device)
    policy = load_policy(checkpoint, device)
    refuse_other_env(checkpoint, config)
    evaluation = evaluate_config(config, policy, device, greedy, videos, both)
    how = "greedy and sampled" if "policy, sampled" in evaluation.scores else "greedy" if greedy else "sampled"
    print(f"{checkpoint}: {evaluation.episodes} held-out episodes, {how} actions")
    print(evaluation.table())
    print(f"numbers: {evaluation.write(json_file)}")
    films, progress = Films(folder), _progress(checkpoint) if evaluation.films else Progress()
    for number, film in enumerate(evaluation.films):
        print(f"video: {films.film(f'eval_{number}', 'evaluation', film, progress, evaluation.spec)}")
        # one after the other: nobody is kept waiting, and none is left out
        films.finish()
    if evaluation.no_films:
        print(f"no video: {evaluation.no_films}")
    return evaluation


def evaluate_world_model_checkpoint(
    path: str, settings: list[Setting], json_file: Path | None = None, against: str | None = None
) -> WorldModelEvaluation:
    """Print the tables, write the numbers beside the checkpoint. `against`: a run to compare with."""
    checkpoint, _, json_file = _places(path, json_file, "eval_world_model.json")
    config = config_of(checkpoint, settings)
    device = pick_device(config.device)
    model = load_world_model(checkpoint, device)
    refuse_other_env(checkpoint, config)
    other = None if against is None else load_other_world_model(against, path, config, device)
    evaluation = evaluate_world_model(config, model, device, other)
    print(f"{checkpoint}: {evaluation.episodes} held-out episodes, actions at random")
    print(evaluation.table())
    print(f"numbers: {evaluation.write(json_file)}")
    return evaluation


def load_other_world_model(other: str, path: str, config: Config, device) -> WorldModel:
    """One that can be told the same episodes as that of `path`, whose config this is."""
    refuse_other_env(checkpoint_folder(other), config)
    steps = load_config(checkpoint_folder(other) / "config.yaml").rollout.action_steps
    if steps != config.rollout.action_steps:
        raise UserError(
            f"'{other}': its decisions are {steps} steps long, those of '{path}' {config.rollout.action_steps}; they "
            "cannot be told the same episodes"
        )
    return load_world_model(other, device)


def evaluate_explorer_checkpoint(
    path: str, settings: list[Setting], json_file: Path | None = None
) -> ExplorationEvaluation:
    """How a policy explores, sampling its actions, beside random ones; printed, and written beside the checkpoint."""
    checkpoint, _, json_file = _places(path, json_file, "eval_exploration.json")
    config = config_of(checkpoint, settings)
    refuse_world_model(path, config)
    device = pick_device(config.device)
    policy = load_policy(checkpoint, device)
    refuse_other_env(checkpoint, config)
    evaluation = evaluate_exploration(config, policy, device)
    print(f"{checkpoint}: {evaluation.episodes} held-out episodes, sampled actions")
    print(evaluation.table())
    print(f"numbers: {evaluation.write(json_file)}")
    return evaluation


def _places(path: str, json_file: Path | None, name: str) -> tuple[Path, Path, Path]:
    """The checkpoint, the folder that it is evaluated in, and where the numbers go."""
    checkpoint = checkpoint_folder(path)
    folder = Path(path) if Path(path).is_dir() else checkpoint
    json_file = json_file or folder / name
    if not json_file.parent.is_dir():
        # told before hours are spent
        raise UserError(f"'{json_file}': there is no folder '{json_file.parent}'; make it first")
    _refuse_unwritable(json_file.parent, "give --json FILE in a folder of yours")
    return checkpoint, folder, json_file


def _refuse_unwritable(folder: Path, instead: str) -> None:
    """Told before anything is played."""
    if not os.access(folder, os.W_OK):
        raise UserError(f"'{folder}': cannot write there; {instead}")


def _progress(checkpoint: Path) -> Progress:
    """How far the run had come."""
    try:
        return Progress(**load_training_state(checkpoint)["phase"]["progress"])
    except (CheckpointError, KeyError):  # weights alone, or a phase of one's own
        number = checkpoint.name.rpartition("-")[2]
        return Progress(updates=int(number) if number.isdecimal() else 0)


def config_of(checkpoint: Path, settings: list[Setting]) -> Config:
    trained, config = load_config(checkpoint / "config.yaml"), load_config(checkpoint / "config.yaml", settings)
    before, now = flatten(trained.dump()), flatten(config.dump())
    changed = [key for key in now if before.get(key) != now[key] and not key.startswith(FREE_TO_CHOOSE)]
    if changed:
        raise UserError(
            f"{', '.join(changed)}: cannot be changed after training; an evaluation takes {', '.join(FREE_TO_CHOOSE)}"
        )
    return config


def refuse_world_model(path: str, config: Config) -> None:
    if config.phase == "teacher":
        raise UserError(f"'{path}' holds a world model, not a policy; give --world-model")


def refuse_other_env(checkpoint: Path, config: Config) -> None:
    env = make_env(config.env, 1, config.rollout.max_episode_steps)
    env.close()
    differences = spec_differences(_seen(load_spec(checkpoint)), _seen(env.spec))
    if differences:
        raise UserError("\n".join([f"'{checkpoint}' was trained in another env:", *differences]))


def _seen(spec: EnvSpec) -> EnvSpec:
    """What it tells of pixels is for measures only."""
    shown = {name: kind for name, kind in spec.observation.items() if not name.startswith("segmentation/")}
    return replace(spec, observation=shown)
