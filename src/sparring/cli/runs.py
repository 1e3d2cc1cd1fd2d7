"""`sparring runs` and `sparring prune`."""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli.arguments import OPTIONS, count, positive
from sparring.errors import UserError

if TYPE_CHECKING:
    from sparring.runs.listing import RunState


def add(commands) -> None:
    runs = commands.add_parser("runs", help="which run folders there are, and how each fares", **OPTIONS)
    runs.add_argument("folder", nargs="?", metavar="DIR", help="where to look (default: outputs, or OUTPUT_BASE)")
    runs.add_argument("--json", action="store_true", help="as JSON")
    runs.set_defaults(command=_runs)
    prune = commands.add_parser("prune", help="remove checkpoints, but for the best and the last", **OPTIONS)
    prune.add_argument("runs", nargs="+", metavar="RUN", help="run folders")
    prune.add_argument("--keep-best", type=count, default=1, metavar="K", help="as evaluations tell (default: 1)")
    prune.add_argument("--keep-last", type=positive, default=1, metavar="L", help="the newest (default: 1)")
    prune.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    prune.add_argument("--yes", action="store_true", help="do not ask")
    prune.set_defaults(command=_prune)


def _runs(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.evaluation.files import text_table
    from sparring.runs.listing import find_runs

    folder = Path(arguments.folder or os.environ.get("OUTPUT_BASE", "outputs"))
    found = find_runs(folder)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(run) for run in found], indent=2))
    elif not found:
        print(f"no runs in {folder}")
    else:
        rows = [_HEAD, *map(_row, found)]
        columns = len(_HEAD) if any(run.why for run in found) else -1  # what went wrong, where something did
        print(text_table(row[:columns] for row in rows))
    return 0


_HEAD = ("run", "phase", "task", "state", "done", "made", "best success", "size", "age", "why")


def _row(run: "RunState") -> tuple[str, ...]:
    made = f"{run.env_steps:,} steps" if run.env_steps else f"{run.updates:,} updates" if run.updates else "-"
    best = f"{run.best['success_rate']:.0%} ({run.best['low']:.0%} - {run.best['high']:.0%})" if run.best else "-"
    done = "-" if run.fraction is None else f"{run.fraction:.0%}"
    words = run.phase or "?", run.task or "?", run.state, done, made, best
    return run.path, *words, _size(run.bytes), _duration(run.age), run.why or ""


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _prune(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.runs.prune import Pruning

    # all of them before the first is touched; each once
    runs = dict.fromkeys(map(Path, arguments.runs))
    prunings = [Pruning.plan(run, arguments.keep_best, arguments.keep_last) for run in runs]
    for pruning in prunings:
        kept = ", ".join(f"{path.name} ({why})" for path, why in pruning.kept.items())
        removed = f"removes {len(pruning.removed)}, {_size(pruning.bytes)}" if pruning.removed else "nothing to remove"
        doubt = "" if pruning.rated or not arguments.keep_best else "; no evaluation tells which are best"
        print(f"{pruning.run}: keeps {kept}; {removed}{doubt}")
    total, bytes_freed = sum(len(p.removed) for p in prunings), sum(p.bytes for p in prunings)
    if arguments.dry_run or not total:
        return 0
    unrated = [f"'{p.run}'" for p in prunings if p.removed and not p.rated]
    if arguments.yes and arguments.keep_best and unrated:
        raise UserError(
            f"{', '.join(unrated)}: no evaluation tells which checkpoints are best; give --keep-best 0 to keep "
            "the last only (--keep-last L), or leave out --yes to be asked"
        )
    if not arguments.yes and not _agreed(total):
        print("nothing was removed")
        return 0
    for pruning in prunings:
        pruning.carry_out()
    print(f"freed {_size(bytes_freed)}")
    return 0


def _agreed(total: int) -> bool:
    if not sys.stdin.isatty():
        raise UserError("nobody is here to be asked; give --yes to remove them, or --dry-run to only look")
    return input(f"remove {total} checkpoints for good? [y/N] ").strip().lower() in ("y", "yes")
