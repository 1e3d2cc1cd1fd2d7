"""Shared by the benchmarks of the phases: flags, folders, storing and printing results."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

sys.path.insert(0, str(Path(__file__).parents[1]))

import report  # noqa: E402

RUNS = report.RESULTS.parent / "runs" / "phases"


def flags(doc: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10, help="CPU minutes of each run; repeat to resume")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="try other settings; not stored")
    parser.add_argument("--summary", action="store_true", help="only print the stored results")
    return parser


def with_teacher(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--teacher", type=Path, help="run folder of the world model; default: the benchmark's own")
    return parser


def with_student(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--student", type=Path, help="run folder of the explorer; default: the benchmark's own")
    return with_teacher(parser)


def teacher_of(args) -> Path:
    return args.teacher or RUNS / f"teacher_seed{args.seed}"


def student_of(args) -> Path:
    return args.student or RUNS / f"student_default_seed{args.seed}"


def suffix(args) -> str:
    """A suffix for run folders, different for each combination of --set, --teacher and --student."""
    given = " ".join(map(str, [*args.set, *_given_runs(args)]))
    return f"_{crc32(given.encode()):08x}" if given else ""


def _given_runs(args) -> list[Path]:
    """The given world model and explorer."""
    return [path for path in (getattr(args, name, None) for name in ("teacher", "student")) if path]


def finish(args, run: dict | None, results: Path) -> dict[str, dict]:
    """Store a finished run that has the benchmark's own settings; return the runs to print. None: not finished."""
    done = run is not None and run["done"]
    if not done:
        print("not finished; the same command resumes it")
    if suffix(args):
        return {"tried": run} if run else {}
    if done:
        report.keep_run(results, RUNS, run)
    return stored(results)


def stored(results: Path) -> dict[str, dict]:
    return json.loads(results.read_text())["runs"] if results.is_file() else {}


def show(runs: dict[str, dict], summary: Callable[[dict[str, dict]], str]) -> None:
    print(summary(runs) if runs else "no results yet")
