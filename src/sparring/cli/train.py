"""`sparring train`, `eval` and `compare`: train, evaluate, and test which of two runs is better."""

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
DRY_RUNS = ("rollout", "training")  # values of --dry-run, named as in ManiFlow's test_rl_rollout.py


def add(commands) -> None:
    train = commands.add_parser("train", help="run a training phase", epilog=EPILOG, **OPTIONS)
    kinds = "finetune (RL on a task), imitate (behaviour cloning), teacher (a world model), student (an explorer), "
    kinds += "adversarial (world model against explorer), all (the last three in order)"
    train.add_argument("phase", metavar="PHASE", help=kinds)
    train.add_argument("--config", metavar="FILE", help="YAML or JSON file with settings other than the defaults")
    processes = "number of processes, one per GPU, or all on the CPU (default: 1)"
    train.add_argument("--gpus", type=positive, default=1, metavar="N", help=processes)
    train.add_argument("--envs", type=positive, metavar="N", help="robots per process; short for rollout.n_envs=N")
    folder = "run folder (default: outputs/<phase>_rl); with all: the folder that contains the three run folders"
    train.add_argument("--output", metavar="DIR", help=folder)
    resume = "auto (default): resume from the newest checkpoint of the run folder; never: start from scratch and move "
    resume += "the old run aside; or a checkpoint to resume from"
    train.add_argument("--resume", metavar="auto|never|CHECKPOINT", help=resume)
    dry = "run one rollout and one update and write nothing; with `--dry-run rollout` only the rollout"
    train.add_argument("--dry-run", choices=DRY_RUNS, nargs="?", metavar="rollout", help=dry)
    train.add_argument("--trust", **TRUST)
    offered = {"phase": [*phases.PHASES, "all"], "resume": ["auto", "never"]}
    train.set_defaults(command=_train, takes_overrides=True, offered=offered)
    evaluate = commands.add_parser("eval", help="evaluate a run or checkpoint on held-out episodes", **OPTIONS)
    evaluate.add_argument("path", metavar="PATH", help="run folder or checkpoint folder")
    evaluate.add_argument("--episodes", type=positive, metavar="N", help="number of episodes (default: as configured)")
    seed = "seed of the held-out episodes (default: that of the run)"
    evaluate.add_argument("--seed", type=count, metavar="S", help=seed)
    actions = evaluate.add_mutually_exclusive_group()
    actions.add_argument("--stochastic", action="store_true", help="sample actions instead of acting greedily")
    both = "evaluate greedy and sampled actions; always on for flow policies (ODE and SDE)"
    actions.add_argument("--both", action="store_true", help=both)
    evaluate.add_argument("--videos", type=count, default=0, metavar="N", help="number of episodes to record as video")
    numbers = "file for the numbers (default: PATH/eval*.json, named after the settings)"
    evaluate.add_argument("--json", metavar="FILE", help=numbers)
    predictions = "evaluate the predictions of a world model"
    evaluate.add_argument("--world-model", action="store_true", help=predictions)
    evaluate.add_argument("--exploration", action="store_true", help="evaluate object contacts and voxels reached")
    another = "with --world-model: a world model to compare with, on the same episodes"
    evaluate.add_argument("--against", metavar="PATH", help=another)
    evaluate.add_argument("--trust", **TRUST)
    evaluate.set_defaults(command=_evaluate, takes_overrides=True)
    compare = commands.add_parser("compare", help="test which of two policies or world models is better", **OPTIONS)
    compare.add_argument("a", metavar="A", help="run folder or checkpoint folder")
    compare.add_argument("b", metavar="B", help="run folder or checkpoint folder to compare with")
    episodes = "number of episodes (default: as configured in A)"
    compare.add_argument("--episodes", type=positive, metavar="N", help=episodes)
    compare.add_argument("--seed", type=count, metavar="S", help="seed of the held-out episodes (default: that of A)")
    compare.add_argument("--json", metavar="FILE", help="also write the numbers to this file")
    compare.add_argument("--world-model", action="store_true", help="compare the predictions of two world models")
    compare.add_argument("--trust", **TRUST)
    compare.set_defaults(command=_compare, takes_overrides=True)


def _share_one_heap() -> None:
    """Make all threads share one malloc arena, if the C library is glibc and MALLOC_ARENA_MAX is not set.

    By default each thread gets its own arena. Threads that draw videos and save checkpoints start and end, and memory
    that one of them freed is not reused by the arena of the next: benchmarks/chaos_soak.py then uses 24 MB more than
    with one arena, in steps of up to 25 MB. The number of updates per second is the same."""
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

        return launch(arguments.gpus, arguments.argv, config.rollout.watchdog_s, config.run_folder)
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
        raise UserError("--dry-run needs a single phase; start with teacher: student and adversarial need its run")
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
        raise UserError("--against needs --world-model; add it, or remove --against")
    if arguments.world_model and arguments.exploration:
        raise UserError("--world-model is for world models, --exploration for policies; give only one of them")
    of_a_policy = arguments.stochastic or arguments.both or arguments.videos
    if (arguments.world_model or arguments.exploration) and of_a_policy:
        raise UserError("--world-model and --exploration exclude --stochastic, --both and --videos; remove those")
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
    used = "predicted by both world models" if arguments.world_model else "run with both policies"
    print(f"{found.episodes} held-out episodes, each {used}")
    print(found.table(terminal_width()))
    print(found.verdict())
    if arguments.json:
        print(f"numbers: {found.write(Path(arguments.json))}")
    return 0
