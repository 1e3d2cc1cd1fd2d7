"""`sparring check`."""

from sparring.commands.arguments import OPTIONS


def add(commands) -> None:
    check = commands.add_parser("check", help="is the installation, an env or a policy fit for training?", **OPTIONS)
    check.add_argument(
        "name", nargs="?", metavar="NAME", help="gym:<id>, sparring/<task>, your.module:Class; none: all"
    )
    check.set_defaults(command=_check)


def _check(arguments, overrides) -> int:
    from sparring.check import check

    return check(arguments.name, overrides)
