"""`sparring train`."""

import argparse
import os
import sys
from pathlib import Path
from typing import cast

from sparring import phases
from sparring.cli.arguments import EPILOG, OPTIONS, config_of, positive, settings_of
from sparring.errors import UserError

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
    resume = "auto (default): go on where the run folder stopped; never: start anew, the old run is moved aside; or "
    resume += "the checkpoint to start from"
    train.add_argument("--resume", metavar="auto|never|CHECKPOINT", help=resume)
    tried = "try one rollout and one update, and write nothing; with the word rollout, only the rollout"
    train.add_argument("--dry-run", choices=DRY_RUNS, nargs="?", metavar="rollout", help=tried)
    offered = {"phase": [*phases.PHASES, "all"], "resume": ["auto", "never"]}
    train.set_defaults(command=_train, takes_overrides=True, offered=offered)


def _train(arguments: argparse.Namespace, overrides: list[str]) -> int:
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

        print("dry run: this may take a minute; nothing is written", file=sys.stderr)
        print(dry_run(config, only_rollout=arguments.dry_run == "rollout"))
        return 0
    from sparring.runs.run import Run
    from sparring.runs.summary import AnyEvaluation, summary

    run = Run(config)
    run.announce()
    if not run.run():
        return 130
    evaluation = run.evaluate()
    if run.folder is not None:
        print(summary(config, run.phase.progress, cast(AnyEvaluation, evaluation)))
    return 0


def _train_all(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.runs.train_all import train_all

    if arguments.dry_run:
        raise UserError("--dry-run goes with a phase; try teacher first, the others start from what it leaves")
    output = Path(arguments.output or os.environ.get("OUTPUT_BASE", "outputs"))
    return train_all(settings_of(arguments, overrides), output, arguments.gpus, arguments.resume or "auto")
