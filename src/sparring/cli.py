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
  sparring config finetune                                   every setting with its meaning
  sparring check gym:CartPole-v1                             is this env (or policy) fit for training?
  sparring tasks                                             what the built-in arm can be asked to do

overrides: ppo.clip_ratio=0.1 and --ppo.clip_ratio 0.1 are the same; a bare --num_episodes 500 works where the
name is unique. `sparring config PHASE` lists the keys.
exit codes: 0 done; 1 it failed; 2 something given is wrong (said in a sentence); 130 interrupted: the first Ctrl-C
saves a checkpoint, a second one gives up.
"""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # now, while a closed pipe can still be handled
    except UserError as error:
        print(f"sparring: {error}" if "\n" not in str(error) else f"sparring:\n{error}", file=sys.stderr)
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
        overrides, argv = split_overrides(argv, flags_of(argv[0]))
    arguments = build_parser().parse_args(argv)
    arguments.words = words
    return arguments.command(arguments, overrides) or 0


def build_parser() -> argparse.ArgumentParser:
    options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(
        "sparring", description="Train robot policies with reinforcement learning.", epilog=EPILOG, **options
    )
    parser.add_argument("--version", action="version", version=f"sparring {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="run a phase of training", epilog=EPILOG, **options)
    train.add_argument("phase", metavar="PHASE", help="finetune (task RL)")
    train.add_argument("--config", metavar="FILE", help="YAML or JSON file with what differs from the defaults")
    train.add_argument("--gpus", type=_positive, default=1, metavar="N", help="processes, one per GPU (on CPU: gloo)")
    train.add_argument("--envs", type=_positive, metavar="N", help="robots per process (rollout.n_envs)")
    train.add_argument("--output", metavar="DIR", help="run folder (default: outputs/<phase>_rl)")
    train.add_argument("--resume", metavar="auto|never|CHECKPOINT", help="default auto: go on where the folder stopped")
    train.add_argument("--dry-run", action="store_true", help="one rollout and one update, nothing written")
    train.set_defaults(command=_train)

    evaluate = commands.add_parser("eval", help="evaluate a trained policy on held-out episodes", **options)
    evaluate.add_argument("path", metavar="PATH", help="run folder or checkpoint folder")
    evaluate.add_argument("--episodes", type=_positive, metavar="N", help="how many (default: as configured)")
    evaluate.add_argument("--seed", type=int, metavar="S", help="of the held-out episodes (default: the run's)")
    evaluate.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    evaluate.add_argument("--videos", type=_count, default=0, metavar="N", help="episodes to record beside the table")
    evaluate.add_argument("--json", metavar="FILE", help="where to write the numbers (default: PATH/eval.json)")
    evaluate.set_defaults(command=_evaluate)

    check = commands.add_parser("check", help="is the installation, an env or a policy fit for training?", **options)
    check.add_argument(
        "name", nargs="?", metavar="NAME", help="gym:<id>, sparring/<task>, your.module:Class; none: all"
    )
    check.set_defaults(command=_check)

    tasks = commands.add_parser("tasks", help="list the built-in tasks and their ranges", **options)
    tasks.add_argument("--sheet", metavar="PNG", help="draw them all into this picture instead")
    tasks.set_defaults(command=_tasks)

    config = commands.add_parser("config", help="print the resolved config, each key with its meaning", **options)
    config.add_argument("phase", metavar="PHASE", nargs="?", default="finetune")
    config.add_argument("--config", metavar="FILE", help="YAML or JSON file with what differs from the defaults")
    config.set_defaults(command=_config)

    completion = commands.add_parser("completion", help="print a shell completion script", **options)
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(command=_completion)
    return parser


def _positive(text: str) -> int:
    return _count(text, least=1)


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got '{text}'")
    return int(text)


def _load(arguments, overrides):
    """The config of a command: its file, its overrides, its flags."""
    from sparring.config_text import parse_overrides
    from sparring.tree import load_config

    settings = parse_overrides(overrides)
    settings += _flag_settings(arguments, {"output": "output", "resume": "resume", "envs": "rollout.n_envs"})
    return load_config(arguments.config, settings, arguments.phase)


def _flag_settings(arguments, keys: dict[str, str]) -> list:
    from sparring.config_text import Setting

    given = {flag: getattr(arguments, flag, None) for flag in keys}
    return [Setting(keys[flag], value, f"--{flag}") for flag, value in given.items() if value is not None]


def _train(arguments, overrides) -> int:
    config = _load(arguments, overrides)
    if arguments.gpus > 1 and "RANK" not in os.environ:
        from sparring.launch import launch

        return launch(arguments.gpus, arguments.words)
    if arguments.dry_run:
        from sparring.dry_run import dry_run

        print(dry_run(config))
        return 0
    from sparring.run import Run

    run = Run(config)
    run.announce()
    if not run.run():
        return 130
    run.evaluate()
    return 0


def _evaluate(arguments, overrides) -> int:
    from sparring.config_text import parse_overrides
    from sparring.evaluate_run import evaluate_checkpoint

    settings = parse_overrides(overrides)
    settings += _flag_settings(arguments, {"episodes": "evaluation.episodes", "seed": "seed"})
    path = Path(arguments.json) if arguments.json else None
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


def _config(arguments, overrides) -> int:
    print(_load(arguments, overrides).to_yaml(), end="")
    return 0


def _completion(arguments, overrides) -> int:
    from sparring.completion import SCRIPTS

    print(SCRIPTS[arguments.shell], end="")
    return 0
