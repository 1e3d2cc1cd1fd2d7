"""`sparring check` and `sparring tasks`."""

import argparse
from pathlib import Path

from sparring.cli.arguments import OPTIONS
from sparring.envs import ENVS
from sparring.policies import POLICIES


def add(commands) -> None:
    check = commands.add_parser("check", help="is the installation, an env or a policy fit for training?", **OPTIONS)
    name = "gym:<id>, sparring/<task>, your.module:Class; none: all"
    check.add_argument("name", nargs="?", metavar="NAME", help=name)
    check.set_defaults(command=_check, takes_overrides=True, offered={"name": _names})
    tasks = commands.add_parser("tasks", help="list the built-in tasks and their ranges", **OPTIONS)
    tasks.add_argument("--sheet", metavar="PNG", help="draw them all into this picture instead")
    tasks.set_defaults(command=_tasks)


def _names() -> list[str]:
    from sparring.envs.tabletop.tasks.registry import TASKS

    return [*ENVS, *POLICIES, *(f"sparring/{task}" for task in TASKS)]


def _check(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.evaluation.check import check

    return check(arguments.name, overrides)


def _tasks(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.envs.tabletop.tasks.registry import describe
    from sparring.evaluation.files import text_table

    if arguments.sheet:
        from sparring.demos.show import task_rows
        from sparring.record.overlay import contact_sheet, write_png

        print(write_png(Path(arguments.sheet), contact_sheet(task_rows())))
    else:
        print(text_table([("task", "goal", "ranges"), *describe()], rule=False))
    return 0
