"""`sparring completion`."""

from sparring.commands.arguments import OPTIONS


def add(commands) -> None:
    completion = commands.add_parser("completion", help="print a shell completion script", **OPTIONS)
    completion.add_argument("shell", choices=["bash", "zsh", "fish"])
    completion.set_defaults(command=_completion)


def _completion(arguments, overrides) -> int:
    from sparring.completion import SCRIPTS

    print(SCRIPTS[arguments.shell], end="")
    return 0
