"""`sparring completion`."""

from typing import TYPE_CHECKING, Literal, get_args, get_origin

from sparring import algorithms, envs, phases, policies
from sparring.cli.arguments import OPTIONS
from sparring.config.text import ConfigTextError, parse_overrides, split_overrides

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


# ---- Shell completion: commands, phases, flags and every config key with its accepted values.


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
SWITCH, FILE, NUMBER = "switch", "file", "number"
# command -> flag -> what follows it: nothing, something of the shell's or the person's own, or one of these words
COMMANDS: dict[str, dict[str, str | list[str]]] = {
    "train": {
        "--config": FILE,
        "--gpus": NUMBER,
        "--envs": NUMBER,
        "--output": FILE,
        "--resume": ["auto", "never"],
        "--dry-run": ["rollout", "training"],
    },
    "eval": {
        "--episodes": NUMBER,
        "--seed": NUMBER,
        "--stochastic": SWITCH,
        "--both": SWITCH,
        "--videos": NUMBER,
        "--json": FILE,
        "--world-model": SWITCH,
        "--exploration": SWITCH,
        "--against": FILE,
    },
    "compare": {"--episodes": NUMBER, "--seed": NUMBER, "--json": FILE, "--world-model": SWITCH},
    "report": {"--output": FILE, "--media-mb": NUMBER},
    "watch": {"--port": NUMBER, "--no-browser": SWITCH},
    "runs": {"--json": SWITCH},
    "prune": {"--keep-best": NUMBER, "--keep-last": NUMBER, "--dry-run": SWITCH, "--yes": SWITCH},
    "check": {},
    "tasks": {"--sheet": FILE},
    "demos": {
        "--episodes": NUMBER,
        "--noise": NUMBER,
        "--output": FILE,
        "--cameras": ["head", "wrist", "left_wrist", "right_wrist"],
        "--image-size": NUMBER,
        "--control-mode": ["delta_qpos", "delta_ee_pos", "delta_ee", "qpos"],
        "--seed": NUMBER,
        "--workers": NUMBER,
        "--keep-failures": SWITCH,
        "--pixel-format": ["yuv420p", "yuv444p"],
        "--config": FILE,
        "--sheet": FILE,
    },
    "config": {"--config": FILE, "--output": FILE},
    "completion": {},
}


def flags_of(command: str) -> dict[str, bool]:
    """The flags of a command and whether a value follows each."""
    own = {flag: follows != SWITCH for flag, follows in COMMANDS.get(command, {}).items()}
    return own | {"--help": False, "--version": False}


def candidates(words: list[str]) -> list[str]:
    """What the last word could become; the words before it give the context. Nothing: the shell offers files."""
    *before, word = words or [""]
    options = _options(before, word) if before else [*COMMANDS, "--help", "--version"]
    return [option for option in options if option.startswith(word)]


def _options(before: list[str], word: str) -> list[str]:
    command, *given = before
    flags = COMMANDS.get(command, {})
    last = given[-1] if given else ""
    if flags.get(last, SWITCH) != SWITCH:
        return flags[last] if isinstance(flags[last], list) else []
    if not given and not word.startswith("-"):
        return _first_arguments(command)
    if given[:1] == ["import"] and command == "config":
        return [*flags, "--help"] if word.startswith("-") else [] if len(given) == 1 else [*phases.PHASES, "all"]
    if command not in TAKES_OVERRIDES:
        return [*flags, "--help"]
    keys = _keys(given)
    if last.startswith("--") and last not in flags and "=" not in last and not word.startswith("--"):
        return _values(last, keys)
    name, equals, _ = word.partition("=")
    if equals:
        return [f"{name}={value}" for value in _values(name, keys)]
    return [*flags, "--help", *(f"--{key}" if word.startswith("-") else f"{key}=" for key in keys)]


TAKES_OVERRIDES = ("train", "eval", "compare", "check", "demos", "config")


def _first_arguments(command: str) -> list[str]:
    if command == "completion":
        return list(SCRIPTS)
    if command in ("train", "config"):
        return [*phases.PHASES, "all" if command == "train" else "import"]
    if command == "demos":
        return ["show", *_names("env.task")]
    if command == "check":
        return _names("env.name") + _names("policy.name") + [f"sparring/{task}" for task in _names("env.task")]
    return []


def _keys(given: list[str]) -> "dict[str, FieldInfo]":
    """Every key there is; `env.name=gym:CartPole-v1` before the word decides which."""
    from sparring.config.schema import SCHEMA

    try:
        settings = parse_overrides(split_overrides(given, {})[0])
    except ConfigTextError:  # a line is half typed
        settings = []
    return SCHEMA.keys(SCHEMA.classes(settings))


def _values(name: str, keys: "dict[str, FieldInfo]") -> list[str]:
    """What may follow `key=` or `--key`."""
    from sparring.config.legacy import ALIASES

    key = ALIASES.get(name.removeprefix("--"), name.removeprefix("--"))
    annotation = keys[key].annotation if key in keys else None
    if annotation is bool:
        return ["true", "false"]
    return [str(value) for value in get_args(annotation)] if get_origin(annotation) is Literal else _names(key)


def _names(key: str) -> list[str]:
    """What a text field is known to take."""
    if key == "env.task":
        from sparring.envs.tabletop.tasks.registry import TASKS

        return list(TASKS)
    known = {
        "phase": phases.PHASES,
        "algorithm": algorithms.ALGORITHMS,
        "env.name": envs.ENVS,
        "policy.name": policies.POLICIES,
        "device": ["auto", "cpu", "cuda"],
        "resume": ["auto", "never"],
    }
    return list(known.get(key, []))


def add(commands) -> None:
    completion = commands.add_parser("completion", help="print a shell completion script", **OPTIONS)
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(command=_completion)


def _completion(arguments, overrides) -> int:

    print(SCRIPTS[arguments.shell], end="")
    return 0
