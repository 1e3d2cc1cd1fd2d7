"""`sparring eval`."""

from pathlib import Path

from sparring.commands.arguments import OPTIONS, count, positive
from sparring.commands.settings import flag_settings
from sparring.errors import UserError


def add(commands) -> None:
    evaluate = commands.add_parser("eval", help="evaluate a trained policy on held-out episodes", **OPTIONS)
    evaluate.add_argument("path", metavar="PATH", help="run folder or checkpoint folder")
    evaluate.add_argument("--episodes", type=positive, metavar="N", help="how many (default: as configured)")
    evaluate.add_argument("--seed", type=count, metavar="S", help="of the held-out episodes (default: the run's)")
    actions = evaluate.add_mutually_exclusive_group()
    actions.add_argument("--stochastic", action="store_true", help="sample actions instead of taking the mode")
    actions.add_argument(
        "--both", action="store_true", help="one, then the other (of flow policies always: ODE, then SDE)"
    )
    evaluate.add_argument("--videos", type=count, default=0, metavar="N", help="episodes to record beside the table")
    evaluate.add_argument(
        "--json",
        metavar="FILE",
        help="where to write the numbers (default: PATH/eval*.json, called by what was evaluated)",
    )
    evaluate.add_argument(
        "--world-model", action="store_true", help="evaluate a teacher's world model: what it foretells"
    )
    evaluate.add_argument("--exploration", action="store_true", help="what a policy touches and where it gets to")
    evaluate.add_argument("--against", metavar="PATH", help="with --world-model: another one, on the same episodes")
    evaluate.set_defaults(command=_evaluate)


def _evaluate(arguments, overrides) -> int:
    from sparring.config_text import parse_overrides
    from sparring.evaluate_run import evaluate_checkpoint, evaluate_explorer_checkpoint, evaluate_world_model_checkpoint

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
    if arguments.world_model:
        evaluate_world_model_checkpoint(arguments.path, settings, path, arguments.against)
        return 0
    if arguments.exploration:
        evaluate_explorer_checkpoint(arguments.path, settings, path)
        return 0
    evaluate_checkpoint(arguments.path, settings, not arguments.stochastic, arguments.videos, path, arguments.both)
    return 0
