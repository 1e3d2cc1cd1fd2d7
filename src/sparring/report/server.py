"""The page, live: a small server that only this machine can reach."""

import errno
import os
import re
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.parse import parse_qs, unquote, urlsplit

from sparring.errors import UserError
from sparring.report.media import TYPES
from sparring.report.page import Collection, page
from sparring.report.run_folder import RunFolder

HOST = "127.0.0.1"
# ports that are tried after the one that was asked for
_MORE_PORTS = 50


class Watch(ThreadingHTTPServer):
    """Serves the page, what changed since a version, and the runs' pictures."""

    daemon_threads = True
    # else a second server would share the port of a first one
    allow_reuse_port = False

    def __init__(self, paths: list[Path], port: int):
        super().__init__((HOST, port), _Handler)
        self.collection = Collection(paths, self._run)
        # of a page in several tabs, every one asks in a thread of its own
        self.lock = Lock()

    def changes(self, since: int) -> bytes:
        with self.lock:
            self.collection.refresh()
            return self.collection.changes(since)

    def picture(self, number: int, file: str) -> Path | None:
        """A file that the page may show: right below videos/ or samples/ of a run, and nothing else."""
        with self.lock:
            runs = {known: path for path, known in self.collection.numbers.items()}
        if number not in runs or not re.fullmatch(r"(videos/[^/\\]+\.mp4|samples/[^/\\]+\.png)", file):
            return None
        path = runs[number] / file
        return path if path.is_file() and path.resolve().is_relative_to(runs[number].resolve()) else None

    def _run(self, path: Path) -> RunFolder:
        return RunFolder(path, lambda run, seen: f"runs/{self.collection.numbers[run]}/{seen.file}")

    def handle_error(self, request, client_address) -> None:
        """A browser that hangs up in the middle of a video is no error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def open_server(paths: list[Path], port: int) -> Watch:
    """On this port or the next free one."""
    for candidate in range(port, min(port + _MORE_PORTS, 65536)):
        try:
            server = Watch(paths, candidate)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            continue
        # what is wrong with a run is not wrong with the port
        try:
            server.collection.refresh()
        except BaseException:
            server.server_close()
            raise
        return server
    raise UserError(f"--port {port}: this one and those after it are taken or not allowed; give another")


class _Handler(BaseHTTPRequestHandler):
    server: Watch
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        # a page of another site may not read this one by a name that leads here
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
        address = urlsplit(self.path)
        if host not in (HOST, "localhost"):
            self._refuse(HTTPStatus.FORBIDDEN)
        elif address.path == "/":
            self._send(page(self.server.changes(0), live=True), "text/html; charset=utf-8")
        elif address.path == "/data.json":
            since = parse_qs(address.query).get("since", ["0"])[0]
            self._send(self.server.changes(int(since) if since.isdecimal() else 0), "application/json")
        elif match := re.fullmatch(r"/runs/(\d+)/(.+)", unquote(address.path)):
            path = self.server.picture(int(match[1]), match[2])
            self._send_file(path) if path else self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        """Nobody wants a line for every question."""

    def _refuse(self, status: HTTPStatus) -> None:
        self._send(status.phrase.encode(), "text/plain", status)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._begin(status, {"Content-Type": kind, "Content-Length": str(len(body)), "Cache-Control": "no-store"})
        if self.command == "GET":
            self.wfile.write(body)

    def _send_file(self, path: Path) -> None:
        """Whole, or the range that was asked for: without ranges a browser cannot seek in a video."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            asked = byte_range(self.headers.get("Range"), size)
            if asked is None:
                self._begin(
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                    {"Content-Range": f"bytes */{size}", "Content-Length": "0"},
                )
                return
            first, last = asked
            part = "Range" in self.headers
            headers = {"Content-Type": TYPES[path.suffix], "Accept-Ranges": "bytes", "Content-Length": last - first + 1}
            headers |= {"Content-Range": f"bytes {first}-{last}/{size}"} if part else {}
            self._begin(HTTPStatus.PARTIAL_CONTENT if part else HTTPStatus.OK, headers)
            if self.command == "GET":
                file.seek(first)
                self.wfile.write(file.read(last - first + 1))

    def _begin(self, status: HTTPStatus, headers: dict) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """First and last byte of `bytes=first-last`, `bytes=first-` or `bytes=-count`; None if there are no such bytes."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "bytes=0-")
    if not match or match[0] == "bytes=-":
        return 0, size - 1
    if not match[1]:
        first, last = max(size - int(match[2]), 0), size - 1
    else:
        first, last = int(match[1]), min(int(match[2] or size - 1), size - 1)
    return (first, last) if first <= last else None
