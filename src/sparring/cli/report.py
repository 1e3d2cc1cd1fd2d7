"""`sparring report` and `sparring watch`."""

import argparse
import os
import sys
from pathlib import Path

from sparring.cli.arguments import OPTIONS
from sparring.errors import UserError

MEDIA_MB, PORT = 30, 6007  # defaults of --media-mb and --port


def add(commands) -> None:
    report = commands.add_parser("report", help="write what runs learned into one HTML file", **OPTIONS)
    report.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or folders that hold some")
    where, media = (
        "where to write it (RUN/report.html; of several ./report.html)",
        "of videos and pictures (%(default)s)",
    )
    report.add_argument("--output", metavar="HTML", help=where)
    report.add_argument("--media-mb", type=_megabytes, default=MEDIA_MB, metavar="MB", help=media)
    report.set_defaults(command=_report)
    watch = commands.add_parser("watch", help="serve the report on this machine while runs go on", **OPTIONS)
    watch.add_argument("runs", metavar="RUN", nargs="+", help="run folders, or folders that hold or will hold some")
    watch.add_argument("--port", type=_port, default=PORT, metavar="N", help="or the next free one (%(default)s)")
    watch.add_argument("--no-browser", action="store_true", help="only tell the address")
    watch.set_defaults(command=_watch)


def _report(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.report.page import Collection

    runs = [Path(run) for run in arguments.runs]
    beside = runs[0] if len(runs) == 1 else Path()
    output = Path(arguments.output) if arguments.output else beside / "report.html"
    collection = Collection.write(runs, output, int(arguments.media_mb * 1e6))
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


def _watch(arguments: argparse.Namespace, overrides: list[str]) -> int:
    from sparring.report.server import open_server

    for run in map(Path, arguments.runs):
        if run.exists() and not run.is_dir():
            raise UserError(f"'{run}' is a file; give a run folder, e.g. outputs/finetune_rl")
        if not run.exists():
            print(f"'{run}' is not there yet; it is shown when it is", file=sys.stderr)
    server = open_server([Path(run) for run in arguments.runs], arguments.port)
    try:
        _tell(server.server_address[1], arguments)
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0


def _tell(port: int, arguments) -> None:
    from sparring.report.server import HOST

    if port != arguments.port:
        print(f"port {arguments.port} is taken; the next free one is {port}", file=sys.stderr)
    address = f"http://{HOST}:{port}/"
    print(f"{address}  (Ctrl-C ends it)", flush=True)
    # where there is no screen, a browser of the terminal would take it over
    has_screen = sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    if not arguments.no_browser and has_screen:
        import webbrowser

        webbrowser.open(address)


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"expected a port, 1 to 65535, got '{text}'")
    return int(text)
