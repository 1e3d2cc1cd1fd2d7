"""Arguments shared by commands, and the config they describe. Imports nothing heavy: --help and completion need it."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.errors import visible

if TYPE_CHECKING:
    from sparring.config.schema import Config
    from sparring.config.text import Setting

OPTIONS: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
TRUST: dict[str, Any] = {"action": "store_true"}
TRUST["help"] = "import the code that another user's run or dataset names, and sign that folder (docs/security.md)"
EPILOG = """\
examples:
  sparring train finetune                                    PPO on reach_d0 of the built-in arm, about a minute
  sparring train finetune env.name=gym:CartPole-v1 --num_episodes 500
  sparring train finetune --config configs/cartpole.yaml ppo.clip_ratio=0.1 --output outputs/try1
  sparring train finetune --gpus 4 --envs 64                 64 robots on each of 4 GPUs
  sparring train finetune --dry-run                          one rollout, one update; prints shapes, memory, speed
  sparring eval outputs/finetune_rl --episodes 200           held-out episodes, intervals, random baseline
  sparring compare outputs/try1 outputs/try2                 paired test on the same held-out episodes
  sparring runs                                              run folders: state, progress, best success, size
  sparring prune outputs/try1 --keep-best 2 --dry-run        list the checkpoints that would be deleted
  sparring train teacher                                     a world model, trained on random actions
  sparring train student --teacher_path outputs/teacher_rl   an explorer with rewards from the world model
  sparring train adversarial --teacher_path outputs/teacher_rl --student_checkpoint outputs/student_rl
  sparring train all --envs 8 student.training.iterations=20 these three phases in order; resumes where it stopped
  sparring eval outputs/teacher_rl --world-model             predictions, compared with copying the last frame
  sparring config finetune                                   every setting with its meaning
  sparring config import rl_config.yaml --output mine.yaml   convert a config of the original projects
  sparring check gym:CartPole-v1                             check an env (or a policy) before training
  sparring tasks                                             the tasks of the built-in arm
  sparring train finetune --dry-run rollout                  only the rollout
  sparring train imitate imitate.demos=outputs/demos/lift_d0 behaviour cloning from demonstrations
  sparring train finetune pretrained=outputs/imitate_rl      RL from a policy trained by imitation
  sparring demos lift_d0 --episodes 100 --noise 0.1          record a scripted expert as a LeRobot dataset
  sparring demos show outputs/demos/lift_d0                  describe a dataset and draw a contact sheet

overrides: ppo.clip_ratio=0.1 and --ppo.clip_ratio 0.1 are the same. The section may be omitted if the name is
unique: --num_episodes 500. `sparring config PHASE` lists the keys.
exit codes: 0 success; 1 failure; 2 invalid input, explained in a one-line error; 130 interrupted; others:
docs/commands.md. The first Ctrl-C saves a checkpoint after the current update, the second exits at once.
"""


def count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got '{text}'")
    return int(text)


positive = partial(count, least=1)


def config_of(arguments: argparse.Namespace, overrides: list[str], to_run: bool = True) -> "Config":
    from sparring.config.schema import configure
    from sparring.config.text import Setting

    given = settings_of(arguments, overrides) + flag_settings(arguments, {"output": "output", "resume": "resume"})
    given.append(Setting("phase", arguments.phase, "command line"))
    config, notes = configure(given, inherit=True, to_run=to_run)
    # not again in the processes that this command starts
    if "RANK" not in os.environ:
        for line in notes:
            print(visible(line), file=sys.stderr)
    return config


def settings_of(arguments: argparse.Namespace, overrides: list[str]) -> "list[Setting]":
    from sparring.config.text import parse_overrides, read_settings
    from sparring.config.trust import warn_of_code

    given = read_settings(arguments.config) if arguments.config else []
    warn_of_code(Path(arguments.config or ""), given)
    return given + parse_overrides(overrides) + flag_settings(arguments, {"envs": "rollout.n_envs"})


def flag_settings(arguments: argparse.Namespace, keys: dict[str, str]) -> "list[Setting]":
    from sparring.config.text import Setting

    values = {flag: getattr(arguments, flag, None) for flag in keys}
    given = {flag: value for flag, value in values.items() if value is not None}
    return [Setting(keys[flag], value, f"--{flag.replace('_', '-')}") for flag, value in given.items()]
