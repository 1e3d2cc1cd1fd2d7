"""`sparring eval`: a checkpoint, its env, held-out episodes."""

from pathlib import Path

from sparring.api import load_policy
from sparring.checkpoint import find_checkpoint
from sparring.config_text import Setting
from sparring.distributed import pick_device
from sparring.envs.make import make_env
from sparring.evaluate import Evaluation, evaluate
from sparring.record.pictures import filmstrip
from sparring.record.recorder import Recorder
from sparring.tree import load_config


def evaluate_checkpoint(
    path: str, settings: list[Setting], greedy: bool = True, videos: int = 0, json_file: Path | None = None
) -> Evaluation:
    """Print the table, write the numbers (and videos) beside the checkpoint."""
    checkpoint = find_checkpoint(path)
    config = load_config(checkpoint / "config.yaml", settings)
    device = pick_device(config.device)
    policy = load_policy(checkpoint, device)
    count = config.evaluation.episodes
    env = make_env(config.env, min(config.rollout.n_envs, count), config.rollout.max_episode_steps, device)
    try:
        evaluation = evaluate(
            policy, env, count, config.seed, policy.chunk, greedy, config.evaluation.baseline, films=videos
        )
        fps = env.spec.control_hz
    finally:
        env.close()
    print(f"{checkpoint}: {count} held-out episodes, {'greedy' if greedy else 'sampled'} actions")
    print(evaluation.table())
    print(f"numbers: {evaluation.write(json_file or Path(path) / 'evaluation.json')}")
    recorder = Recorder(Path(path))
    for number, film in enumerate(evaluation.films):
        recorder.image(f"eval_{number}", filmstrip(film.frames))
        print(f"video: {recorder.video(f'eval_{number}', film.frames, fps)}")
    return evaluation
