"""What the files, overrides and flags of a command say."""

import os
import sys


def config_of(arguments, overrides, to_run: bool = True):
    """The config of a command: its file, its overrides, its flags."""
    from sparring.config_text import Setting
    from sparring.inherit import told, with_inherited
    from sparring.tree import build_config, reading_of

    given = settings_of(arguments, overrides)
    given += flag_settings(arguments, {"output": "output", "resume": "resume"})
    given.append(Setting("phase", arguments.phase, "command line"))
    settings = with_inherited(given)
    config = build_config(settings, to_run)
    # once: not in the processes that this command starts
    if "RANK" not in os.environ:
        for line in [*reading_of(given).told(), *told(settings[: len(settings) - len(given)], config)]:
            print(line, file=sys.stderr)
    return config


def settings_of(arguments, overrides) -> list:
    """What a command's file and overrides say, and --envs."""
    from sparring.config_text import parse_overrides, read_settings

    given = read_settings(arguments.config) if arguments.config else []
    return given + parse_overrides(overrides) + flag_settings(arguments, {"envs": "rollout.n_envs"})


def flag_settings(arguments, keys: dict[str, str]) -> list:
    from sparring.config_text import Setting

    given = {flag: getattr(arguments, flag, None) for flag in keys}
    # argparse has `image_size` for --image-size
    named = {flag: f"--{flag.replace('_', '-')}" for flag in keys}
    return [Setting(keys[flag], value, named[flag]) for flag, value in given.items() if value is not None]
