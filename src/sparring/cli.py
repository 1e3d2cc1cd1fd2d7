"""The command line. Parsing, help and completion never import torch; a command imports what it needs."""

import argparse
import os
import sys
from pathlib import Path

from sparring import __version__
from sparring.errors import UserError

EPILOG = """\
examples:
  sparring train finetune                                    the built-in arm learns reach_d0, about a minute
  sparring train finetune env.name=gym:CartPole-v1 --num_episodes 500
  sparring train finetune --config configs/cartpole.yaml ppo.clip_ratio=0.1 --output outputs/try1
  sparring train finetune --gpus 4 --envs 64                 64 robots on each of 4 GPUs
  sparring train finetune --dry-run                          one rollout, one update: shapes, memory, speed, parity
  sparring eval outputs/finetune_rl --episodes 200           held-out episodes, intervals, random baseline
  sparring train teacher                                     a world model of what random actions lead to
  sparring train student --teacher_path outputs/teacher_rl   an explorer, paid for what the world model does not know
  sparring train adversarial --teacher_path outputs/teacher_rl --student_checkpoint outputs/student_rl
  sparring train all --envs 8 student.training.iterations=20 the three, one after the other; goes on where it stopped
  sparring eval outputs/teacher_rl --world-model             how well it foretells, beside copying the last frame
  sparring config finetune                                   every setting with its meaning
  sparring config import rl_config.yaml --output mine.yaml   a config of the originals, in our words
  sparring check gym:CartPole-v1                             is this env (or policy) fit for training?
  sparring tasks                                             what the built-in arm can be asked to do
  sparring train finetune --dry-run rollout                  only the rollout
  sparring train imitate imitate.demos=outputs/demos/lift_d0 behaviour cloning; then fine-tune what came of it:
  sparring train finetune pretrained=outputs/imitate_rl
  sparring demos lift_d0 --episodes 100 --noise 0.1          record a scripted expert as a LeRobot dataset
  sparring demos show outputs/demos/lift_d0                  what a dataset holds, and a contact sheet

overrides: ppo.clip_ratio=0.1 and --ppo.clip_ratio 0.1 are the same; a bare --num_episodes 500 works where the
name is unique. `sparring config PHASE` lists the keys.
exit codes: 0 done; 1 it failed; 2 something given is wrong (said in a sentence); 130 interrupted: the first Ctrl-C
saves a checkpoint, a second one gives up.
"""

