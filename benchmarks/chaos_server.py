"""Can another process on this machine block or crash `sparring watch`, or read files that are not meant for it?

Each trial attacks a real `sparring watch` of a small run for --seconds, while an honest client reads the page and its
data repeatedly; then Ctrl-C. Verdicts: `served`; bad:

- `not served`: the honest client waited for longer than 2 s, times the load per core before the attack if that is above
  1 (within this time, it may retry after a closed connection or `503 Service Unavailable`)
- `read too much`: a response contained a file that is not an image or video of the run
- `unbounded`: during the attack, more than 40 threads, 60 open files or 64 MB of resident memory above the level before
  it; or more than four additional threads or open files 20 s after it
- `error output`: any line on stderr; `died`; `no end`: no exit with status 0 within 10 s of Ctrl-C
"""

import argparse
import http.client
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).parents[1] / "tests" / "doubles"))
from doubles_report import make_run  # noqa: E402

HOST, SECRET = "127.0.0.1", b"this is nobody's business"
SERVED_S, END_S, FREED_S = 2.0, 10.0, 20.0
# limits of the increase; the server has 32 connections, a thread for each
THREADS, FILES, MB, FEW = 40, 60, 64, 4
BAD = ("not served", "read too much", "unbounded", "error output", "died", "no end")
HALF = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-"


class Attack:
    """Address and end of an attack, and its count of responses that contain the secret."""

    def __init__(self, port: int, seconds: float, seed: int):
        self.address, self.end, self.rng = (HOST, port), time.monotonic() + seconds, random.Random(seed)
        self.read_too_much = 0

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=5)

    def is_running(self) -> bool:
        return time.monotonic() < self.end

    def send(self, data: bytes) -> None:
        """Send, then read until the server closes the connection or pauses for half a second."""
        with suppress(OSError), self.connect() as connection:
            connection.sendall(data)
            connection.settimeout(0.5)
            answer = b""
            while len(answer) < 1 << 20 and (more := connection.recv(1 << 16)):
                answer += more
                if SECRET in answer:
                    self.read_too_much += 1
                    return


def half_open(attack: Attack) -> None:
    """Hold 1,500 connections with half a request each."""
    with ExitStack() as held:
        connections = []
        while attack.is_running():
            if len(connections) < 1500:
                with suppress(OSError):
                    connections.append(held.enter_context(attack.connect()))
                    connections[-1].sendall(HALF)
            else:
                time.sleep(0.05)


def slow_heads(attack: Attack) -> None:
    """Send single bytes of a header on 200 connections."""
    connections: list[socket.socket] = []
    while attack.is_running():
        while len(connections) < 200:
            with suppress(OSError):
                connections.append(attack.connect())
                connections[-1].sendall(HALF)
        for connection in [*connections]:
            try:
                connection.sendall(b"x")
            except OSError:
                connection.close()
                connections.remove(connection)
        time.sleep(0.1)
    for connection in connections:
        connection.close()


def large_heads(attack: Attack) -> None:
    start = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
    heads = [start + b"X: " + b"a" * (8 << 20), start + b"X: 1\r\n" * (1 << 20), b"GET /" + b"a" * (8 << 20)]
    heads += [b"A" * (8 << 20), start + b"X" * (4 << 20) + b": 1", b"\r\n" * (4 << 20)]
    while attack.is_running():
        attack.send(attack.rng.choice(heads) + b"\r\n\r\n")


def random_requests(make: Callable[[], list[bytes]]) -> Callable[[Attack], None]:
    def act(attack: Attack) -> None:
        requests = make()
        while attack.is_running():
            attack.send(attack.rng.choice(requests))

    return act


def get(path: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"GET " + path + b" HTTP/1.1", b"Host: localhost", b"Connection: close", *headers, b"", b""])


def long_numbers() -> list[bytes]:
    requests = []
    for number in (b"9" * 5000, b"9" * 60_000, b"-1", b"1e999", b"0x10", "\N{ARABIC-INDIC DIGIT THREE}".encode()):
        requests += [get(b"/data.json?since=" + number), get(b"/runs/" + number + b"/videos/a.mp4")]
        requests += [get(b"/", b"Content-Length: " + number), get(b"/", b"Range: bytes=" + number + b"-")]
        requests += [get(b"/runs/0/videos/rollout.mp4", b"Range: bytes=0-" + number)]
        requests += [b"GET / HTTP/" + number + b".1\r\n\r\n", b"GET / HTTP/1." + number + b"\r\n\r\n"]
    return requests


