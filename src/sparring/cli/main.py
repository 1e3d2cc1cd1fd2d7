"""The command line. Parsing, help and completion never import torch; a command imports what it needs."""

import argparse
import os
import sys

from sparring import __version__
from sparring.cli import check, completion, config, demos, evaluate, report, runs, train
from sparring.cli.arguments import EPILOG, OPTIONS
from sparring.errors import UserError
from sparring.processes.heartbeat import is_first_to_say

# in the order of the help
COMMANDS = (
    train.add,
    evaluate.add_evaluate,
    evaluate.add_compare,
    report.add_report,
    report.add_watch,
    runs.add_runs,
    runs.add_prune,
    check.add_check,
    check.add_tasks,
    demos.add,
    config.add,
    completion.add,
)


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # now, while a closed pipe can still be handled
    except UserError as error:
        if is_first_to_say(str(error)):
            print(f"sparring: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `sparring config finetune | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(argv: list[str]) -> int:
    from sparring.cli.completion import TAKES_OVERRIDES, candidates, flags_of
    from sparring.config.text import split_overrides

    if argv[:1] == ["__complete"]:
        print("\n".join(candidates(argv[1:])))
        return 0
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # your.module:Class is found beside you, as with `python -m`
    words, overrides = argv, []
    # argparse would take `ppo.gamma=1` for a PHASE and knows nothing of `--ppo.gamma 1`
    if argv[:1] and argv[0] in TAKES_OVERRIDES:
        overrides, argv = split_overrides(train.with_dry_run_in_one_word(argv), flags_of(argv[0]))
    arguments, others = build_parser().parse_known_args(argv)
    if others:
        told = f"unrecognized arguments: {' '.join(others)}; `sparring {argv[0]} --help` shows what it takes"
        raise UserError(told + _how_settings_are_written(argv[0], others))
    arguments.words = words
    return arguments.command(arguments, overrides) or 0


def _how_settings_are_written(command: str, others: list[str]) -> str:
    from sparring.cli.completion import TAKES_OVERRIDES
    from sparring.config.schema import Config

    key, value = [*others, ""][:2]
    is_setting = command in TAKES_OVERRIDES and key.partition(".")[0] in Config.model_fields
    return f". Settings are written {key}={value}" if is_setting else ""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "sparring", description="Train robot policies with reinforcement learning.", epilog=EPILOG, **OPTIONS
    )
    parser.add_argument("--version", action="version", version=f"sparring {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser
