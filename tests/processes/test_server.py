"""The server stays available with incomplete requests, slow readers and invalid requests."""

import http.client
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from sparring.processes.server import HOST, BoundedHandler, BoundedServer

PAGE = b"x" * (16 << 20)  # more than the buffers of a connection hold


class Handler(BoundedHandler):
    def answer(self, address):
        if address.path == "/wrong":
            raise RuntimeError("a mistake of ours")
        self.send(PAGE if address.path == "/large" else b"fine", "text/plain")


class Server(BoundedServer):
    connections, request_s, answer_s = 8, 2.0, 3.0


@pytest.fixture
def server():
    server = Server(0, Handler)
    threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True, name="accepts").start()
    yield server
    server.shutdown()
    server.server_close()


def get(server, path="/"):
    connection = http.client.HTTPConnection(HOST, server.server_address[1], timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def send(server, text, wait_s=10):
    """The response to these bytes, until the server closes the connection or the response is complete."""
    with socket.create_connection(server.server_address, timeout=wait_s) as connection:
        connection.sendall(text)
        answer = b""
        while not answer.endswith(b"fine") and (more := connection.recv(1 << 16)):
            answer += more
    return answer


def until(happens, limit_s=10):
    end = time.monotonic() + limit_s
    while not happens() and time.monotonic() < end:
        time.sleep(0.05)
    assert happens()


def test_incomplete_requests_do_not_block_others_or_hold_threads(server):
    before = threading.active_count()
    with ExitStack() as opened:
        for _ in range(300):
            half = opened.enter_context(socket.create_connection(server.server_address, timeout=10))
            half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")
        assert threading.active_count() - before <= Server.connections
        began = time.monotonic()
        assert get(server) == (200, b"fine")
        assert time.monotonic() - began < 2
        # the connections are still open, but their threads end after `request_s`
        until(lambda: threading.active_count() <= before)
    assert server._open == {} and server._closing == set()


def test_endless_request_head_times_out(server):
    """A client that sends single bytes must not restart the limit."""
    began = time.monotonic()
    with socket.create_connection(server.server_address, timeout=10) as slow, pytest.raises(OSError):
        slow.sendall(b"GET / HTTP/1.1\r\n")
        while True:
            slow.sendall(b"X")
            time.sleep(0.1)
            assert time.monotonic() - began < 10
    assert time.monotonic() - began > Server.request_s - 0.5


def test_client_that_does_not_read_times_out(server):
    with socket.create_connection(server.server_address, timeout=10) as slow:
        slow.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: [waits for waits, _ in server._open.values()] == [False])
        until(lambda: not server._open)


def test_busy_server_responds_503(server):
    with ExitStack() as opened:
        for _ in range(Server.connections):
            slow = opened.enter_context(socket.create_connection(server.server_address, timeout=10))
            slow.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        until(lambda: [waits for waits, _ in server._open.values()] == [False] * Server.connections)
        assert get(server)[0] == 503
    until(lambda: not server._open)
    assert get(server) == (200, b"fine")


def test_connection_may_send_several_requests(server):
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(server.server_address, timeout=10) as connection:
        for _ in range(5):
            connection.sendall(request)
            answer = connection.recv(1 << 16)
            while not answer.endswith(b"fine"):
                answer += connection.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: [\r\n\r\n", 400),
        (b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: 127.0.0.1.evil.example\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\nHost: localhost@evil.example\r\n\r\n", 403),
        (b"GET / HTTP/1.1\r\n\r\n", 403),
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/9.9.9\r\n\r\n", 400),
        (b"GET / HTTP/" + b"9" * 5000 + b".1\r\n\r\n", 400),
        (b"\xff\xfe\x00 / HTTP/1.1\r\nHost: localhost\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc", 501),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: 1\r\n" * 200 + b"\r\n", 431),
    ],
)
def test_invalid_requests_are_refused_without_a_traceback(server, capfd, text, status):
    assert send(server, text).split()[1] == str(status).encode()
    assert get(server) == (200, b"fine")
    assert capfd.readouterr().err == ""


def test_body_of_a_request_is_not_a_request(server):
    body = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
    head = b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert send(server, head + body).count(b"HTTP/1.1 200") == 1


def test_exception_in_a_handler_is_logged_in_one_line(server, capfd):
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        get(server, "/wrong")
    assert get(server) == (200, b"fine")
    err = capfd.readouterr().err
    assert err.startswith("sparring: a request failed: RuntimeError: a mistake of ours (") and err.count("\n") == 1


def test_connections_without_a_thread_are_closed(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("can't start")))
        for _ in range(2 * server.connections):
            assert send(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
    assert not server._open and get(server) == (200, b"fine")
