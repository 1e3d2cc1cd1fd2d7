"""The report page: one self-contained HTML file, and the server of the live page."""

import base64
import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from threading import Lock
from urllib.parse import SplitResult, parse_qs, unquote

import orjson

from sparring import __version__
from sparring.errors import UserError
from sparring.processes.files import open_regular, write_whole
from sparring.processes.server import BoundedHandler, BoundedServer
from sparring.record.names import meanings
from sparring.report.media import TYPES, Picture
from sparring.report.run_folder import RunFolder

SCRIPTS = ("draw.js", "charts.js", "sections.js", "page.js")
# content security policy of a live page, which may connect to its own server, and of a file, which may not connect
_MAY_FETCH = {
    True: "img-src 'self' data:; media-src 'self'; connect-src 'self'",
    False: "img-src data:; media-src blob:",
}


class Collection:
    """The runs in and below some folders. `changes(since)` returns the parts that changed after that version."""

    def __init__(self, paths: list[Path], make: Callable[[Path], RunFolder]):
        self.paths, self.make = paths, make
        self.version = 0
        self.runs: dict[Path, RunFolder] = {}
        self.numbers: dict[Path, int] = {}  # runs keep their number when others appear or are removed
        self._configs: list[tuple[Path, dict]] | None = None
        self._together: dict = {}
        self._together_changed = 0

    def refresh(self) -> None:
        self.version += 1
        # a folder that does not exist yet stays in the list and may appear later
        found = [run for path in self.paths for run in (RunFolder.all_in(path) or [path])]
        self.runs = {path: self.runs.get(path) or self.make(path) for path in dict.fromkeys(found)}
        for path, run in self.runs.items():
            self.numbers.setdefault(path, len(self.numbers))
            run.refresh(self.version)
        configs = [(path, run.config) for path, run in self.runs.items()]
        if configs != self._configs:
            self._configs, self._together_changed = configs, self.version
            self._together = {"order": [str(self.numbers[path]) for path in self.runs], "sparring": __version__}
            self._together |= RunFolder.side_by_side(list(self.runs.values())) | {"meanings": meanings()}

    def changes(self, since: int = 0) -> bytes:
        """JSON of `runs` (number -> changed part -> content) and `together` (order, labels, settings)."""
        if since > self.version:  # the page was served by another process
            since = 0
        changed = {
            str(self.numbers[path]): {name: run.parts[name] for name, at in run.changed.items() if at > since}
            for path, run in self.runs.items()
        }
        content = {"version": self.version, "made": time.time(), "runs": {k: v for k, v in changed.items() if v}}
        if self._together_changed > since:
            content["together"] = self._together
        return orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)

    def page(self, live: bool) -> bytes:
        assets = files("sparring.report") / "assets"
        script = b"".join((assets / name).read_bytes() for name in SCRIPTS)
        texts = {"POLICY": _MAY_FETCH[live].encode(), "STYLE": (assets / "style.css").read_bytes(), "SCRIPT": script}
        # escaped, so that no text of a run can close the script element
        texts |= {"LIVE": b"live" if live else b"", "CONTENT": self.changes().replace(b"<", b"\\u003c")}
        html = (assets / "page.html").read_bytes()
        for name, text in texts.items():
            html = html.replace(b"{{%s}}" % name.encode(), text, 1)
        return html

    @classmethod
    def write(cls, paths: list[Path], output: Path, budget: int) -> "Collection":
        found = {path: RunFolder.all_in(path) for path in paths}
        runs = [run for below in found.values() for run in below]
        lacking = [path for path, below in found.items() if not below]
        if lacking:
            listed = ", ".join(f"'{path}'" for path in lacking)
            raise UserError(f"{listed}: no run there; give run folders, e.g. outputs/finetune_rl")
        have_pictures = [run for run in runs if any((run / name).exists() for name in ("videos", "samples"))]
        share = budget // max(1, len(have_pictures))

        def data_uri(run: Path, picture: Picture) -> str:
            content = (run / picture.file).read_bytes()
            return f"data:{TYPES[Path(picture.file).suffix]};base64,{base64.b64encode(content).decode()}"

        collection = Collection(runs, lambda path: RunFolder(path, data_uri, share))
        collection.refresh()
        try:
            write_whole(output, collection.page(live=False))
        except OSError as error:
            advice = "give --output FILE in an existing folder that you can write to"
            raise UserError(f"'{output}' cannot be written ({error.strerror}); {advice}") from None
        return collection


