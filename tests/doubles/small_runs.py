"""Runs of a few seconds, and helpers that read and seal their files."""

import json
import os
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

from sparring.config.schema import load_config
from sparring.processes.manifest import entry, read_manifest, write_manifest

SMALL = {
    "env": {"name": "gym:CartPole-v1"},
    "policy": {"hidden": [8]},
    "rollout": {"n_envs": 2, "steps": 16, "render_episodes": 0},
    "ppo": {"mini_batch_size": 16, "ppo_epochs": 1},
    "training": {"iterations": 2},
    "evaluation": {"episodes": 2},
    "logging": {"console_level": "ERROR"},
    "device": "cpu",
}


def config_in(folder, **more):
    return load_config(SMALL | {"output": str(folder)} | more)


def seal(checkpoint: Path, **about) -> None:
    """Write a signed manifest of a checkpoint's present files, as if they had been saved in this state."""
    manifest = read_manifest(checkpoint) or {}
    kept = {name: value for name, value in manifest.items() if name not in ("format", "kind", "files", "hmac")}
    files = {name: entry(checkpoint / name) for name in manifest["files"]}
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        parts = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
        kept["tensors"] = {name: [part.get_dtype(), part.get_shape()] for name, part in parts.items()}
    write_manifest(checkpoint, "checkpoint", files, **kept | {"config": files["config.yaml"]["sha256"]} | about)


def status_in(folder) -> dict:
    """status.json without its checksum."""
    status = json.loads((folder / "status.json").read_text())
    return {name: value for name, value in status.items() if name != "crc"}


DOUBLES = Path(__file__).parent
# all three phases, in seconds
SHORT = ["device=cpu", "env.threads=1", "env.image_size=32", "rollout.n_envs=2", "rollout.steps=4", "threads=1"]
SHORT += [
    "rollout.max_episode_steps=8",
    "rollout.action_steps=2",
    "rollout.render_episodes=0",
    "training.bptt_length=2",
]
SHORT += ["world_model.name=doubles_world_model:CopyingWorldModel", "training.iterations=1", "evaluation.episodes=2"]
SHORT += ["teacher.gradient_steps=2", "teacher.batch_size=2", "policy.hidden=[8]", "policy.channels=[4,4]"]
SHORT += ["policy.image_features=8", "ppo.mini_batch_size=4", "ppo.ppo_epochs=1", "evaluation.baseline=false"]
SHORT += ["rewards.disagreement=0", "rewards.prediction_error=1", "adversarial.wm_updates_per_iter=2"]
SHORT += ["adversarial.warmup_steps=0", "adversarial.held_out=0.5", "adversarial.generation_every=1"]


def start(output: Path, *more: str) -> subprocess.Popen:
    environment = dict(os.environ)
    words = [sys.executable, "-m", "sparring", "train", "all", "--output", str(output), *SHORT, *more]
    return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
