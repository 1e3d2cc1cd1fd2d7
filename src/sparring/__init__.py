"""Sparring: reinforcement-learning post-training for robot vision-language-action policies.

Importing this package imports nothing heavy; the names below are loaded when first used.
"""

import importlib

__version__ = "0.1.0"

_WHERE = {
    "Trainer": "sparring.api",
    "load_policy": "sparring.api",
    "load_config": "sparring.config.schema",
    "make_env": "sparring.envs.env",
    "make_policy": "sparring.policies.policy",
    "VLAModelInterface": "sparring.policies.vla.interface",
    "VLAPolicy": "sparring.policies.vla.policy",
    "load_vla_model": "sparring.policies.vla.load",
    "PPO": "sparring.algorithms.ppo",
    "GRPO": "sparring.algorithms.grpo",
}
__all__ = list(_WHERE)


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])


def __getattr__(name: str):
    if name not in _WHERE:
        raise AttributeError(f"module 'sparring' has no attribute '{name}'; it offers {', '.join(_WHERE)}")
    return getattr(importlib.import_module(_WHERE[name]), name)
