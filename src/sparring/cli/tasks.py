"""`sparring check`, `tasks` and `demos`: envs to train in, and demonstrations of the built-in tasks."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from sparring.cli.arguments import OPTIONS, count, flag_settings, positive
from sparring.errors import UserError
from sparring.policies import POLICIES


def add(commands) -> None:
    check = commands.add_parser("check", help="check the installation, an env or a policy before training", **OPTIONS)
    name = "gym:<id>, a task, a policy, your.module:Class or a dataset (default: the installation and the built-in arm)"
    check.add_argument("name", nargs="?", metavar="NAME", help=name)
    where = "folder of the contact sheet of all cameras (default: outputs/check)"
    check.add_argument("--output", metavar="DIR", help=where)
    offered: dict[str, Any] = {"name": lambda: ["tabletop", *POLICIES, *_task_names()]}
    check.set_defaults(command=_check, takes_overrides=True, offered=offered)
    tasks = commands.add_parser("tasks", help="list the built-in tasks and their ranges", **OPTIONS)
    tasks.add_argument("--sheet", metavar="PNG", help="draw all tasks to this image file instead of listing them")
    tasks.set_defaults(command=_tasks)
    demos = commands.add_parser("demos", help="record scripted experts as a dataset, or inspect one", **OPTIONS)
    what = "task(s) to record, or a dataset to inspect"
    demos.add_argument("what", metavar="TASK | show PATH", nargs="+", help=what)
    demos.add_argument("--episodes", type=positive, metavar="N", help="number of episodes to record")
    noise = "standard deviation of the noise added to actions (default: 0)"
    demos.add_argument("--noise", type=_number, default=0.0, metavar="X", help=noise)
    demos.add_argument("--output", metavar="DIR", help="folder of the dataset (default: outputs/demos/<task>)")
    demos.add_argument("--cameras", nargs="+", metavar="NAME", help="cameras to record (default: all)")
    size = "width and height of images in pixels (env.image_size)"
    demos.add_argument("--image-size", type=positive, metavar="N", help=size)
    demos.add_argument("--control-mode", metavar="MODE", help="meaning of an action (env.control_mode)")
    demos.add_argument("--seed", type=count, metavar="S", help="seed of the episodes (default: 0)")
    demos.add_argument("--workers", type=positive, default=1, metavar="K", help="recording processes (default: 1)")
    demos.add_argument("--keep-failures", action="store_true", help="also keep episodes in which the expert failed")
    pixels = "pixel format of the videos (default: yuv444p); browsers need yuv420p"
    demos.add_argument("--pixel-format", choices=["yuv420p", "yuv444p"], default="yuv444p", help=pixels)
    demos.add_argument("--config", metavar="FILE", help="YAML or JSON file with settings of the env")
    demos.add_argument("--sheet", metavar="PNG", help="with show: contact sheet to write (default: PATH/sheet.png)")
    offered = {
        "what": lambda: ["show", *_task_names()],
        "cameras": ["head", "wrist", "left_wrist", "right_wrist"],
        "control_mode": ["delta_qpos", "delta_ee_pos", "delta_ee", "qpos"],
    }
    demos.set_defaults(command=_demos, takes_overrides=True, offered=offered)


def _task_names() -> list[str]:
    from sparring.envs.tabletop.tasks.registry import TASKS

    return list(TASKS)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None


def _check(arguments: argparse.Namespace, overrides: list[str]) -> int:
    known = ("tabletop", *POLICIES, *_task_names())
    if arguments.name and arguments.name not in known and os.path.exists(arguments.name):
        _refuse_other_files(Path(arguments.name))
        if arguments.output:
            raise UserError(f"--output {arguments.output}: a dataset has no contact sheet; leave it out")
        return _check_dataset(arguments.name, overrides)
    from sparring.check.command import check

    return check(arguments.name, overrides, arguments.output and Path(arguments.output))


def _refuse_other_files(path: Path) -> None:
    what = f"'{path}' is no dataset, but a"
    if path.suffix in (".yaml", ".yml", ".json") and path.is_file():
        raise UserError(f"{what} config; write: sparring train --config {path} --dry-run")
    if path.suffix in (".pt", ".pth", ".ckpt", ".safetensors") and path.is_file():
        advice = f"sparring check POLICY tests the class of a policy; to load these weights, set pretrained={path}"
        raise UserError(f"{what} file of weights; {advice}")
    if (path / "config.yaml").is_file():
        raise UserError(f"{what} run or a checkpoint; write: sparring eval {path}")


def _check_dataset(path: str, overrides: list[str]) -> int:
    """Print what becomes of each key of a dataset, in the env of the settings or without any."""
    from sparring.config.schema import load_config
    from sparring.config.text import Setting, parse_overrides
    from sparring.data.chunks import ActionChunks
    from sparring.phases.demonstrations import (
        make_imitation_env,
        open_demonstrations,
        read_datasets,
        split_demonstrations,
    )

    settings = [*parse_overrides(overrides), Setting("imitate.demos", path, "command line")]
    config = load_config(None, settings, phase="imitate")
    datasets = read_datasets(config.imitate)
    env = make_imitation_env(config, datasets)
    (demos,) = found = open_demonstrations(config, datasets, env.spec)
    env.close()
    # what training refuses
    for part in filter(None, split_demonstrations(found, config)):
        ActionChunks(part, 1, env.spec, config.imitate.episodes)
    print("\n".join([*demos.report(), *(f"warning: {line}" for line in demos.warnings)]))
    fits = ", ".join(f"{name} {list(shape)}" for name, (shape, _) in env.spec.observation.items())
    print(f"ok: imitation in {config.env.name} reads {fits}, and an action of {env.spec.action_dim} entries")
    return 0


def _tasks(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.envs.tabletop.tasks.registry import describe
    from sparring.evaluation.files import terminal_width, text_table

    if arguments.sheet:
        from sparring.demos.show import task_rows
        from sparring.record.overlay import contact_sheet, write_png

        print(write_png(Path(arguments.sheet), contact_sheet(task_rows())))
    else:
        print(text_table([("task", "goal", "ranges"), *describe()], False, terminal_width(), spare=(2, 1)))
    return 0


def _demos(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.what[0] == "show":
        return _show_demos(arguments, overrides)
    from sparring.config.text import parse_overrides
    from sparring.demos.plan import Plan
    from sparring.demos.record import record

    if arguments.sheet:
        raise UserError("--sheet is only for `sparring demos show PATH`; remove it")
    if arguments.episodes is None:
        raise UserError("the number of episodes is missing; give --episodes N")
    keys = {name: f"env.{name}" for name in ("cameras", "image_size", "control_mode")} | {"seed": "seed"}
    settings = parse_overrides(overrides) + flag_settings(arguments, keys)
    noise, keep_failures, pixel_format = arguments.noise, arguments.keep_failures, arguments.pixel_format
    plan = Plan.of(arguments.what, arguments.config, settings, noise, keep_failures, pixel_format)
    base = Path(os.environ.get("OUTPUT_BASE") or "outputs")
    output = Path(arguments.output or base / "demos" / "_".join(arguments.what))
    try:
        recorded = record(plan, arguments.episodes, output, arguments.workers)
    except KeyboardInterrupt:
        print(f"interrupted; the same command resumes the recording in '{output}'", file=sys.stderr)
        return 130
    print(f"{output}: {len(recorded['episode_seeds'])} episodes of {recorded['episodes_tried']} tried")
    return 0


def _show_demos(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.data.demonstrations import Demonstrations
    from sparring.demos.show import moments, summary
    from sparring.record.overlay import contact_sheet, write_png

    if len(arguments.what) != 2 or overrides:
        raise UserError("expected one dataset: sparring demos show PATH")
    others = [word for word in arguments.argv if word.startswith("--") and word.split("=")[0] != "--sheet"]
    if others:
        raise UserError(f"{', '.join(others)}: `sparring demos show PATH` takes only --sheet; remove the others")
    demos = Demonstrations(arguments.what[1])
    print("\n".join(summary(demos)))
    if demos.cameras:
        sheet = Path(arguments.sheet) if arguments.sheet else demos.path / "sheet.png"
        print(f"sheet      {write_png(sheet, contact_sheet(moments(demos)))}")
    return 0
