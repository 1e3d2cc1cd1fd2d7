"""`sparring config`."""

import argparse
import sys
from contextlib import suppress
from pathlib import Path

from sparring.cli.arguments import OPTIONS, config_of
from sparring.errors import UserError
from sparring.phases import PHASES


def add(commands) -> None:
    about = "print the resolved config, each key with its meaning; or put a config of the originals into our words"
    config = commands.add_parser("config", help=about, **OPTIONS)
    what = "phase to print (default: finetune), or a file, and the phase it is for if it does not say"
    config.add_argument("what", metavar="PHASE | import FILE", nargs="*", help=what)
    config.add_argument("--config", metavar="FILE", help="YAML or JSON file with what differs from the defaults")
    config.add_argument("--output", metavar="YAML", help="with import: where to write it (default: print it)")
    config.set_defaults(command=_config, takes_overrides=True, offered={"what": [*PHASES, "import"]})


def _config(arguments: argparse.Namespace, overrides: list[str]) -> int:
    if arguments.what[:1] == ["import"]:
        return _import_config(arguments, overrides)
    if len(arguments.what) > 1 or arguments.output:
        raise UserError("expected `sparring config PHASE`, or `sparring config import FILE [PHASE] [--output YAML]`")
    arguments.phase = (arguments.what or ["finetune"])[0]
    print(config_of(arguments, overrides, to_run=False).to_yaml(), end="")
    return 0


def _import_config(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.config.convert import import_config

    if not 2 <= len(arguments.what) <= 3 or overrides or arguments.config:
        raise UserError("expected `sparring config import FILE [PHASE] [--output YAML]`, and nothing else")
    text, notes = import_config(*arguments.what[1:])
    for line in notes:
        print(line, file=sys.stderr)
    if not arguments.output:
        print(text, end="")
        return 0
    output = Path(arguments.output)
    if output.is_file():
        raise UserError(f"--output {output}: is there already, and stays; choose another name")
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        with suppress(OSError):
            output.unlink()
        raise UserError(f"--output {output}: cannot write there ({error.strerror})") from None
    print(arguments.output)
    return 0