# what --dry-run tries, in the words of ManiFlow's test_rl_rollout.py
DRY_RUNS = ("rollout", "training")


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # now, while a closed pipe can still be handled
    except UserError as error:
        print(f"sparring: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `sparring config finetune | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    from sparring.completion import TAKES_OVERRIDES, candidates, flags_of
    from sparring.config_text import split_overrides

    if argv[:1] == ["__complete"]:
        print("\n".join(candidates(argv[1:])))
        return 0
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # your.module:Class is found beside you, as with `python -m`
    words, overrides = argv, []
    # argparse would take `ppo.gamma=1` for a PHASE and knows nothing of `--ppo.gamma 1`
    if argv[:1] and argv[0] in TAKES_OVERRIDES:
        overrides, argv = split_overrides(_with_dry_run_in_one_word(argv), flags_of(argv[0]))
    arguments = build_parser().parse_args(argv)
    arguments.words = words
    return arguments.command(arguments, overrides) or 0


_OPTIONS = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sparring", description="Train robot policies with reinforcement learning.", epilog=EPILOG, **_OPTIONS
    )
    parser.add_argument("--version", action="version", version=f"sparring {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands)
    _add_eval(commands)

    check = commands.add_parser("check", help="is the installation, an env or a policy fit for training?", **_OPTIONS)
    check.add_argument(
        "name", nargs="?", metavar="NAME", help="gym:<id>, sparring/<task>, your.module:Class; none: all"
    )
    check.set_defaults(command=_check)

    tasks = commands.add_parser("tasks", help="list the built-in tasks and their ranges", **_OPTIONS)
    tasks.add_argument("--sheet", metavar="PNG", help="draw them all into this picture instead")
    tasks.set_defaults(command=_tasks)

    _add_demos(commands)

    config = commands.add_parser(
        "config",
        help="print the resolved config, each key with its meaning; or put a config of the originals into our words",
        **_OPTIONS,
    )
    config.add_argument(
        "what",
        metavar="PHASE | import FILE",
        nargs="*",
        help="phase to print (default: finetune), or a file, and the phase it is for if it does not say",
    )
    config.add_argument("--config", metavar="FILE", help="YAML or JSON file with what differs from the defaults")
    config.add_argument("--output", metavar="YAML", help="with import: where to write it (default: print it)")
    config.set_defaults(command=_config)

    completion = commands.add_parser("completion", help="print a shell completion script", **_OPTIONS)
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(command=_completion)
    return parser


def _add_train(commands) -> None:
    train = commands.add_parser("train", help="run a phase of training", epilog=EPILOG, **_OPTIONS)
    train.add_argument(
        "phase",
        metavar="PHASE",
        help="finetune (task RL), imitate (demonstrations), teacher (world model), student (explorer), adversarial "
        "(both), all (teacher, student, adversarial)",
    )
    train.add_argument("--config", metavar="FILE", help="YAML or JSON file with what differs from the defaults")
    train.add_argument("--gpus", type=_positive, default=1, metavar="N", help="processes, one per GPU (on CPU: gloo)")
    train.add_argument("--envs", type=_positive, metavar="N", help="robots per process (rollout.n_envs)")
    train.add_argument("--output", metavar="DIR", help="run folder (default: outputs/<phase>_rl)")
    train.add_argument("--resume", metavar="auto|never|CHECKPOINT", help="default auto: go on where the folder stopped")
    train.add_argument(
        "--dry-run",
        choices=DRY_RUNS,
        metavar="rollout",
        help="one rollout and one update (or the rollout alone), nothing written",
    )
    train.set_defaults(command=_train)


def _add_eval(commands) -> None:
    evaluate = commands.add_parser("eval", help="evaluate a trained policy on held-out episodes", **_OPTIONS)
    evaluate.add_argument("path", metavar="PATH", help="run folder or checkpoint folder")
    evaluate.add_argument("--episodes", type=_positive, metavar="N", help="how many (default: as configured)")
    evaluate.add_argument("--seed", type=int, metavar="S", help="of the held-out episodes (default: the run's)")
    evaluate.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--videos", type=_count, default=0, metavar="N", help="episodes to record beside the table")
    evaluate.add_argument("--json", metavar="FILE", help="where to write the numbers (default: PATH/eval.json)")
    evaluate.add_argument(
        "--world-model", action="store_true", help="evaluate a teacher's world model: what it foretells"
    )
    evaluate.add_argument("--exploration", action="store_true", help="what a policy touches and where it gets to")
    evaluate.add_argument("--against", metavar="PATH", help="with --world-model: another one, on the same episodes")
    evaluate.set_defaults(command=_evaluate)


def _add_demos(commands) -> None:
    demos = commands.add_parser("demos", help="record scripted experts as a dataset, or look into one", **_OPTIONS)
    demos.add_argument(
        "what", metavar="TASK | show PATH", nargs="+", help="task(s) to record, or a dataset to look into"
    )
    demos.add_argument("--episodes", type=_positive, metavar="N", help="how many to record")
    demos.add_argument(
        "--noise", type=_number, default=0.0, metavar="X", help="deviation added to actions (default: 0)"
    )
    demos.add_argument("--output", metavar="DIR", help="folder of the dataset (default: outputs/demos/<task>)")
    demos.add_argument("--cameras", nargs="+", metavar="NAME", help="what is seen (default: all of the robot's)")
    demos.add_argument("--image-size", type=_positive, metavar="N", help="pixels a side (env.image_size)")
    demos.add_argument("--control-mode", metavar="MODE", help="what an action means (env.control_mode)")
    demos.add_argument("--seed", type=_count, metavar="S", help="of the episodes (default: 0)")
    demos.add_argument("--workers", type=_positive, default=1, metavar="K", help="processes (default: 1)")
    demos.add_argument("--keep-failures", action="store_true", help="keep episodes that the expert failed, too")
    demos.add_argument(
        "--pixel-format", choices=["yuv420p", "yuv444p"], default="yuv444p", help="of the videos; yuv420p for browsers"
    )
    demos.add_argument("--config", metavar="FILE", help="YAML or JSON file with the env's settings")
    demos.add_argument("--sheet", metavar="PNG", help="with show: the contact sheet (default: PATH/sheet.png)")
    demos.set_defaults(command=_demos)


def _with_dry_run_in_one_word(argv: list[str]) -> list[str]:
    """`--dry-run rollout` -> `--dry-run=rollout`: argparse would take any word that follows for its value."""
    words = []
    for word in argv:
        if words[-1:] == ["--dry-run=training"] and word in DRY_RUNS:
            words[-1] = f"--dry-run={word}"
        else:
            words.append("--dry-run=training" if word == "--dry-run" else word)
    return words


def _positive(text: str) -> int:
    return _count(text, least=1)


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got '{text}'")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None


def _load(arguments, overrides, to_run: bool = True):
    """The config of a command: its file, its overrides, its flags."""
    from sparring.config_text import Setting
    from sparring.inherit import told, with_inherited
    from sparring.tree import build_config, reading_of

    given = _given(arguments, overrides)
    given += _flag_settings(arguments, {"output": "output", "resume": "resume"})
    given.append(Setting("phase", arguments.phase, "command line"))
    settings = with_inherited(given)
    config = build_config(settings, to_run)
    # once: not in the processes that this command starts
    if "RANK" not in os.environ:
        for line in [*reading_of(given).told(), *told(settings[: len(settings) - len(given)], config)]:
            print(line, file=sys.stderr)
    return config


def _given(arguments, overrides) -> list:
    """What a command's file and overrides say, and --envs."""
    from sparring.config_text import parse_overrides, read_settings

    given = read_settings(arguments.config) if arguments.config else []
    return given + parse_overrides(overrides) + _flag_settings(arguments, {"envs": "rollout.n_envs"})


def _flag_settings(arguments, keys: dict[str, str]) -> list:
    from sparring.config_text import Setting

    given = {flag: getattr(arguments, flag, None) for flag in keys}
    # argparse has `image_size` for --image-size
    named = {flag: f"--{flag.replace('_', '-')}" for flag in keys}
    return [Setting(keys[flag], value, named[flag]) for flag, value in given.items() if value is not None]


def _train(arguments, overrides) -> int:
    if arguments.phase == "all":
        return _train_all(arguments, overrides)
    config = _load(arguments, overrides)
    if arguments.gpus > 1 and "RANK" not in os.environ:
        from sparring.launch import launch

        return launch(arguments.gpus, arguments.words, config.rollout.watchdog_s, config.run_folder)
    if arguments.dry_run:
        from sparring.dry_run import dry_run

        print(dry_run(config, only_rollout=arguments.dry_run == "rollout"))
        return 0
    from sparring.run import Run

    run = Run(config)
    run.announce()
    if not run.run():
        return 130
    run.evaluate()
    return 0


def _train_all(arguments, overrides) -> int:
    from sparring.chain import train_all

    if arguments.dry_run:
        raise UserError("--dry-run goes with a phase; try teacher first, the others start from what it leaves")
    output = Path(arguments.output or os.environ.get("OUTPUT_BASE", "outputs"))
    return train_all(_given(arguments, overrides), output, arguments.gpus, arguments.resume or "auto")


def _evaluate(arguments, overrides) -> int:
    from sparring.config_text import parse_overrides
    from sparring.evaluate_run import evaluate_checkpoint, evaluate_explorer_checkpoint, evaluate_world_model_checkpoint

    settings = parse_overrides(overrides)
    settings += _flag_settings(arguments, {"episodes": "evaluation.episodes", "seed": "seed"})
    path = Path(arguments.json) if arguments.json else None
    if arguments.against and not arguments.world_model:
        raise UserError("--against goes with --world-model only; leave it out")
    if arguments.world_model and arguments.exploration:
        raise UserError("--world-model is about world models, --exploration about policies; give one of them")
    if (arguments.world_model or arguments.exploration) and (arguments.stochastic or arguments.videos):
        raise UserError("--stochastic and --videos go with neither --world-model nor --exploration; leave them out")
    if arguments.world_model:
        evaluate_world_model_checkpoint(arguments.path, settings, path, arguments.against)
        return 0
    if arguments.exploration:
        evaluate_explorer_checkpoint(arguments.path, settings, path)
        return 0
    evaluate_checkpoint(arguments.path, settings, not arguments.stochastic, arguments.videos, path)
    return 0


def _check(arguments, overrides) -> int:
    from sparring.check import check

    return check(arguments.name, overrides)


def _tasks(arguments, overrides) -> int:
    from sparring.envs.tabletop.tasks import describe

    if arguments.sheet:
        from sparring.gallery import task_rows
        from sparring.record.pictures import write_png
        from sparring.record.sheet import contact_sheet

        print(write_png(Path(arguments.sheet), contact_sheet(task_rows())))
        return 0
    rows = [("task", "goal", "ranges"), *describe()]
    widths = [max(len(str(row[i])) for row in rows) for i in range(3)]
    for row in rows:
        print("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _demos(arguments, overrides) -> int:
    if arguments.what[0] == "show":
        return _show_demos(arguments, overrides)
    from sparring.config_text import parse_overrides
    from sparring.demos.config import demo_config, demo_folder
    from sparring.demos.plan import Plan
    from sparring.demos.record import record

    if arguments.sheet:
        raise UserError("--sheet goes with `sparring demos show PATH` only; leave it out")
    if arguments.episodes is None:
        raise UserError("how many episodes? give --episodes N")
    keys = {name: f"env.{name}" for name in ("cameras", "image_size", "control_mode")} | {"seed": "seed"}
    settings = parse_overrides(overrides) + _flag_settings(arguments, keys)
    config = demo_config(arguments.what, arguments.config, settings)
    plan = Plan(
        config.env,
        config.rollout.max_episode_steps,
        config.seed,
        arguments.noise,
        arguments.keep_failures,
        arguments.pixel_format,
    )
    output = Path(arguments.output) if arguments.output else demo_folder(arguments.what)
    try:
        told = record(plan, arguments.episodes, output, arguments.workers)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on where '{output}' stopped", file=sys.stderr)
        return 130
    print(f"{output}: {len(told['episode_seeds'])} episodes of {told['episodes_tried']} tried")
    return 0


def _show_demos(arguments, overrides) -> int:
    from sparring.data.demonstrations import Demonstrations
    from sparring.demos.show import moments, summary
    from sparring.record.pictures import write_png
    from sparring.record.sheet import contact_sheet

    if len(arguments.what) != 2 or overrides:
        raise UserError("expected one dataset: sparring demos show PATH")
    useless = [word for word in arguments.words if word.startswith("--") and word.split("=")[0] != "--sheet"]
    if useless:
        raise UserError(f"{', '.join(useless)}: only --sheet goes with `sparring demos show PATH`; leave it out")
    demos = Demonstrations(arguments.what[1])
    print("\n".join(summary(demos)))
    if demos.cameras:
        sheet = Path(arguments.sheet) if arguments.sheet else demos.path / "sheet.png"
        print(f"pictures   {write_png(sheet, contact_sheet(moments(demos)))}")
    return 0


def _config(arguments, overrides) -> int:
    if arguments.what[:1] == ["import"]:
        return _import_config(arguments, overrides)
    if len(arguments.what) > 1 or arguments.output:
        raise UserError("expected `sparring config PHASE`, or `sparring config import FILE [PHASE] [--output YAML]`")
    arguments.phase = (arguments.what or ["finetune"])[0]
    print(_load(arguments, overrides, to_run=False).to_yaml(), end="")
    return 0


def _import_config(arguments, overrides) -> int:
    from sparring.config_import import import_config

    if not 2 <= len(arguments.what) <= 3 or overrides or arguments.config:
        raise UserError("expected `sparring config import FILE [PHASE] [--output YAML]`, and nothing else")
    text, told = import_config(*arguments.what[1:])
    for line in told:
        print(line, file=sys.stderr)
    if not arguments.output:
        print(text, end="")
        return 0
    try:
        Path(arguments.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {arguments.output}: cannot write there ({error.strerror})") from None
    print(arguments.output)
    return 0


def _completion(arguments, overrides) -> int:
    from sparring.completion import SCRIPTS

    print(SCRIPTS[arguments.shell], end="")
    return 0
