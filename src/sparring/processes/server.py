"""An HTTP server of this machine that nobody can tie up: connections, threads and times are bounded.

Each connection has a thread. Where all are taken, a new one takes the place of that which has waited longest for the
rest of its request; where all are being answered, it is told to come again.
"""

import sys
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from socket import SHUT_RDWR, socket
from threading import Condition, Thread
from typing import Any
from urllib.parse import SplitResult, urlsplit

from sparring.errors import describe_error

HOST = "127.0.0.1"
_BUSY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


class BoundedServer(HTTPServer):
    """Subclasses give a handler, and may change the bounds."""

    connections = 32
    request_s = 15.0  # from the connection, or the last answer, to the end of a request's head
    answer_s = 120.0  # for all of an answer, also to somebody who reads slowly
    allow_reuse_port = False  # else a second server would share the port of a first one
    request_queue_size = 128

    def __init__(self, port: int, handler: type["BoundedHandler"]):
        self._open: dict[socket, tuple[bool, float]] = {}  # waits for a request, until when; the oldest first
        self._lost: set[socket] = set()  # those of them that were given up, and whose threads are about to end
        self._changed = Condition()
        super().__init__((HOST, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if len(self._open) >= self.connections:
                for each in [each for each, (waits, _) in self._open.items() if waits and each not in self._lost][:1]:
                    self._give_up(each)
                self._changed.wait_for(lambda: len(self._open) < self.connections, timeout=1)
            has_room = len(self._open) < self.connections
            if has_room:
                self._open[request] = True, time.monotonic() + self.request_s
        if not has_room:
            request.settimeout(1)
            request.send(_BUSY)
            self.shutdown_request(request)
            return
        try:
            Thread(target=self._serve, args=(request, client_address), daemon=True).start()
        except RuntimeError:  # this process may have no more threads
            self._forget(request)
            raise

    def service_actions(self) -> None:
        """Twice a second: gives up connections whose time is over."""
        now = time.monotonic()
        with self._changed:
            for request in [each for each, (_, until) in self._open.items() if until < now]:
                self._give_up(request)

    def goes_on(self, request: Any, waits: bool) -> bool:
        """From now on this connection waits for a request, or is being answered; False: it was given up."""
        with self._changed:
            del self._open[request]  # to the end: it is not the oldest
            self._open[request] = waits, time.monotonic() + (self.request_s if waits else self.answer_s)
            return request not in self._lost

    def server_close(self) -> None:
        super().server_close()
        with self._changed:
            for request in self._open:
                self._give_up(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up in the middle of a video is no error."""
        error = sys.exception()
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            print(f"sparring: a request failed: {describe_error(error)}", file=sys.stderr)

    def _serve(self, request: Any, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self.shutdown_request(request)
            self._forget(request)

    def _forget(self, request: socket) -> None:
        with self._changed:
            del self._open[request]
            self._lost.discard(request)
            self._changed.notify_all()

    def _give_up(self, request: socket) -> None:
        """Its thread, which reads or writes, finds it closed and ends."""
        self._lost.add(request)
        with suppress(OSError):  # it has gone by itself
            request.shutdown(SHUT_RDWR)


class BoundedHandler(BaseHTTPRequestHandler):
    """Answers those who call this machine by its name: a page of another site may not read ours. `answer` is to do."""

    server: BoundedServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # of HTTP/0.9 an answer would have no status
    server_version = "sparring"
    sys_version = ""

    def answer(self, address: SplitResult) -> None:
        raise NotImplementedError

    def setup(self) -> None:
        self.request.settimeout(self.server.answer_s)  # also where nobody looks after times
        super().setup()

    def handle_one_request(self) -> None:
        self.server.goes_on(self.request, waits=True)
        super().handle_one_request()

    def parse_request(self) -> bool:
        understood = super().parse_request()
        whole = self.server.goes_on(self.request, waits=False)  # else its head ended because we closed it
        self.close_connection = self.close_connection or not whole
        return understood and whole

    def do_GET(self) -> None:
        try:
            address, host = urlsplit(self.path), urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            self.refuse(HTTPStatus.BAD_REQUEST)
            return
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what follows would be taken for a request
        if host in (HOST, "localhost"):
            self.answer(address)
        else:
            self.refuse(HTTPStatus.FORBIDDEN)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """No line for every request."""

    def refuse(self, status: HTTPStatus) -> None:
        self.send(status.phrase.encode(), "text/plain", status)

    def send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.begin(status, {"Content-Type": kind, "Content-Length": len(body), "Cache-Control": "no-store"})
        if self.command != "HEAD":
            self.wfile.write(body)

    def begin(self, status: HTTPStatus, headers: dict[str, Any]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
