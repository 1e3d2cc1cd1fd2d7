"""Shell completion: commands, phases, flags and every config key with its accepted values."""

import typing
from typing import Literal

SCRIPTS = {
    "bash": """\
# eval "$(sparring completion bash)"
_sparring() {
  local word="${COMP_LINE:0:COMP_POINT}"; word="${word##* }"
  local words; read -ra words <<< "${COMP_LINE:0:COMP_POINT}"
  [ -z "$word" ] && words+=("")
  COMPREPLY=($(sparring __complete "${words[@]:1}"))
  # bash breaks words at '=': offer only what follows it
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
COMMANDS = {
    "train": ["--config", "--gpus", "--envs", "--output", "--resume", "--dry-run"],
    "eval": ["--episodes", "--seed", "--stochastic", "--videos", "--json"],
    "check": [],
    "tasks": [],
    "config": ["--config"],
    "completion": [],
}


def candidates(words: list[str]) -> list[str]:
    """What the last word could become; the words before it give the context."""
    *before, word = words or [""]
    if not before:
        return _starting(word, [*COMMANDS, "--help", "--version"])
    command = before[0]
    if command == "completion":
        return _starting(word, SCRIPTS)
    if command in ("train", "config") and len(before) == 1:
        from sparring import phases

        return _starting(word, [*phases.PHASES])
    if command not in ("train", "config", "eval"):
        return []
    return _config_candidates(word, COMMANDS[command])


def _config_candidates(word: str, flags: list[str]) -> list[str]:
    from sparring.tree import ALIASES, TREE

    keys = TREE.keys(TREE.default_classes())
    key, equals, _ = word.partition("=")
    if equals:
        values = _values(keys[ALIASES.get(key, key)]) if ALIASES.get(key, key) in keys else []
        return _starting(word, [f"{key}={value}" for value in values])
    dashes = "--" if word.startswith("--") else ""
    names = [f"{dashes}{key}{'' if dashes else '='}" for key in keys]
    return _starting(word, [*flags, *names])


def _values(info) -> list[str]:
    if info.annotation is bool:
        return ["true", "false"]
    return [str(value) for value in typing.get_args(info.annotation)] if _is_literal(info.annotation) else []


def _is_literal(annotation) -> bool:
    return typing.get_origin(annotation) is Literal


def _starting(word: str, options) -> list[str]:
    return [option for option in options if option.startswith(word)]
