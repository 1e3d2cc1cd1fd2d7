"""Sparring: reinforcement-learning post-training for robot vision-language-action policies.

Importing this package imports nothing heavy: the names below are loaded at first use. The built-in tasks are registered
with gymnasium if gymnasium was imported before.
"""

import importlib
import sys

__version__ = "0.1.0"


def lazy_names(package: str, homes: dict[str, str]):
    """`__getattr__` and `__dir__` of a package that loads names at first use; `homes`: name -> its module."""

    def load(name: str):
        if name not in homes:
            raise AttributeError(f"module '{package}' has no attribute '{name}'; it offers {', '.join(homes)}")
        return getattr(importlib.import_module(f"{package}.{homes[name]}"), name)

    return load, lambda: sorted({*vars(sys.modules[package]), *homes})


_WHERE = {"Trainer": "api", "load_policy": "api", "load_config": "config.schema", "make_env": "envs.env"}
_WHERE |= {"make_policy": "policies.policy", "VLAModelInterface": "policies.vla.interface"}
_WHERE |= {"VLAPolicy": "policies.vla.policy", "load_vla_model": "policies.vla.load"}
_WHERE |= {"PPO": "algorithms.ppo", "GRPO": "algorithms.grpo"}
__all__ = list(_WHERE)
__getattr__, __dir__ = lazy_names("sparring", _WHERE)

# gymnasium.make("sparring:sparring/lift_d0") imports this module and then looks the id up
if "gymnasium" in sys.modules:
    importlib.import_module("sparring.envs.tabletop.tasks.registry").register()
