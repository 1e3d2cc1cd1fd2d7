"""`sparring train`."""

import os
from pathlib import Path

from sparring.commands.arguments import OPTIONS, positive
from sparring.commands.examples import EPILOG
from sparring.commands.settings import config_of, settings_of
from sparring.errors import UserError

# what --dry-run tries, in the words of ManiFlow's test_rl_rollout.py
DRY_RUNS = ("rollout", "training")


def add(commands) -> None:
    train = commands.add_parser("train", help="run a phase of training", epilog=EPILOG, **OPTIONS)
    train.add_argument(
        "phase",
        metavar="PHASE",
        help="finetune (task RL), imitate (demonstrations), teacher (world model), student (explorer), adversarial "
        "(both), all (teacher, student, adversarial)",
    )
    train.add_argument("--config", metavar="FILE", help="YAML or JSON file with what differs from the defaults")
    train.add_argument("--gpus", type=positive, default=1, metavar="N", help="processes, one per GPU (on CPU: gloo)")
    train.add_argument("--envs", type=positive, metavar="N", help="robots per process (rollout.n_envs)")
    train.add_argument("--output", metavar="DIR", help="run folder (default: outputs/<phase>_rl)")
    train.add_argument("--resume", metavar="auto|never|CHECKPOINT", help="default auto: go on where the folder stopped")
    train.add_argument(
        "--dry-run",
        choices=DRY_RUNS,
        metavar="rollout",
        help="one rollout and one update (or the rollout alone), nothing written",
    )
    train.set_defaults(command=_train)


def with_dry_run_in_one_word(argv: list[str]) -> list[str]:
    """`--dry-run rollout` -> `--dry-run=rollout`: argparse would take any word that follows for its value."""
    words = []
    for word in argv:
        if words[-1:] == ["--dry-run=training"] and word in DRY_RUNS:
            words[-1] = f"--dry-run={word}"
        else:
            words.append("--dry-run=training" if word == "--dry-run" else word)
    return words


def _train(arguments, overrides) -> int:
    if arguments.phase == "all":
        return _train_all(arguments, overrides)
    config = config_of(arguments, overrides)
    if arguments.gpus > 1 and "RANK" not in os.environ:
        from sparring.launch import launch

        return launch(arguments.gpus, arguments.words, config.rollout.watchdog_s, config.run_folder)
    if arguments.dry_run:
        from sparring.dry_run import dry_run

        print(dry_run(config, only_rollout=arguments.dry_run == "rollout"))
        return 0
    from sparring.run import Run
    from sparring.summary import summary

    run = Run(config)
    run.announce()
    if not run.run():
        return 130
    evaluation = run.evaluate()
    # the main process alone has a folder
    if run.folder is not None:
        print(summary(config, run.phase.progress, evaluation))
    return 0


def _train_all(arguments, overrides) -> int:
    from sparring.chain import train_all

    if arguments.dry_run:
        raise UserError("--dry-run goes with a phase; try teacher first, the others start from what it leaves")
    output = Path(arguments.output or os.environ.get("OUTPUT_BASE", "outputs"))
    return train_all(settings_of(arguments, overrides), output, arguments.gpus, arguments.resume or "auto")
