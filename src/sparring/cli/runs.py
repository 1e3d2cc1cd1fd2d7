"""`sparring report`, `watch`, `runs` and `prune`: commands for run folders."""

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sparring.cli.arguments import OPTIONS, count, positive
from sparring.errors import UserError, visible

if TYPE_CHECKING:
    from sparring.runs.listing import RunState

MEDIA_MB, PORT = 30, 6007  # defaults of --media-mb and --port
_HEAD = ("run", "phase", "task", "state", "done", "made", "best success", "size", "age", "why")


def add(commands) -> None:
    report = commands.add_parser("report", help="write a report of runs into one HTML file", **OPTIONS)
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="run folders, or folders that contain some")
    where = "file to write (default: RUN/report.html; with several runs ./report.html)"
    report.add_argument("--output", metavar="HTML", help=where)
    media = "limit of videos and images in MB (default: %(default)s)"
    report.add_argument("--media-mb", type=_megabytes, default=MEDIA_MB, metavar="MB", help=media)
    report.set_defaults(command=_report)
    watch = commands.add_parser("watch", help="serve the report on this machine, updated during training", **OPTIONS)
    folders = "run folders, or folders that contain some now or later"
    watch.add_argument("runs", metavar="RUN", nargs="+", type=Path, help=folders)
    port = "port; if it is taken, the next free one (default: %(default)s)"
    watch.add_argument("--port", type=_port, default=PORT, metavar="N", help=port)
    watch.add_argument("--no-browser", action="store_true", help="print the address without opening a browser")
    watch.set_defaults(command=_watch)
    runs = commands.add_parser("runs", help="list run folders with their state and progress", **OPTIONS)
    where = "run folders, or folders that contain some (default: outputs, or OUTPUT_BASE)"
    runs.add_argument("folders", nargs="*", metavar="DIR", type=Path, help=where)
    runs.add_argument("--json", action="store_true", help="print JSON")
    verify = "check the checksums of all checkpoints and of config.yaml; exit code 1 if any is damaged or changed"
    runs.add_argument("--verify", action="store_true", help=verify)
    runs.set_defaults(command=_runs)
    prune = commands.add_parser("prune", help="delete checkpoints except the best and the last", **OPTIONS)
    prune.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="run folders")
    best = "number of checkpoints to keep, best evaluation first (default: 1)"
    prune.add_argument("--keep-best", type=count, default=1, metavar="K", help=best)
    newest = "number of newest checkpoints to keep (default: 1)"
    prune.add_argument("--keep-last", type=positive, default=1, metavar="L", help=newest)
    prune.add_argument("--dry-run", action="store_true", help="only print what would be deleted")
    prune.add_argument("--yes", action="store_true", help="delete without confirmation")
    prune.set_defaults(command=_prune)


def _report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.report.page import Collection

    folder = arguments.runs[0] if len(arguments.runs) == 1 else Path()
    output = Path(arguments.output or folder / "report.html")
    collection = Collection.write(arguments.runs, output, int(arguments.media_mb * 1e6))
    for path, run in collection.runs.items():
        for what in run.parts["about"]["damage"]:
            print(visible(f"'{path}': {what}"), file=sys.stderr)
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


def _watch(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.report.page import open_server

    for run in arguments.runs:
        if run.exists() and not run.is_dir():
            raise UserError(f"'{run}' is a file; give a run folder, e.g. outputs/finetune_rl")
        if not run.exists():
            print(f"'{run}' does not exist yet; it is shown as soon as it does", file=sys.stderr)
    server = open_server(arguments.runs, arguments.port)
    try:
        _show_address(server.server_address[1], arguments)
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


def _show_address(port: int, arguments) -> None:
    from sparring.processes.server import HOST

    if port != arguments.port:
        print(f"port {arguments.port} is taken; using the next free one, {port}", file=sys.stderr)
    address = f"http://{HOST}:{port}/"
    print(f"{address}  (stop with Ctrl-C)", flush=True)
    # without a screen, webbrowser would start a text browser in this terminal
    has_screen = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    if not arguments.no_browser and has_screen:
        import webbrowser

        webbrowser.open(address)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port, 1 to 65535, got '{text}'")
    return int(text)


def _runs(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.evaluation.files import terminal_width, text_table
    from sparring.runs.listing import find_runs

    folders = arguments.folders or [Path(os.environ.get("OUTPUT_BASE") or "outputs")]
    if arguments.verify:
        return _verify(folders, arguments.json)
    found = find_runs(*folders)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(run) for run in found], indent=2))
    elif not found:
        print(f"no runs in {', '.join(map(str, folders))}")
    else:
        rows = [_HEAD, *map(_row, found)]
        columns = len(_HEAD) if any(run.why for run in found) else -1  # `why` only if a run failed
        spare = [_HEAD.index(name) for name in ("why", "task", "best success", "run") if name in _HEAD[:columns]]
        print(text_table((row[:columns] for row in rows), width=terminal_width(), spare=tuple(spare)))
    return 0


