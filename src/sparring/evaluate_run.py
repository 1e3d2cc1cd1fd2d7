"""`sparring eval`: a checkpoint, its env, held-out episodes."""

from pathlib import Path

from sparring.api import load_policy
from sparring.checkpoint import checkpoint_folder, load_spec, spec_differences
from sparring.config_text import Setting, flatten
from sparring.distributed import pick_device
from sparring.envs.make import make_env
from sparring.errors import UserError
from sparring.evaluate import Evaluation, evaluate_config
from sparring.record.recorder import Recorder
from sparring.tree import Config, load_config

# what an evaluation may choose anew; the rest was decided when the policy was trained
FREE_TO_CHOOSE = ("env.", "rollout.n_envs", "rollout.max_episode_steps", "evaluation.", "seed", "device", "threads")


def evaluate_checkpoint(
    path: str, settings: list[Setting], greedy: bool = True, videos: int = 0, json_file: Path | None = None
) -> Evaluation:
    """Print the table, write the numbers (and videos) beside the checkpoint."""
    checkpoint = checkpoint_folder(path)
    folder = Path(path) if Path(path).is_dir() else checkpoint
    # beside evaluation.json, which is the run's own
    json_file = json_file or folder / "eval.json"
    if not json_file.parent.is_dir():
        raise UserError(f"--json {json_file}: there is no folder '{json_file.parent}'; make it first")
    config = _config_of(checkpoint, settings)
    device = pick_device(config.device)
    policy = load_policy(checkpoint, device)
    _refuse_other_env(checkpoint, config)
    evaluation = evaluate_config(config, policy, device, greedy, videos)
    print(f"{checkpoint}: {evaluation.episodes} held-out episodes, {'greedy' if greedy else 'sampled'} actions")
    print(evaluation.table())
    print(f"numbers: {evaluation.write(json_file)}")
    recorder = Recorder(folder)
    for number, film in enumerate(evaluation.films):
        print(f"video: {recorder.film(f'eval_{number}', film.frames, evaluation.fps)}")
    return evaluation


def _config_of(checkpoint: Path, settings: list[Setting]) -> Config:
    trained, config = load_config(checkpoint / "config.yaml"), load_config(checkpoint / "config.yaml", settings)
    before, now = flatten(trained.dump()), flatten(config.dump())
    changed = [key for key in now if before.get(key) != now[key] and not key.startswith(FREE_TO_CHOOSE)]
    if changed:
        raise UserError(
            f"{', '.join(changed)}: cannot be changed after training; an evaluation takes {', '.join(FREE_TO_CHOOSE)}"
        )
    return config


def _refuse_other_env(checkpoint: Path, config: Config) -> None:
    env = make_env(config.env, 1, config.rollout.max_episode_steps)
    env.close()
    differences = spec_differences(load_spec(checkpoint), env.spec)
    if differences:
        raise UserError("\n".join(["the policy was trained in another env:", *differences]))
