"""`sparring eval` and `sparring compare`."""

import argparse
from pathlib import Path
from typing import Any

from sparring.cli.arguments import OPTIONS, count, flag_settings, positive
from sparring.errors import UserError


def add(commands) -> None:
    evaluate = commands.add_parser("eval", help="evaluate a trained policy on held-out episodes", **OPTIONS)
    evaluate.add_argument("path", metavar="PATH", help="run folder or checkpoint folder")
    evaluate.add_argument("--episodes", type=positive, metavar="N", help="how many (default: as configured)")
    evaluate.add_argument("--seed", type=count, metavar="S", help="of the held-out episodes (default: the run's)")
    actions = evaluate.add_mutually_exclusive_group()
    actions.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    both = "one, then the other (of flow policies always: ODE, then SDE)"
    actions.add_argument("--both", action="store_true", help=both)
    evaluate.add_argument("--videos", type=count, default=0, metavar="N", help="episodes to record beside the table")
    numbers = "where to write the numbers (default: PATH/eval*.json, called by what was evaluated)"
    evaluate.add_argument("--json", metavar="FILE", help=numbers)
    foretells = "evaluate a teacher's world model: what it foretells"
    evaluate.add_argument("--world-model", action="store_true", help=foretells)
    evaluate.add_argument("--exploration", action="store_true", help="what a policy touches and where it gets to")
    evaluate.add_argument("--against", metavar="PATH", help="with --world-model: another one, on the same episodes")
    evaluate.set_defaults(command=_evaluate, takes_overrides=True)
    compare = commands.add_parser("compare", help="which of two is better, on the same held-out episodes", **OPTIONS)
    compare.add_argument("a", metavar="A", help="run folder or checkpoint folder")
    compare.add_argument("b", metavar="B", help="another one")
    compare.add_argument("--episodes", type=positive, metavar="N", help="how many (default: as A is configured)")
    compare.add_argument("--seed", type=count, metavar="S", help="of the held-out episodes (default: A's)")
    compare.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    compare.add_argument("--world-model", action="store_true", help="compare what two world models foretell")
    compare.set_defaults(command=_compare, takes_overrides=True)


def _evaluate(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.config.text import parse_overrides
    from sparring.evaluation.of_run import evaluate_checkpoint

    settings = parse_overrides(overrides)
    settings += flag_settings(arguments, {"episodes": "evaluation.episodes", "seed": "seed"})
    path = Path(arguments.json) if arguments.json else None
    if arguments.against and not arguments.world_model:
        raise UserError("--against goes with --world-model only; leave it out")
    if arguments.world_model and arguments.exploration:
        raise UserError("--world-model is about world models, --exploration about policies; give one of them")
    of_a_policy = arguments.stochastic or arguments.both or arguments.videos
    if (arguments.world_model or arguments.exploration) and of_a_policy:
        raise UserError(
            "--stochastic, --both and --videos go with neither --world-model nor --exploration; leave them out"
        )
    kind: Any = "eval_world_model" if arguments.world_model else "eval_exploration" if arguments.exploration else "eval"
    greedy, both, against = not arguments.stochastic, arguments.both, arguments.against
    evaluate_checkpoint(arguments.path, settings, kind, path, greedy, both, arguments.videos, against)
    return 0


def _compare(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.config.text import parse_overrides
    from sparring.evaluation.compare import Comparison
    from sparring.evaluation.files import refuse_unwritable

    settings = parse_overrides(overrides)
    settings += flag_settings(arguments, {"episodes": "evaluation.episodes", "seed": "seed"})
    if arguments.json:
        refuse_unwritable(Path(arguments.json))
    compare = Comparison.of_world_models if arguments.world_model else Comparison.of_policies
    found = compare(arguments.a, arguments.b, settings)
    print(f"{found.episodes} held-out episodes, each played by both")
    print(found.table())
    print(found.verdict())
    if arguments.json:
        print(f"numbers: {found.write(Path(arguments.json))}")
    return 0
