"""`sparring eval`: a checkpoint, its env, held-out episodes. Of a policy, an explorer or a world model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from sparring.api import load_policy, load_world_model
from sparring.config.schema import Config, load_config
from sparring.config.text import Setting, flatten, value_text
from sparring.contract import EnvSpec
from sparring.envs.env import make_env
from sparring.errors import UserError
from sparring.evaluation.exploration import ExplorationEvaluation, evaluate_exploration
from sparring.evaluation.files import EvaluationFiles
from sparring.evaluation.play import Evaluation, evaluate_config
from sparring.evaluation.world_model import WorldModelEvaluation, evaluate_world_model
from sparring.phases.phase import Progress
from sparring.processes.distributed import pick_device
from sparring.record.films import Films
from sparring.runs.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    load_spec,
    load_training_state,
    spec_differences,
)
from sparring.world_models.world_model import WorldModel

# what an evaluation may choose anew; the rest was decided when the policy was trained
FREE_TO_CHOOSE = ("env.", "rollout.n_envs", "rollout.max_episode_steps", "evaluation.", "seed", "device", "threads")
# of env.: how episodes are worked out, drawn and measured, not which they are
HOW_WORKED_OUT = ("env.segmentation", "env.video_renderer", "env.threads", "env.vectorize", "env.workers")


def evaluate_checkpoint(
    path: str,
    settings: list[Setting],
    greedy: bool = True,
    videos: int = 0,
    json_file: Path | None = None,
    both: bool = False,
) -> Evaluation:
    """Print the table, write the numbers (and videos) beside the checkpoint."""
    # beside evaluation.json, which is of training
    checkpoint, config, changed, files = _prepared(path, settings, "eval", json_file)
    refuse_world_model(path, config)
    if videos:
        files.check_videos()
    device = pick_device(config.device)
    policy = load_policy(checkpoint, device)
    refuse_other_env(checkpoint, config)
    evaluation = evaluate_config(config, policy, device, greedy, videos, both)
    how = "greedy and sampled" if "policy, sampled" in evaluation.scores else "greedy" if greedy else "sampled"
    _tell(evaluation, checkpoint, changed, files, f"{how} actions")
    if evaluation.films:
        files.remove_videos()
        _write_films(evaluation, _progress(checkpoint), files, in_words(changed))
    if evaluation.no_films:
        print(f"no video: {evaluation.no_films}")
    return evaluation


def evaluate_world_model_checkpoint(
    path: str, settings: list[Setting], json_file: Path | None = None, against: str | None = None
) -> WorldModelEvaluation:
    """Print the tables, write the numbers beside the checkpoint. `against`: a run to compare with."""
    checkpoint, config, changed, files = _prepared(path, settings, "eval_world_model", json_file)
    device = pick_device(config.device)
    model = load_world_model(checkpoint, device)
    refuse_other_env(checkpoint, config)
    other = None if against is None else load_other_world_model(against, path, config, device)
    evaluation = evaluate_world_model(config, model, device, other)
    _tell(evaluation, checkpoint, changed, files, "actions at random")
    return evaluation


def load_other_world_model(other: str, path: str, config: Config, device) -> WorldModel:
    """One that can be told the same episodes as that of `path`, whose config this is."""
    refuse_other_env(checkpoint_folder(other), config)
    steps = load_config(checkpoint_folder(other) / "config.yaml", inherit=False).rollout.action_steps
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
    checkpoint, config, changed, files = _prepared(path, settings, "eval_exploration", json_file)
    refuse_world_model(path, config)
    device = pick_device(config.device)
    policy = load_policy(checkpoint, device)
    refuse_other_env(checkpoint, config)
    evaluation = evaluate_exploration(config, policy, device)
    _tell(evaluation, checkpoint, changed, files, "sampled actions")
    return evaluation


def _prepared(
    path: str, settings: list[Setting], kind: str, json_file: Path | None
) -> tuple[Path, Config, dict[str, Any], EvaluationFiles]:
    """The checkpoint of what was given as `path`, its config now, what of that makes other episodes, and where the
    numbers go; refused where they could not be written."""
    checkpoint = checkpoint_folder(path)
    config = config_of(checkpoint, settings)
    changed = changed_episodes(checkpoint, config)
    files = EvaluationFiles.of(Path(path) if Path(path).is_dir() else checkpoint, kind, changed, json_file)
    files.check_numbers()
    return checkpoint, config, changed, files


def _tell(
    evaluation: Evaluation | WorldModelEvaluation | ExplorationEvaluation,
    checkpoint: Path,
    changed: dict[str, Any],
    files: EvaluationFiles,
    how: str,
) -> None:
    """Print the table and write the numbers, both with what they are of."""
    other = f", with {in_words(changed)}" if changed else ""
    print(f"{checkpoint}: {evaluation.episodes} held-out episodes, {how}{other}")
    print(evaluation.table())
    about = {"checkpoint": str(checkpoint), "how": how, "settings": changed}
    print(f"numbers: {evaluation.write(files.json_file, about)}")


def _write_films(evaluation: Evaluation, progress: Progress, files: EvaluationFiles, settings: str) -> None:
    films = Films(files.folder)
    for number, film in enumerate(evaluation.films):
        video = films.film(f"{files.name}_{number}", "eval", film, progress, evaluation.spec, settings)
        print(f"video: {video}")
        # one after the other: nobody is kept waiting, and none is left out
        films.finish()


def _progress(checkpoint: Path) -> Progress:
    """How far the run had come."""
    try:
        return Progress(**load_training_state(checkpoint)["phase"]["progress"])
    except (CheckpointError, KeyError):  # weights alone, or a phase of one's own
        number = checkpoint.name.rpartition("-")[2]
        return Progress(updates=int(number) if number.isdecimal() else 0)


def config_of(checkpoint: Path, settings: list[Setting]) -> Config:
    file = checkpoint / "config.yaml"
    trained, config = load_config(file, inherit=False), load_config(file, settings, inherit=False)
    before, now = flatten(trained.dump()), flatten(config.dump())
    changed = [key for key in now if before.get(key) != now[key] and not key.startswith(FREE_TO_CHOOSE)]
    if changed:
        raise UserError(
            f"{', '.join(changed)}: cannot be changed after training; an evaluation takes {', '.join(FREE_TO_CHOOSE)}"
        )
    return config


def changed_episodes(checkpoint: Path, config: Config) -> dict[str, Any]:
    """The settings that make other episodes than those the checkpoint was trained for."""
    now = flatten(config.dump())
    unlike = unlike_episodes(load_config(checkpoint / "config.yaml", inherit=False), config, HOW_WORKED_OUT)
    return {key: now[key] for key in unlike if key in now}


def unlike_episodes(a: Config, b: Config, whatever: tuple[str, ...]) -> list[str]:
    """The settings by which the episodes of two configs differ, `whatever` some of env. say."""
    mine, theirs = flatten(a.dump()), flatten(b.dump())
    keys = [key for key in sorted(mine.keys() | theirs.keys()) if key.startswith("env.") and key not in whatever]
    unlike = [key for key in keys if mine.get(key) != theirs.get(key)]
    limit = "rollout.max_episode_steps"
    # none given is the env's own, which may be the same
    longer = mine[limit] != theirs[limit] and _limits(a) != _limits(b)
    return [*unlike, limit] if longer else unlike


def _limits(config: Config) -> list[int]:
    """Steps after which an episode is over, of each task."""
    tasks = getattr(config.env, "task", ())
    several = isinstance(tasks, tuple) and len(tasks) > 1
    alone = [config.env.model_copy(update={"task": (task,)}) for task in tasks] if several else [config.env]
    limits = []
    for one in alone:
        env = make_env(one, 1, config.rollout.max_episode_steps)
        limits.append(env.spec.max_episode_steps)
        env.close()
    return limits


def in_words(settings: dict[str, Any]) -> str:
    return " ".join(f"{key}={value_text(value)}" for key, value in settings.items())


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
