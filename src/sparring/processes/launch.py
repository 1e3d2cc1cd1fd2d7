"""`--gpus N`: this command again, in N processes that find each other. Starts fast: no torch here.

A process that dies or hangs ends the run: the others cannot go on without it, nor save.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NoReturn

from sparring.errors import LEFT_ALONE, UserError
from sparring.processes.child import share_of_cores
from sparring.processes.heartbeat import FILE, Signs, Watchdog

INTERRUPTED, MISTAKE = 130, UserError.exit_code
LOOK_S = 0.05
# what the others get to notice that one has failed, and to put their robots away; NCCL never notices
PATIENCE = 3.0


def launch(processes: int, arguments: list[str], watchdog_s: float, folder: Path) -> int:
    """Run `sparring ARGUMENTS`, which trains in `folder`, in `processes` processes of this machine; 0 if all is well.

    One that hangs, as seen for `watchdog_s` seconds, fails; the first failure ends them all.
    """
    with tempfile.TemporaryDirectory(prefix="sparring-") as place:
        signs = Signs.make(Path(place) / "signs", processes)
        workers = _start(processes, arguments, Path(place) / "signs")
        # a terminal tells the workers of Ctrl-C itself; `kill` tells only us. They save and leave on their own
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda number, frame: _terminate(workers))
        failure = _wait_for_all(workers, Watchdog(signs, processes, watchdog_s))
    code = _exit_code([worker.returncode for worker in workers])
    if failure:
        print(f"sparring: {failure}{_way_on(folder)}", file=sys.stderr, flush=True)
        # nothing is left to put away; libraries, which classes of one's own may have brought, would take their time
        os._exit(code)
    return code


def leave(code: int) -> NoReturn:
    """The end of one of these processes: all that was put off until then is done, but libraries are not taken down.

    Threads of gloo, which end with the interpreter, can abort the process where another one has hung up already.
    """
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _start(processes: int, arguments: list[str], signs: Path) -> list[subprocess.Popen]:
    environment = os.environ | {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share_of_cores(processes))),
        FILE: str(signs),
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "sparring", *arguments],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]


def _wait_for_all(workers: list[subprocess.Popen], watchdog: Watchdog) -> str | None:
    """Until they have ended, some of them by us; which one failed how, in words, unless it has said so itself."""
    last = time.monotonic()
    while alive := [rank for rank, worker in enumerate(workers) if worker.poll() is None]:
        if any(worker.returncode not in (None, 0, INTERRUPTED) for worker in workers):
            return _end_after_a_failure(workers)
        time.sleep(LOOK_S)
        # who was stopped itself, as by Ctrl-Z, does not blame the others for it
        now, passed = time.monotonic(), min(time.monotonic() - last, 10 * LOOK_S)
        last = now
        if hung := watchdog.look(alive, passed):
            _kill(workers)
            ranks, why = hung
            return (
                f"{_named(ranks, workers)} {why} for rollout.watchdog_s={watchdog.watchdog_s:g} seconds (ten times as "
                "long before the first update), so all were ended. If it was only slow, raise rollout.watchdog_s."
            )
    return _told(workers)


def _end_after_a_failure(workers: list[subprocess.Popen]) -> str | None:
    deadline = time.monotonic() + PATIENCE
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    told = _told(workers)
    _kill(workers)
    return told


def _told(workers: list[subprocess.Popen]) -> str | None:
    """Which one it was that failed: the others leave because they are alone. None where it has said all there is."""
    codes = {rank: w.returncode for rank, w in enumerate(workers) if w.returncode not in (None, 0, INTERRUPTED)}
    if not codes or MISTAKE in codes.values():
        return None
    _, code, rank = min((code == LEFT_ALONE, code, rank) for rank, code in codes.items())
    who = _named([rank], workers)
    if code >= 0:
        return f"{who} failed with exit code {code}; what it said is above."
    hint = ", which is often the system's, out of memory: try fewer envs" if -code == signal.SIGKILL else ""
    return f"{who} died: killed by signal {-code} ({signal.Signals(-code).name}{hint})."


def _named(ranks: list[int], workers: list[subprocess.Popen]) -> str:
    numbers = ", ".join(f"{rank} (pid {workers[rank].pid})" for rank in ranks)
    return f"process{'es' if len(ranks) > 1 else ''} {numbers} of 0..{len(workers) - 1}"


def _way_on(folder: Path) -> str:
    saved = [int(number) for path in folder.glob("checkpoint-*") if (number := path.name.rpartition("-")[2]).isdigit()]
    if not saved:
        return " No checkpoint was saved yet: the same command starts anew."
    return f" The same command goes on from {folder / f'checkpoint-{max(saved)}'}."


def _exit_code(codes: list[int]) -> int:
    """As if there were one process: 130 where all left because they were asked to."""
    failures = [code for code in codes if code not in (0, INTERRUPTED)]
    return MISTAKE if MISTAKE in failures else 1 if failures else max(codes)


def _kill(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()


def _terminate(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.terminate()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
