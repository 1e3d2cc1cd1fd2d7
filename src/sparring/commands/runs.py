"""`sparring runs`."""

import json
import os
from pathlib import Path

from sparring.commands.arguments import OPTIONS
from sparring.commands.words import duration, size
from sparring.measures.table import lined_up


def add(commands) -> None:
    runs = commands.add_parser("runs", help="which run folders there are, and how each fares", **OPTIONS)
    runs.add_argument("folder", nargs="?", metavar="DIR", help="where to look (default: outputs, or OUTPUT_BASE)")
    runs.add_argument("--json", action="store_true", help="as JSON")
    runs.set_defaults(command=_runs)


def _runs(arguments, overrides) -> int:
    from dataclasses import asdict

    from sparring.runs import find_runs

    folder = Path(arguments.folder or os.environ.get("OUTPUT_BASE", "outputs"))
    found = find_runs(folder)
    if arguments.json:
        print(json.dumps([asdict(run) for run in found], indent=2))
    elif not found:
        print(f"no runs in {folder}")
    else:
        rows = [_HEAD, *map(_row, found)]
        # what went wrong, where something did
        told = len(_HEAD) if any(run.why for run in found) else -1
        print("\n".join(lined_up([row[:told] for row in rows])))
    return 0


_HEAD = ("run", "phase", "task", "state", "done", "made", "best success", "size", "age", "why")


def _row(run) -> tuple[str, ...]:
    made = f"{run.env_steps:,} steps" if run.env_steps else f"{run.updates:,} updates" if run.updates else "-"
    best = run.best and f"{run.best['success_rate']:.0%} ({run.best['low']:.0%} - {run.best['high']:.0%})"
    done = "-" if run.fraction is None else f"{run.fraction:.0%}"
    words = run.phase or "?", run.task or "?", run.state, done, made, best or "-"
    return run.path, *words, size(run.bytes), duration(run.age), run.why or ""
