"""Runs of a moment, and what they tell of themselves."""

import json

from sparring.tree import load_config

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


def status_in(folder) -> dict:
    return json.loads((folder / "status.json").read_text())
