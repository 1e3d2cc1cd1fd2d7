"""`sparring config` prints or converts a config; `sparring completion` completes commands, flags and settings."""

import argparse
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

from sparring import algorithms, envs, phases, policies
from sparring.cli.arguments import OPTIONS, TRUST, config_of
from sparring.errors import UserError, visible

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

SCRIPTS = {
    "bash": """\
# eval "$(sparring completion bash)"
_sparring() {
  local word="${COMP_LINE:0:COMP_POINT}"; word="${word##* }"
  local words; read -ra words <<< "${COMP_LINE:0:COMP_POINT}"
  [ -z "$word" ] && words+=("")
  COMPREPLY=($(sparring __complete "${words[@]:1}"))
  # bash splits words at '=': offer only the part after it
  [[ "$word" == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
complete -o default -F _sparring sparring
""",
    "zsh": """\
# eval "$(sparring completion zsh)"
_sparring() { compadd -- $(sparring __complete "${words[@]:1:$((CURRENT-1))}") }
compdef _sparring sparring
""",
    "fish": """\
# sparring completion fish | source
complete -c sparring -f -a '(sparring __complete (commandline -opc)[2..] (commandline -ct))'
""",
}


def add(commands) -> None:
    about = "print the resolved config, each key with its meaning; or convert a config of the original projects"
    config = commands.add_parser("config", help=about, **OPTIONS)
    what = "phase to print (default: finetune), or a file to import and its phase (default: the phase in the file)"
    config.add_argument("what", metavar="PHASE | import FILE", nargs="*", help=what)
    config.add_argument("--config", metavar="FILE", help="YAML or JSON file with settings other than the defaults")
    config.add_argument("--output", metavar="YAML", help="with import: file to write (default: print it)")
    config.add_argument("--trust", **TRUST)
    config.set_defaults(command=_config, takes_overrides=True, offered={"what": [*phases.PHASES, "import"]})
    completion = commands.add_parser("completion", help="print a shell completion script", **OPTIONS)
    completion.add_argument("shell", choices=list(SCRIPTS))
    completion.set_defaults(command=_completion)


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
    from sparring.processes.files import write_whole

    if not 2 <= len(arguments.what) <= 3 or overrides or arguments.config:
        raise UserError("expected `sparring config import FILE [PHASE] [--output YAML]` without other arguments")
    text, notes = import_config(*arguments.what[1:])
    for line in notes:
        print(visible(line), file=sys.stderr)
    if not arguments.output:
        print(text, end="")
        return 0
    output = Path(arguments.output)
    if output.is_file():
        raise UserError(f"--output {output} exists and is not overwritten; choose another")
    try:
        write_whole(output, text)
    except OSError as error:
        with suppress(OSError):
            output.unlink()
        raise UserError(f"--output {output} cannot be written ({error.strerror})") from None
    print(arguments.output)
    return 0


def _completion(arguments: argparse.Namespace, overrides: list[str]) -> int:
    print(SCRIPTS[arguments.shell], end="")
    return 0


def candidates(commands: dict[str, argparse.ArgumentParser], words: list[str]) -> list[str]:
    """Completions of the last of `words`, given the words before it. Empty: the shell offers files."""
    *before, word = words or [""]
    if not before:
        options: Iterable[str] = [*commands, "--help", "--version"]
    else:
        options = _options(commands[before[0]], before[1:], word) if before[0] in commands else []
    return [option for option in options if option.startswith(word)]


def _options(command: argparse.ArgumentParser, given: list[str], word: str) -> Iterable[str]:
    flags = {action.option_strings[-1]: action for action in command._actions if action.option_strings}
    flags["--help"] = flags.pop("--help")  # last
    last = given[-1] if given else ""
    if last in flags and flags[last].nargs != 0:
        return _values_of(command, flags[last])
    if not given and not word.startswith("-"):
        positionals = [action for action in command._actions if not action.option_strings]
        return _values_of(command, positionals[0]) if positionals else []
    if given[:1] == ["import"] and command.prog.endswith(" config"):
        return flags if word.startswith("-") else [] if len(given) == 1 else [*phases.PHASES, "all"]
    if not command.get_default("takes_overrides"):
        return flags
    keys = _keys(given)
    if last.startswith("--") and last not in flags and "=" not in last and not word.startswith("--"):
        return _values_of_key(last, keys)
    name, equals, _ = word.partition("=")
    if equals:
        return [f"{name}={value}" for value in _values_of_key(name, keys)]
    return [*flags, *(f"--{key}" if word.startswith("-") else f"{key}=" for key in keys)]


def _values_of(command: argparse.ArgumentParser, action: argparse.Action) -> Any:
    offered: Any = command.get_default("offered") or {}
    values: Any = offered.get(action.dest, action.choices or [])
    return values() if callable(values) else values


def _keys(given: list[str]) -> "dict[str, FieldInfo]":
    from sparring.config.schema import SCHEMA
    from sparring.config.text import parse_overrides, split_overrides

    try:
        settings = parse_overrides(split_overrides(given, {})[0])
    except UserError:  # the line is incomplete
        settings = []
    return SCHEMA.keys(SCHEMA.classes(settings))


def _values_of_key(name: str, keys: "dict[str, FieldInfo]") -> list[str]:
    from sparring.config.schema import SCHEMA
    from sparring.envs.tabletop.tasks.registry import TASKS

    key = SCHEMA.spelled(name.removeprefix("--"))
    annotation = keys[key].annotation if key in keys else None
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    known = {"phase": phases.PHASES, "algorithm": algorithms.ALGORITHMS, "env.name": envs.ENVS, "env.task": TASKS}
    known |= {"policy.name": policies.POLICIES, "device": ["auto", "cpu", "cuda"], "resume": ["auto", "never"]}
    return list(cast(Iterable[str], known.get(key, [])))
