"""`--gpus N`: this command again, in N processes that find each other. Starts fast: no torch here."""

import os
import signal
import socket
import subprocess
import sys
import time

INTERRUPTED = 130
# how long processes may take to leave after one of them failed; a collective that waits for it never returns
PATIENCE = 30.0


def launch(processes: int, arguments: list[str]) -> int:
    """Run `sparring ARGUMENTS` in `processes` processes of this machine; the first failure ends them all."""
    environment = os.environ | {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes))),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "sparring", *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    # a terminal tells the workers of Ctrl-C itself; `kill` tells only us. They save and leave on their own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: _terminate(workers))
    return _wait_for_all(workers)


def _wait_for_all(workers: list[subprocess.Popen]) -> int:
    """0, or the code of the first failure; 130 where all left because they were asked to."""
    codes: list[int] = []
    deadline = float("inf")
    while workers:
        time.sleep(0.05)
        for worker in [w for w in workers if w.poll() is not None]:
            workers.remove(worker)
            codes.append(worker.returncode)
            if worker.returncode not in (0, INTERRUPTED) and deadline == float("inf"):
                _terminate(workers)
                deadline = time.monotonic() + PATIENCE
        if time.monotonic() > deadline:
            for worker in workers:
                worker.kill()
    failures = [code for code in codes if code not in (0, INTERRUPTED)]
    return failures[0] if failures else max(codes)


def _terminate(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
