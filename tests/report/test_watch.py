"""The server of the live page: updates, refused requests, robustness."""

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
    """Start servers for given paths; stops them at the end."""
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


def get(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection(HOST, server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def get_updates(server, since=0):
    return json.loads(get(server, f"/data.json?since={since}")[2])


def test_unreadable_folder_is_not_reported_as_a_busy_port(tmp_path, monkeypatch):
    def refuse(collection):
        raise PermissionError(13, "Permission denied", "run/config.yaml")

    monkeypatch.setattr("sparring.report.page.Collection.refresh", refuse)
    with pytest.raises(PermissionError, match="config.yaml"):
        open_server([make_run(tmp_path / "run")], 17310)


def test_only_changed_parts_are_sent(tmp_path, serve):
    run = make_run(tmp_path / "run")
    server = serve(run)
    first = get_updates(server)
    assert set(first["runs"]["0"]) == {"about", "media", "metrics", "evaluations", "timeline"}
    second = get_updates(server, first["version"])
    assert second["runs"] == {} and "together" not in second
    write_lines(run / "episode_metrics.jsonl", [metrics_line(21)], "a")
    third = get_updates(server, second["version"])
    assert list(third["runs"]["0"]) == ["metrics"] and third["runs"]["0"]["metrics"]["rows"] == 21
    # a page that stayed open during a restart of the server
    assert "together" in get_updates(server, 10**6)


def test_resumed_and_new_runs_are_shown(tmp_path, serve):
    outputs = tmp_path / "outputs"
    server = serve(outputs)
    updates = get_updates(server)
    assert updates["runs"]["0"]["about"]["state"] == "waiting" and updates["together"]["order"] == ["0"]
    run = make_run(outputs / "a")
    updates = get_updates(server)
    (number,) = updates["together"]["order"]
    assert updates["runs"][number]["metrics"]["rows"] == 20
    write_lines(run / "episode_metrics.jsonl", [metrics_line(update) for update in range(1, 8)])
    assert get_updates(server)["runs"][number]["metrics"]["rows"] == 7
    make_run(outputs / "b", seed=1)
    updates = get_updates(server)
    assert updates["together"]["labels"] == ["seed 0", "seed 1"] and updates["together"]["order"][0] == number
    # --resume never moves a run aside
    run.rename(outputs / "a-old-1")
    assert len(get_updates(server)["together"]["order"]) == 2


def test_videos_are_served_in_ranges(tmp_path, serve):
    run = make_run(tmp_path / "run", pictures=True)
    server = serve(run)
    (path,) = {video["src"] for video in get_updates(server)["runs"]["0"]["media"]["videos"] if not video["success"]}
    content = (run / "videos/episode_000160_1.mp4").read_bytes()
    status, headers, body = get(server, f"/{path}")
    assert (status, body, headers["Content-Type"]) == (200, content, "video/mp4")
    assert headers["Accept-Ranges"] == "bytes"
    status, headers, body = get(server, f"/{path}", Range="bytes=10-19")
    assert (status, body) == (206, content[10:20])
    assert headers["Content-Range"] == f"bytes 10-19/{len(content)}"
    status, headers, body = get(server, f"/{path}", Range=f"bytes={len(content)}-")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(content)}")
    status, headers, body = get(server, f"/{path}", "HEAD")
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
        # unsupported kinds: the complete file
        ("lines=1-2", (0, 99)),
        ("bytes=1-2,5-6", (0, 99)),
    ],
)
def test_byte_ranges(header, expected):
    assert _byte_range(header, 100) == expected


def test_only_media_of_the_runs_are_served(tmp_path, serve):
    run = make_run(tmp_path / "run", pictures=True)
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (run / "videos" / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    server = serve(run)
    assert get(server, "/runs/0/samples/episode_0160_pred_vs_gt.png")[0] == 200
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
        status, _, body = get(server, path)
        assert status == 404 and b"secret" not in body, path
    # another Host header may come from a foreign page (DNS rebinding)
    assert get(server, "/data.json", Host="evil.example")[0] == 403
    assert get(server, "/data.json", Host="localhost:8000")[0] == 200


def test_invalid_addresses_give_no_traceback(tmp_path, serve, capfd):
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
        assert get(server, path)[0] == expected, path[:40]
    assert capfd.readouterr().err == ""


def test_server_responds_during_300_incomplete_requests(tmp_path, serve):
    server = serve(make_run(tmp_path / "run"))
    before = active_count()
    connections = [socket.create_connection(server.server_address, timeout=10) for _ in range(300)]
    for half in connections:
        half.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-")
    began = time.monotonic()
    assert get(server, "/data.json")[0] == 200
    assert time.monotonic() - began < 2 and active_count() - before <= server.connections
    for half in connections:
        half.close()


def test_next_port_is_used_if_one_is_busy(tmp_path, serve):
    run = make_run(tmp_path / "run")
    first, second = serve(run, port=17350), serve(run, port=17350)
    assert (first.server_address[0], second.server_address[0]) == (HOST, HOST)
    assert second.server_address[1] > first.server_address[1] >= 17350
    with socket.socket() as last:
        last.bind((HOST, 65535))
        with pytest.raises(UserError, match="--port 65535: "):
            open_server([run], 65535)


def test_ctrl_c_ends_watch_without_output(tmp_path):
    run = make_run(tmp_path / "run")
    words = [sys.executable, "-m", "sparring", "watch", str(run), "--no-browser", "--port", "17390"]
    environment = dict(os.environ)
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = process.stdout.readline()
    assert line.startswith(f"http://{HOST}:17") and line.endswith("(stop with Ctrl-C)\n")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=20)[1] == "" and process.returncode == 0


def test_file_is_refused_as_run(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("")
    assert main(["watch", str(tmp_path / "config.yaml"), "--no-browser"]) == 2
    assert "config.yaml' is a file; give a run folder" in capsys.readouterr().err
