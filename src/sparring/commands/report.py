"""`sparring report`."""

import argparse
import sys
from pathlib import Path

from sparring.commands.arguments import OPTIONS

MEDIA_MB = 30


def add(commands) -> None:
    report = commands.add_parser("report", help="write what runs learned into one HTML file", **OPTIONS)
    report.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or folders that hold some")
    report.add_argument(
        "--output", metavar="HTML", help="where to write it (RUN/report.html; of several ./report.html)"
    )
    report.add_argument(
        "--media-mb", type=_megabytes, default=MEDIA_MB, metavar="MB", help="of videos and pictures (%(default)s)"
    )
    report.set_defaults(command=_report)


def _report(arguments, overrides) -> int:
    from sparring.report.page import write_report

    runs = [Path(run) for run in arguments.runs]
    beside = runs[0] if len(runs) == 1 else Path()
    output = Path(arguments.output) if arguments.output else beside / "report.html"
    collection = write_report(runs, output, int(arguments.media_mb * 1e6))
    for path, run in collection.runs.items():
        for file, lines in run.parts["about"]["unreadable"].items():
            print(f"{path / file}: {lines} lines could not be read; they are left out", file=sys.stderr)
    print(output)
    return 0


def _megabytes(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise argparse.ArgumentTypeError(f"expected megabytes >= 0, got '{text}'")
    return size