def _verify(roots: list[Path], as_json: bool) -> int:
    from sparring.processes.manifest import altered, is_signed, read_manifest
    from sparring.runs.checkpoint import checkpoints, damage_of, weights_file
    from sparring.runs.listing import run_folders

    damaged: dict[str, list[str]] = {}

    def report(path: Path, wrong: list[str]) -> None:
        damaged[str(path)] = wrong
        state = "intact" if wrong or is_signed(read_manifest(path) or {}) else "intact, but not signed by you"
        if not as_json:
            print(visible(f"{path}: {'damaged: ' + '; '.join(wrong) if wrong else state}"))

    for root in roots:
        if not root.is_dir():
            raise UserError(f"'{root}' is not a folder; give run folders, or folders that contain some")
        single = [root] if weights_file(root) else []
        runs = [] if single else list(run_folders(root))
        found = single + [path for run in runs for path in checkpoints(run)]
        for run in runs:
            if changed := altered(run, "config.yaml"):
                report(run, changed)
        for path in found:
            report(path, damage_of(path))
        if not found and not as_json:
            print(f"{root}: no checkpoints")
    if as_json:
        print(json.dumps(damaged, indent=2))
    return int(any(damaged.values()))


def _row(run: "RunState") -> tuple[str, ...]:
    made = f"{run.env_steps:,} steps" if run.env_steps else f"{run.updates:,} updates" if run.updates else "-"
    best = f"{run.best['success_rate']:.0%} ({run.best['low']:.0%} - {run.best['high']:.0%})" if run.best else "-"
    done = "-" if run.fraction is None else f"{run.fraction:.0%}"
    about = run.phase or "?", run.task or "?", run.state, done, made, best
    return run.path, *about, _size(run.bytes), _duration(run.age), run.why or ""


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

    # plan all deletions before the first one; each run once
    prunings = [Pruning.plan(run, arguments.keep_best, arguments.keep_last) for run in dict.fromkeys(arguments.runs)]
    for pruning in prunings:
        kept = ", ".join(f"{path.name} ({why})" for path, why in pruning.kept.items())
        deleted = f"deletes {len(pruning.removed)}, {_size(pruning.bytes)}" if pruning.removed else "nothing to delete"
        unrated = "" if pruning.rated or not arguments.keep_best else "; without evaluations the best are unknown"
        print(f"{pruning.run}: keeps {kept}; {deleted}{unrated}")
    total, bytes_freed = sum(len(p.removed) for p in prunings), sum(p.bytes for p in prunings)
    if arguments.dry_run or not total:
        return 0
    doubtful = [f"'{p.run}'" for p in prunings if p.removed and not p.rated]
    if arguments.yes and arguments.keep_best and doubtful:
        advice = "give --keep-best 0 to keep only the last ones (--keep-last L), or omit --yes and confirm"
        raise UserError(f"{', '.join(doubtful)}: without evaluations the best checkpoints are unknown; {advice}")
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise UserError("confirmation needs a terminal; give --yes to delete, or --dry-run")
        if input(f"delete {total} checkpoints permanently? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 0
    for pruning in prunings:
        pruning.carry_out()
    print(f"freed {_size(bytes_freed)}")
    return 0