def odd_hosts() -> list[bytes]:
    hosts = [
        b"[",
        b"]",
        b"[::1",
        b"[::1]:x",
        b"evil.example",
        b"localhost@evil.example",
        b"a" * 60_000,
        b"\x00",
        b":",
        b"",
    ]
    requests = [b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n\r\n" for host in hosts]
    requests += [b"GET http://[/ HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n"]
    return [*requests, b"GET / HTTP/1.1\r\n" + b"Host: localhost\r\n" * 90 + b"\r\n"]


def bad_utf8() -> list[bytes]:
    texts = [b"\xff\xfe\x00", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", bytes(range(128, 256))]
    requests = [get(b"/" + text) for text in texts] + [get(b"/runs/0/videos/" + text + b".mp4") for text in texts]
    requests += [text + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n" for text in texts]
    requests += [get(b"/", b"X-" + text + b": " + text, b"Range: " + text) for text in texts]
    return requests + [get(b"/runs/0/videos/%ff%fe%ed%a0%80.mp4"), get(b"/data.json?since=%ff%fe")]


def paths() -> list[bytes]:
    """Files outside the run, and files in it that are not images or videos."""
    found = [b"/secret.txt", b"/../secret.txt", b"//secret.txt", b"/runs/0/videos/../../secret.txt", b"/etc/passwd"]
    for file in (
        b"../secret.txt",
        b"../../secret.txt",
        b"..%2f..%2fsecret.txt",
        b"%2e%2e/secret.mp4",
        b"..\\secret.mp4",
    ):
        found += [b"/runs/0/videos/" + file, b"/runs/0/" + file, b"/runs/0/samples/" + file]
    found += [
        b"/runs/0/videos/link.mp4",
        b"/runs/0/samples/link.png",
        b"/runs/0/videos/folder.mp4",
        b"/runs/0/config.yaml",
    ]
    found += [
        b"/runs/0/videos/fifo.mp4",
        b"/runs/0/videos/%00.mp4",
        b"/runs/0/videos/link.mp4%00",
        b"/runs/0/secret.txt",
    ]
    found += [b"/runs/0/videos//" + b"%2f" * 3000 + b".mp4", b"/runs/0/videos/" + b"a" * 5000 + b".mp4", b"/runs/-1/a"]
    return [get(path) for path in found]


def connections(attack: Attack) -> None:
    """Open as many connections as possible, with a request, half a request or none; reset half of them."""
    while attack.is_running():
        with suppress(OSError), attack.connect() as connection:
            if attack.rng.random() < 0.5:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(attack.rng.choice([get(b"/none"), HALF, b""]))


def garbage(attack: Attack) -> None:
    """Pipeline requests and garbage on one connection, without waiting for responses."""
    while attack.is_running():
        rng = attack.rng
        parts = [
            rng.choice(
                [get(b"/data.json"), rng.randbytes(200), b"\r\n", b"POST / HTTP/1.1\r\n\r\n", HALF, b"\x16\x03\x01"]
            )
        ]
        parts += [get(b"/").replace(b"close", b"keep-alive")] * rng.randrange(50) + [rng.randbytes(rng.randrange(5000))]
        rng.shuffle(parts)
        attack.send(b"".join(parts))


def slow_readers(attack: Attack) -> None:
    """Request the page repeatedly and read nothing."""
    with ExitStack() as held:
        for _ in range(64):
            with suppress(OSError):
                connection = held.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.settimeout(2)
                connection.connect(attack.address)
                connection.sendall(get(b"/").replace(b"close", b"keep-alive") * 200)
        while attack.is_running():
            time.sleep(0.05)


ATTACKS: dict[str, tuple[Callable[[Attack], None], ...]] = {
    "half-open requests": (half_open,),
    "slow heads": (slow_heads,),
    "large heads": (large_heads,) * 4,
    "long numbers": (random_requests(long_numbers),) * 4,
    "odd hosts": (random_requests(odd_hosts),) * 4,
    "bad UTF-8": (random_requests(bad_utf8),) * 4,
    "paths": (random_requests(paths),) * 4,
    "many connections": (connections,) * 8,
    "pipelined garbage": (garbage,) * 4,
    "slow readers": (slow_readers,),
}
ATTACKS["everything"] = tuple(attack for (attack, *_) in ATTACKS.values() if attack is not slow_readers)
CASES = ATTACKS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=8, help="duration of an attack (default: 8)")
    parser.add_argument("--times", type=int, default=2, help="trials of each attack (default: 2)")


def trials(name: str, args: argparse.Namespace, work: Path) -> Iterator[dict]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    run = make_watched_run(work / name)
    for number in range(args.times):
        yield run_attack(run, ATTACKS[name], args.seconds, args.seed + number) | {"of": args.times}


def summary(trials: list[dict]) -> dict:
    most = {
        name: max(trial.get(name, 0) for trial in trials) for name in ("worst_s", "limit_s", "threads", "files", "mb")
    }
    return {"requests": sum(trial.get("requests", 0) for trial in trials), "most": most}


def make_watched_run(place: Path) -> Path:
    """Make a run with secret files around it and links to them in it."""
    run = make_run(place / "run", pictures=True)
    (place / "secret.txt").write_bytes(SECRET)
    (run / "secret.txt").write_bytes(SECRET)
    for name in ("videos/link.mp4", "samples/link.png"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).symlink_to(place / "secret.txt")
    (run / "videos" / "folder.mp4").mkdir()
    os.mkfifo(run / "videos" / "fifo.mp4")
    return run


class Client:
    """Reads the page and its data repeatedly, in another process because attackers hold the interpreter lock."""

    def __init__(self, port: int, limit_s: float):
        fork = multiprocessing.get_context("fork")
        self.port, self.limit_s, self.stopped = port, limit_s, fork.Event()
        self.results, results = fork.Pipe(duplex=False)
        self.process = fork.Process(target=self.read_repeatedly, args=(results,), daemon=True)
        self.process.start()

    def read_repeatedly(self, results: Connection) -> None:
        requests = tried_again = late = 0
        worst_s = 0.0
        while not self.stopped.is_set():
            began = time.monotonic()
            while not self.served("/data.json" if requests % 2 else "/"):
                tried_again += 1
                if time.monotonic() - began > self.limit_s:
                    break
                time.sleep(0.05)
            seconds = time.monotonic() - began
            late += seconds > self.limit_s
            requests, worst_s = requests + 1, max(worst_s, seconds)
            self.stopped.wait(0.05)
        results.send({"requests": requests, "tried_again": tried_again, "late": late, "worst_s": round(worst_s, 2)})

    def stop(self) -> dict[str, float]:
        self.stopped.set()
        found = self.results.recv() if self.results.poll(4 * self.limit_s) else {"requests": 0, "late": 1}
        self.process.kill()
        return found

    def served(self, path: str) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=2 * self.limit_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return bool(answer.read()) and answer.status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def resource_usage(server: psutil.Process) -> dict[str, float]:
    return {
        "threads": server.num_threads(),
        "files": server.num_fds(),
        "mb": round(server.memory_info().rss / 1e6, 1),
    }


def run_attack(run: Path, attacks: tuple[Callable[[Attack], None], ...], seconds: float, seed: int) -> dict:
    words = [
        sys.executable,
        "-m",
        "sparring",
        "watch",
        str(run),
        "--no-browser",
        "--port",
        str(20_000 + os.getpid() % 20_000),
    ]
    with open(run.parent / "errors", "w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        try:
            found = attack(process, attacks, seconds, seed)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
        errors.seek(0)
        # the server of another trial or part may use the port
        output = re.sub(r"^port \d+ is taken; .*\n?", "", errors.read()).strip()
    verdict = found.pop("verdict")
    return {"verdict": "error output" if output and verdict == "served" else verdict, **found, "output": output[-1000:]}


def attack(process: subprocess.Popen, attacks: tuple[Callable[[Attack], None], ...], seconds: float, seed: int) -> dict:
    address = process.stdout.readline()
    if (found := re.search(r"http://127\.0\.0\.1:(\d+)", address)) is None:
        return {"verdict": "died"}
    port, server = int(found[1]), psutil.Process(process.pid)
    client = Client(port, SERVED_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
    time.sleep(1)
    before = most = resource_usage(server)
    made = [Attack(port, seconds, seed + number) for number in range(len(attacks))]
    threads = [threading.Thread(target=act, args=(each,), daemon=True) for act, each in zip(attacks, made, strict=True)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and process.poll() is None:
        with suppress(psutil.Error):
            most = {name: max(most[name], now) for name, now in resource_usage(server).items()}
        time.sleep(0.1)
    freed_by = time.monotonic() + FREED_S
    while not (freed := is_freed(process, server, before)) and time.monotonic() < freed_by and process.poll() is None:
        time.sleep(0.1)
    more = {name: round(most[name] - before[name], 1) for name in most}
    result = client.stop() | more
    if process.poll() is not None:
        return result | {"verdict": "died"}
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    if process.returncode != 0:
        return result | {"verdict": "no end", "exit_code": process.returncode}
    if sum(each.read_too_much for each in made):
        return result | {"verdict": "read too much"}
    if not freed or more["threads"] > THREADS or more["files"] > FILES or more["mb"] > MB:
        return result | {"verdict": "unbounded", "calm": freed}
    return result | {"verdict": "not served" if result["late"] or not result["requests"] else "served"}


def is_freed(process: subprocess.Popen, server: psutil.Process, before: dict[str, float]) -> bool:
    with suppress(psutil.Error):
        now = resource_usage(server)
        return all(now[name] <= before[name] + FEW for name in ("threads", "files"))
    return process.poll() is not None
