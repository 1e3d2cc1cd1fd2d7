"""`sparring train`, `eval` and `compare`: a run, and how good it is."""

import argparse
import ctypes
import os
import sys
from pathlib import Path
from typing import Any, cast

from sparring import phases
from sparring.cli.arguments import EPILOG, OPTIONS, TRUST, config_of, count, flag_settings, positive, settings_of
from sparring.errors import UserError

_M_ARENA_MAX = -8  # of malloc.h
DRY_RUNS = ("rollout", "training")  # what --dry-run tries, in the words of ManiFlow's test_rl_rollout.py


def add(commands) -> None:
    train = commands.add_parser("train", help="run a phase of training", epilog=EPILOG, **OPTIONS)
    kinds = "finetune (RL on a task), imitate (of demonstrations), teacher (a world model), student (an explorer), "
    kinds += "adversarial (both against each other), all (the last three, one after the other)"
    train.add_argument("phase", metavar="PHASE", help=kinds)
    train.add_argument("--config", metavar="FILE", help="YAML or JSON file with what differs from the defaults")
    processes = "processes, one per GPU, or so many on the CPU (default: 1)"
    train.add_argument("--gpus", type=positive, default=1, metavar="N", help=processes)
    train.add_argument("--envs", type=positive, metavar="N", help="robots of each process; short for rollout.n_envs=N")
    folder = "run folder (default: outputs/<phase>_rl); with all: what holds the three folders"
    train.add_argument("--output", metavar="DIR", help=folder)
    resume = (
        "auto (default): go on where the run folder stopped; never: start from scratch, the old run is moved aside; or "
    )
    resume += "the checkpoint to start from"
    train.add_argument("--resume", metavar="auto|never|CHECKPOINT", help=resume)
    tried = "try one rollout and one update, and write nothing; with the word rollout, only the rollout"
    train.add_argument("--dry-run", choices=DRY_RUNS, nargs="?", metavar="rollout", help=tried)
    train.add_argument("--trust", **TRUST)
    offered = {"phase": [*phases.PHASES, "all"], "resume": ["auto", "never"]}
    train.set_defaults(command=_train, takes_overrides=True, offered=offered)
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
    predictions = "evaluate the predictions of a world model"
    evaluate.add_argument("--world-model", action="store_true", help=predictions)
    evaluate.add_argument("--exploration", action="store_true", help="what a policy touches and where it gets to")
    evaluate.add_argument("--against", metavar="PATH", help="with --world-model: another one, on the same episodes")
    evaluate.add_argument("--trust", **TRUST)
    evaluate.set_defaults(command=_evaluate, takes_overrides=True)
    compare = commands.add_parser("compare", help="which of two is better, on the same held-out episodes", **OPTIONS)
    compare.add_argument("a", metavar="A", help="run folder or checkpoint folder")
    compare.add_argument("b", metavar="B", help="another one")
    compare.add_argument("--episodes", type=positive, metavar="N", help="how many (default: as A is configured)")
    compare.add_argument("--seed", type=count, metavar="S", help="of the held-out episodes (default: A's)")
    compare.add_argument("--json", metavar="FILE", help="write the numbers there, too")
    compare.add_argument("--world-model", action="store_true", help="compare the predictions of two world models")
    compare.add_argument("--trust", **TRUST)
    compare.set_defaults(command=_compare, takes_overrides=True)


def _share_one_heap() -> None:
    """By all threads of this process, also those to come; where the C library is glibc, and nobody has set it.

    Each thread gets an arena of its own otherwise. The threads that draw videos and save checkpoints come and go, so
    what one freed stays there while the next one's arena grows: in benchmarks/soak.py 24 MB more than with one arena,
    in steps of up to 25 MB, with the same number of updates a second.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option and "MALLOC_ARENA_MAX" not in os.environ:
        set_option(_M_ARENA_MAX, 1)


def _train(arguments: argparse.Namespace, overrides: list[str]) -> int:
    _share_one_heap()
    if arguments.phase == "all":
        return _train_all(arguments, overrides)
    if phases.ALIASES.get(arguments.phase, arguments.phase) not in phases.PHASES:
        why = phases.unknown_phase(arguments.phase, "all")
        raise UserError(f"phase = {arguments.phase} (from command line): {why}")
    config = config_of(arguments, overrides)
    if arguments.gpus > 1 and "RANK" not in os.environ:
        from sparring.processes.launch import launch

        return launch(arguments.gpus, arguments.words, config.rollout.watchdog_s, config.run_folder)
    if arguments.dry_run:
        from sparring.runs.dry_run import dry_run

        is_main = os.environ.get("RANK", "0") == "0"
        if is_main:
            print("dry run: this may take a minute; nothing is written", file=sys.stderr)
        found = dry_run(config, only_rollout=arguments.dry_run == "rollout")
        if is_main:
            print(found)
        return 0
    from sparring.runs.run import Run
    from sparring.runs.summary import AnyEvaluation, summary

    run = Run(config)
    run.announce()
    if not run.run():
        return 130
    evaluation = run.evaluate()
    if run.folder is not None and evaluation is not None:
        print(summary(config, run.phase.progress, cast(AnyEvaluation, evaluation)))
    return 0


def _train_all(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.runs.train_all import train_all

    if arguments.dry_run:
        raise UserError("--dry-run goes with a phase; try teacher first, the others start from what it leaves")
    output = Path(arguments.output or os.environ.get("OUTPUT_BASE") or "outputs")
    settings, resume = settings_of(arguments, overrides), arguments.resume or "auto"
    return train_all(settings, output, arguments.gpus, resume, arguments.trust)


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
        raise UserError("--stochastic, --both and --videos go with neither --world-model nor --exploration; omit them")
    kind: Any = "eval_world_model" if arguments.world_model else "eval_exploration" if arguments.exploration else "eval"
    greedy, both, against = not arguments.stochastic, arguments.both, arguments.against
    evaluate_checkpoint(arguments.path, settings, kind, path, greedy, both, arguments.videos, against)
    return 0


def _compare(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.config.text import parse_overrides
    from sparring.evaluation.compare import Comparison
    from sparring.evaluation.files import refuse_unwritable, terminal_width

    settings = parse_overrides(overrides)
    settings += flag_settings(arguments, {"episodes": "evaluation.episodes", "seed": "seed"})
    if arguments.json:
        refuse_unwritable(Path(arguments.json))
    compare = Comparison.of_world_models if arguments.world_model else Comparison.of_policies
    found = compare(arguments.a, arguments.b, settings)
    print(f"{found.episodes} held-out episodes, each played by both")
    print(found.table(terminal_width()))
    print(found.verdict())
    if arguments.json:
        print(f"numbers: {found.write(Path(arguments.json))}")
    return 0