_MORE_PORTS = 50  # number of further ports that are tried if the requested one is taken
_BLOCK = 1 << 20


class _Server(BoundedServer):
    def __init__(self, paths: list[Path], port: int):
        super().__init__(port, _Handler)
        self.collection = Collection(
            paths, lambda path: RunFolder(path, lambda run, seen: f"runs/{self.collection.numbers[run]}/{seen.file}")
        )
        self.lock = Lock()  # each request is answered in its own thread

    def refreshed(self, answer: Callable[[Collection], bytes]) -> bytes:
        with self.lock:
            self.collection.refresh()
            return answer(self.collection)

    def picture(self, number: int, file: str) -> Path | None:
        """A file that the page may show: directly below videos/ or samples/ of a run."""
        with self.lock:
            runs = {known: path for path, known in self.collection.numbers.items()}
        if number not in runs or not re.fullmatch(r"(videos/[^/\\\0]+\.mp4|samples/[^/\\\0]+\.png)", file):
            return None
        path = runs[number] / file
        with suppress(OSError):  # the name may be too long
            return path if path.is_file() and path.resolve().is_relative_to(runs[number].resolve()) else None
        return None


def open_server(paths: list[Path], port: int) -> _Server:
    for candidate in range(port, min(port + _MORE_PORTS, 65536)):
        try:
            server = _Server(paths, candidate)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        # outside the try above: an error in reading a run must not try the next port
        try:
            server.collection.refresh()
        except BaseException:
            server.server_close()
            raise
        return server
    raise UserError(f"--port {port}: this port and the next {_MORE_PORTS - 1} are taken or not allowed; give another")


class _Handler(BoundedHandler):
    server: _Server

    def answer(self, address: SplitResult) -> None:
        if address.path == "/":
            self.send(self.server.refreshed(lambda runs: runs.page(live=True)), "text/html; charset=utf-8")
        elif address.path == "/data.json":
            text = parse_qs(address.query).get("since", ["0"])[0]
            since = int(text) if re.fullmatch("[0-9]{1,15}", text) else 0
            self.send(self.server.refreshed(lambda runs: runs.changes(since)), "application/json")
        elif match := re.fullmatch(r"/runs/([0-9]{1,9})/(.+)", unquote(address.path)):
            path = self.server.picture(int(match[1]), match[2])
            self._send_file(path) if path else self.refuse(HTTPStatus.NOT_FOUND)
        else:
            self.refuse(HTTPStatus.NOT_FOUND)

    def _send_file(self, path: Path) -> None:
        """Send the file, or the requested range: without ranges a browser cannot seek in a video."""
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            asked = _byte_range(self.headers.get("Range"), size)
            if asked is None:
                refusal = {"Content-Range": f"bytes */{size}", "Content-Length": "0"}
                self.begin(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, refusal)
                return
            first, last = asked
            left, part = last - first + 1, "Range" in self.headers
            headers = {"Content-Type": TYPES[path.suffix], "Accept-Ranges": "bytes", "Content-Length": left}
            headers |= {"Content-Range": f"bytes {first}-{last}/{size}"} if part else {}
            self.begin(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK, headers)
            file.seek(first)
            while self.command == "GET" and (block := file.read(min(left, _BLOCK))):
                self.wfile.write(block)
                left -= len(block)


def _byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First and last byte of `bytes=first-last`, `bytes=first-` or `bytes=-count`; None if there are no such bytes."""
    match = re.fullmatch("bytes=([0-9]*)-([0-9]*)", header or "bytes=0-")
    if not match or match[0] == "bytes=-":
        return 0, size - 1
    # the first digits of a long number are enough to be past the end
    given = [int(text[:18]) if text else None for text in (text.lstrip("0") or text[:1] for text in match.groups())]
    if given[0] is None:
        first, last = max(size - (given[1] or 0), 0), size - 1
    else:
        first, last = given[0], size - 1 if given[1] is None else min(given[1], size - 1)
    return (first, last) if first <= last else None
