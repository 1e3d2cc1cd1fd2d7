"""Run folders like those that training writes, without training."""

import json
from pathlib import Path

import numpy as np

from sparring.config.schema import load_config
from sparring.record.overlay import write_png
from sparring.record.videos import _write_video

BEGAN = 1_790_000_000.0
SYSTEM = {
    "sparring": "0.1.0",
    "python": "3.12.1",
    "torch": "2.13.0",
    "platform": "Linux",
    "cpus": 2,
    "device": "cpu",
    "gpu": None,
    "trainable": 12345,
    "frozen": 0,
    "command": "sparring train finetune",
}


def metrics_line(update: int, **more) -> dict:
    return {
        "episode": 8 * update,
        "avg_loss": 1 / update,
        "avg_acc": None,
        "episode_reward": float(update),
        "total_steps": 100 * update,
        "lr": 1e-3,
        "timestamp": BEGAN + 2.0 * update,
        "update": update,
        "rollout/success_rate": min(1.0, update / 20),
        "train/policy_loss": float(np.cos(update)),
        "perf/staleness": 0.75,
        "perf/behind_0": 0.25,
        "perf/behind_1": 0.75,
        "reward/reach": 0.1 * update,
    } | more


def write_lines(path: Path, lines: list[dict], mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def make_run(folder: Path, seed: int = 0, updates: int = 20, pictures: bool = False, **status) -> Path:
    """A run folder in the recorder's format."""
    folder.mkdir(parents=True)
    config = load_config({"seed": seed, "output": str(folder)})
    (folder / "config.yaml").write_text(config.to_yaml())
    write_lines(folder / "episode_metrics.jsonl", [metrics_line(update) for update in range(1, updates + 1)])
    rates = [(5, 0.2, 0.1, 0.4), (10, 0.9, 0.7, 0.97), (20, 0.8, 0.6, 0.9)]
    write_lines(
        folder / "evaluations.jsonl",
        [
            {
                "update": update,
                "total_steps": 100 * update,
                "episode": 8 * update,
                "timestamp": BEGAN + 2.0 * update,
                "eval/success_rate": rate,
                "eval/success_low": low,
                "eval/success_high": high,
                "eval/episodes": 20,
                "eval/reward": 10 * rate,
                "eval/random_success_rate": 0.05,
            }
            for update, rate, low, high in rates
        ],
    )
    stages = ("infer", 0.0, 0.5), ("simulate", 0.5, 1.5), ("learn", 1.5, 2.0)
    write_lines(
        folder / "timeline.jsonl",
        [
            {
                "who": "learner" if stage == "learn" else "collector",
                "stage": stage,
                "begin": BEGAN + 2 * update + begin,
                "end": BEGAN + 2 * update + end,
                "version": update,
            }
            for update in range(updates)
            for stage, begin, end in stages
        ],
    )
    content = {
        "state": "finished",
        "why": None,
        "pid": 1,
        "host": "elsewhere",
        "phase": "finetune",
        "task": "reach_d0",
        "started": BEGAN,
        "updated": BEGAN + 40,
        "ended": BEGAN + 40,
        "seconds": 40.0,
        "progress": {"updates": updates, "env_steps": 100 * updates, "episodes": 8 * updates, "fraction": 1.0},
        "best": {"success_rate": 0.9, "low": 0.7, "high": 0.97, "episodes": 20, "update": 10},
        "last": {"success_rate": 0.8, "low": 0.6, "high": 0.9, "episodes": 20, "update": 20},
        "system": SYSTEM,
    }
    (folder / "status.json").write_text(json.dumps(content | status))
    if pictures:
        add_pictures(folder)
    return folder


def add_pictures(folder: Path) -> None:
    """Two videos of two seconds with an index, and a sample image."""
    frames = [np.full((32, 64, 3), 10 * i, np.uint8) for i in range(20)]
    for number in (0, 1):
        _write_video(folder / "videos" / f"episode_000160_{number}.mp4", frames, 10)
    video = {"kind": "evaluation", "update": 20, "episode": 160, "task": "reach_d0", "reward": 3.5, "steps": 20}
    video |= {"cameras": ["head"], "strip": None}
    write_lines(
        folder / "videos" / "index.jsonl",
        [
            video | {"file": "videos/episode_000160_0.mp4", "success": True},
            video | {"file": "videos/episode_000160_1.mp4", "success": False},
        ],
    )
    write_png(folder / "samples" / "episode_0160_pred_vs_gt.png", np.full((8, 16, 3), 200, np.uint8))
