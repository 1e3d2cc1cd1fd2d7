"""A local HTTP server with bounded connections, threads and times, so that no client can block the others.

Each connection has a thread. If all are in use, a new connection replaces the one that has waited longest for the rest
of its request, or else one whose client reads its answer slowly. If there is none, it gets 503 Service Unavailable.
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
    """Subclasses give a handler, and may change the limits."""

    connections = 32
    request_s = 15.0  # limit from the connection, or the last answer, to the end of a request's head
    answer_s = 120.0  # limit for a whole answer
    slow_s = 0.3  # an answer that takes longer may be closed to make room
    allow_reuse_port = False  # a second server must not share the port of the first
    request_queue_size = 1024  # a full queue makes clients wait for a second or more before they try again

    def __init__(self, port: int, handler: type["BoundedHandler"]):
        self._open: dict[socket, tuple[bool, float]] = {}  # (waits for a request, since when); oldest first
        self._closing: set[socket] = set()  # connections that were shut down and whose threads are about to end
        self._changed = Condition()
        super().__init__((HOST, port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if len(self._open) >= self.connections and (least := self._least_needed()) is not None:
                self._shut_down(least)
            if self._closing:
                self._changed.wait_for(lambda: len(self._open) < self.connections, timeout=1)
            has_room = len(self._open) < self.connections
            if has_room:
                self._open[request] = True, time.monotonic()
        if not has_room:
            request.settimeout(1)
            with suppress(OSError):
                request.send(_BUSY)
            self.shutdown_request(request)
            return
        try:
            Thread(target=self._serve, args=(request, client_address), daemon=True).start()
        except RuntimeError:  # this process may have no more threads
            self._forget(request)
            raise

    def _least_needed(self) -> socket | None:
        """The connection to close for a new one: one that waits, or else one whose answer is slow."""
        held = {each: state for each, state in self._open.items() if each not in self._closing}
        slow = time.monotonic() - self.slow_s
        waiting = (each for each, (waits, _) in held.items() if waits)
        answered = (each for each, (_, since) in held.items() if since < slow)
        return next(waiting, None) or next(answered, None)

    def service_actions(self) -> None:
        """Called twice a second: shuts down connections whose time is over."""
        now = time.monotonic()
        with self._changed:
            for request, (waits, since) in list(self._open.items()):
                if now - since > (self.request_s if waits else self.answer_s):
                    self._shut_down(request)

    def update_state(self, request: Any, waits: bool) -> bool:
        """The connection now waits for a request, or is being answered. False: it was shut down."""
        with self._changed:
            del self._open[request]  # moves it to the end: it is not the oldest
            self._open[request] = waits, time.monotonic()
            return request not in self._closing

    def server_close(self) -> None:
        super().server_close()
        with self._changed:
            for request in self._open:
                self._shut_down(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect, such as a browser in the middle of a video."""
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
            self._closing.discard(request)
            self._changed.notify_all()

    def _shut_down(self, request: socket) -> None:
        """The read or write of its thread fails, so the thread ends."""
        self._closing.add(request)
        with suppress(OSError):  # it is closed already
            request.shutdown(SHUT_RDWR)


class BoundedHandler(BaseHTTPRequestHandler):
    """Answers requests to localhost only, so that pages of other sites cannot read ours. Subclasses define `answer`."""

    server: BoundedServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # an HTTP/0.9 answer would have no status
    server_version = "sparring"
    sys_version = ""

    def answer(self, address: SplitResult) -> None:
        raise NotImplementedError

    def setup(self) -> None:
        self.request.settimeout(self.server.answer_s)  # in case service_actions is not called
        super().setup()

    def handle_one_request(self) -> None:
        self.server.update_state(self.request, waits=True)
        super().handle_one_request()

    def parse_request(self) -> bool:
        is_valid = super().parse_request()
        is_complete = self.server.update_state(self.request, waits=False)  # else the head ended by our shutdown
        self.close_connection = self.close_connection or not is_complete
        return is_valid and is_complete

    def do_GET(self) -> None:
        try:
            address, host = urlsplit(self.path), urlsplit(f"//{self.headers.get('Host', '')}").hostname
        except ValueError:
            self.refuse(HTTPStatus.BAD_REQUEST)
            return
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body would be read as the next request
        if host in (HOST, "localhost"):
            self.answer(address)
        else:
            self.refuse(HTTPStatus.FORBIDDEN)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        """Logs nothing for a request."""

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
