"""The live page's server: what it tells, what it refuses, what it survives."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from threading import Thread, active_count

import pytest
from doubles_report import make_run, metrics_line, write_lines

from sparring.cli.main import main
from sparring.errors import UserError
from sparring.processes.server import HOST
from sparring.report.page import _byte_range, open_server


@pytest.fixture
def serve():
    """Starts a server for some paths, and ends it."""
    servers = []

    def start(*paths, port=17310):
        server = open_server(list(paths), port)
        Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(HOST, server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def news(server, since=0):
    return json.loads(ask(server, f"/data.json?since={since}")[2])


def test_a_folder_that_may_not_be_read_is_not_taken_for_a_port(tmp_path, monkeypatch):
    def refuse(collection):
        raise PermissionError(13, "Permission denied", "run/config.yaml")

    monkeypatch.setattr("sparring.report.page.Collection.refresh", refuse)
    with pytest.raises(PermissionError, match="config.yaml"):
        open_server([make_run(tmp_path / "run")], 17310)


def test_only_what_changed_is_sent(tmp_path, serve):
    run = make_run(tmp_path / "run")
    server = serve(run)
    first = news(server)
    assert set(first["runs"]["0"]) == {"about", "media", "metrics", "evaluations", "timeline"}
    second = news(server, first["version"])
    assert second["runs"] == {} and "together" not in second
    write_lines(run / "episode_metrics.jsonl", [metrics_line(21)], "a")
    third = news(server, second["version"])
    assert list(third["runs"]["0"]) == ["metrics"] and third["runs"]["0"]["metrics"]["rows"] == 21
    # a page that was open while the server was started anew
    assert "together" in news(server, 10**6)


def test_it_survives_a_resumed_run_and_new_ones(tmp_path, serve):
    outputs = tmp_path / "outputs"
    server = serve(outputs)
    told = news(server)
    assert told["runs"]["0"]["about"]["state"] == "waiting" and told["together"]["order"] == ["0"]
    run = make_run(outputs / "a")
    told = news(server)
    (number,) = told["together"]["order"]
    assert told["runs"][number]["metrics"]["rows"] == 20
    write_lines(run / "episode_metrics.jsonl", [metrics_line(update) for update in range(1, 8)])
    assert news(server)["runs"][number]["metrics"]["rows"] == 7
    make_run(outputs / "b", seed=1)
    told = news(server)
    assert told["together"]["labels"] == ["seed 0", "seed 1"] and told["together"]["order"][0] == number
    # --resume never moves a run aside
    run.rename(outputs / "a-old-1")
    assert len(news(server)["together"]["order"]) == 2


def test_videos_are_served_in_ranges(tmp_path, serve):
    run = make_run(tmp_path / "run", pictures=True)
    server = serve(run)
    (path,) = {video["src"] for video in news(server)["runs"]["0"]["media"]["videos"] if not video["success"]}
    content = (run / "videos/episode_000160_1.mp4").read_bytes()
    status, headers, body = ask(server, f"/{path}")
    assert (status, body, headers["Content-Type"]) == (200, content, "video/mp4")
    assert headers["Accept-Ranges"] == "bytes"
    status, headers, body = ask(server, f"/{path}", Range="bytes=10-19")
    assert (status, body) == (206, content[10:20])
    assert headers["Content-Range"] == f"bytes 10-19/{len(content)}"
    status, headers, body = ask(server, f"/{path}", Range=f"bytes={len(content)}-")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(content)}")
    status, headers, body = ask(server, f"/{path}", "HEAD")
    assert (status, body, headers["Content-Length"]) == (200, b"", str(len(content)))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, (0, 99)),
        ("bytes=0-", (0, 99)),
        ("bytes=5-7", (5, 7)),
        ("bytes=90-200", (90, 99)),
        ("bytes=-10", (90, 99)),
        ("bytes=-500", (0, 99)),
        ("bytes=100-", None),
        ("bytes=7-5", None),
        ("bytes=-0", None),
        ("bytes=99999999999999999999999-", None),
        (f"bytes={'9' * 5000}-", None),
        (f"bytes=-{'9' * 5000}", (0, 99)),
        ("bytes=00000000000000000000005-7", (5, 7)),
        # of a kind that we do not know: the whole
        ("lines=1-2", (0, 99)),
        ("bytes=1-2,5-6", (0, 99)),
    ],
)
def test_byte_ranges(header, expected):
    assert _byte_range(header, 100) == expected


def test_nothing_but_pictures_of_the_runs_can_be_read(tmp_path, serve):
    run = make_run(tmp_path / "run", pictures=True)
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (run / "videos" / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    server = serve(run)
    assert ask(server, "/runs/0/samples/episode_0160_pred_vs_gt.png")[0] == 200
    for path in (
        "/runs/0/../secret.mp4",
        "/runs/0/videos/../../secret.mp4",
        "/runs/0/videos/..%2f..%2fsecret.mp4",
        "/runs/0/%2e%2e/secret.mp4",
        "/runs/0/videos/link.mp4",
        "/runs/0/config.yaml",
        "/runs/0/videos/index.jsonl",
        "/runs/0/videos/none.mp4",
        "/runs/7/videos/episode_000160_0.mp4",
        f"/{tmp_path}/secret.mp4",
        "/etc/passwd",
    ):
        status, _, body = ask(server, path)
        assert status == 404 and b"secret" not in body, path
    # by another name this could be a page of anybody's
    assert ask(server, "/data.json", Host="evil.example")[0] == 403
    assert ask(server, "/data.json", Host="localhost:8000")[0] == 200


def test_odd_addresses_are_answered_without_a_traceback(tmp_path, serve, capfd):
    run = make_run(tmp_path / "run", pictures=True)
    (run / "videos" / "fifo.mp4").unlink(missing_ok=True)
    os.mkfifo(run / "videos" / "fifo.mp4")
    server = serve(run)
    for path, expected in {
        f"/runs/0/videos/{'a' * 5000}.mp4": 404,
        "/runs/99999999999999999999999/videos/a.mp4": 404,
        "/runs/%D9%A0/videos/episode_000160_0.mp4": 404,
        "/runs/0/videos/episode_000160_0.mp4%00.mp4": 404,
        "/runs/0/videos/fifo.mp4": 404,
        f"/data.json?since={'9' * 5000}": 200,
        "/data.json?since=%C2%B2": 200,
        "/data.json?since=-1": 200,
    }.items():
        assert ask(server, path)[0] == expected, path[:40]
    assert capfd.readouterr().err == ""


def test_300_half_requests_do_not_keep_the_page_from_anybody(tmp_path, serve):
    server = serve(make_run(tmp_path / "run"))
    before = active_count()
    held = [socket.create_connection(server.server_address, timeout=10) for _ in range(300)]
    for half in held:
        half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")
    began = time.monotonic()
    assert ask(server, "/data.json")[0] == 200
    assert time.monotonic() - began < 2 and active_count() - before <= server.connections
    for half in held:
        half.close()


def test_a_port_that_is_taken(tmp_path, serve):
    run = make_run(tmp_path / "run")
    first, second = serve(run, port=17350), serve(run, port=17350)
    assert (first.server_address[0], second.server_address[0]) == (HOST, HOST)
    assert second.server_address[1] > first.server_address[1] >= 17350
    with socket.socket() as last:
        last.bind((HOST, 65535))
        with pytest.raises(UserError, match="--port 65535: "):
            open_server([run], 65535)


def test_ctrl_c_ends_it_quietly(tmp_path):
    run = make_run(tmp_path / "run")
    words = [sys.executable, "-m", "sparring", "watch", str(run), "--no-browser", "--port", "17390"]
    environment = dict(os.environ)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith(f"http://{HOST}:17") and line.endswith("(stop with Ctrl-C)\n")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == "" and process.returncode == 0


def test_a_file_is_no_run(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("")
    assert main(["watch", str(tmp_path / "config.yaml"), "--no-browser"]) == 2
    assert "config.yaml' is a file; give a run folder" in capsys.readouterr().err
