"""`sparring compare`."""

from pathlib import Path

from sparring.commands.arguments import OPTIONS, count, positive
from sparring.commands.settings import flag_settings


def add(commands) -> None:
    compare = commands.add_parser("compare", help="which of two is better, on the same held-out episodes", **OPTIONS)
    compare.add_argument("a", metavar="A", help="run folder or checkpoint folder")
    compare.add_argument("b", metavar="B", help="another one")
    compare.add_argument("--episodes", type=positive, metavar="N", help="how many (default: as A is configured)")
    compare.add_argument("--seed", type=count, metavar="S", help="of the held-out episodes (default: A's)")
    compare.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    compare.add_argument("--world-model", action="store_true", help="compare what two world models foretell")
    compare.set_defaults(command=_compare)


def _compare(arguments, overrides) -> int:
    from sparring.compare import compare_policies, compare_world_models
    from sparring.config_text import parse_overrides
    from sparring.evaluation_files import refuse_unwritable

    settings = parse_overrides(overrides)
    settings += flag_settings(arguments, {"episodes": "evaluation.episodes", "seed": "seed"})
    if arguments.json:
        refuse_unwritable(Path(arguments.json))
    compare = compare_world_models if arguments.world_model else compare_policies
    found = compare(arguments.a, arguments.b, settings)
    print(f"{found.episodes} held-out episodes, each played by both")
    print(found.table())
    print(found.verdict())
    if arguments.json:
        print(f"numbers: {found.write(Path(arguments.json))}")
    return 0
