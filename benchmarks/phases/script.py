"""What the scripts of the phases share: their flags, and what becomes of a run."""

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
    parser.add_argument("--minutes", type=float, default=10, help="of CPU for each run; the same call goes on")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="try other settings; not kept")
    parser.add_argument("--summary", action="store_true", help="only print what is known")
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


def tried(args) -> str:
    """The end of the name of a run's folder: of what was given beside the benchmark's own, so that each has one."""
    given = " ".join(map(str, [*args.set, *_others(args)]))
    return f"_{crc32(given.encode()):08x}" if given else ""


def _others(args) -> list[Path]:
    """World model and explorer that were given."""
    return [path for path in (getattr(args, name, None) for name in ("teacher", "student")) if path]


def conclude(args, run: dict | None, results: Path) -> dict[str, dict]:
    """Keeps a run that is done, with the benchmark's own settings; the runs to tell of. None, like `done`: not yet."""
    done = run is not None and run["done"]
    if not done:
        print("not done; the same call goes on")
    if tried(args):
        return {"tried": run} if run else {}
    if done:
        report.keep_run(results, RUNS, run)
    return known(results)


def known(results: Path) -> dict[str, dict]:
    return json.loads(results.read_text())["runs"] if results.is_file() else {}


def tell(runs: dict[str, dict], summary: Callable[[dict[str, dict]], str]) -> None:
    print(summary(runs) if runs else "nothing is known yet")
