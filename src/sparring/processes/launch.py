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
from sparring.processes.child import forward_signals, usable_cores
from sparring.processes.heartbeat import FILE, Watchdog

INTERRUPTED, MISTAKE = 130, UserError.exit_code
LOOK_S = 0.05
# what the others get to notice that one has failed, and to put their robots away; NCCL never notices
PATIENCE = 3.0


def launch(processes: int, arguments: list[str], watchdog_s: float, folder: Path) -> int:
    """Run `sparring ARGUMENTS`, which trains in `folder`, in `processes` processes of this machine; 0 if all is well.

    One that hangs, as seen for `watchdog_s` seconds, fails; the first failure ends them all.
    """
    with tempfile.TemporaryDirectory(prefix="sparring-") as place:
        file = Path(place) / "heartbeats"
        watchdog = Watchdog(file, processes, watchdog_s)
        workers = _start(processes, arguments, file)
        with forward_signals(workers):
            failure = _wait_for_all(workers, watchdog)
    code = _exit_code([worker.returncode for worker in workers])
    if failure:
        numbers = [path.name.rpartition("-")[2] for path in folder.glob("checkpoint-*")]
        last = max((int(number) for number in numbers if number.isdigit()), default=None)
        goes_on = f"The same command goes on from {folder / f'checkpoint-{last}'}."
        goes_on = "No checkpoint was saved yet: the same command starts anew." if last is None else goes_on
        print(f"sparring: {failure} {goes_on}", file=sys.stderr, flush=True)
        # nothing is left to put away; libraries, which classes of one's own may have brought, would take their time
        os._exit(code)
    return code


def leave(code: int) -> NoReturn:
    """The end of one of these processes: all that was put off until then is done, but libraries are not taken down.

    Threads of gloo, which end with the interpreter, can abort the process where another one has hung up already.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _start(processes: int, arguments: list[str], heartbeats: Path) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), FILE: str(heartbeats)}
    environment.setdefault("OMP_NUM_THREADS", str(usable_cores(processes)))
    # -P: without the working directory, see __main__.py
    command = [sys.executable, "-P", "-m", "sparring", *arguments]
    workers: list[subprocess.Popen] = []
    try:
        for rank in map(str, range(processes)):
            workers.append(subprocess.Popen(command, env=environment | {"RANK": rank, "LOCAL_RANK": rank}))
    except OSError:
        _kill(workers)
        raise
    return workers


def _wait_for_all(workers: list[subprocess.Popen], watchdog: Watchdog) -> str | None:
    """Wait until all have ended, or end them. Returns which one failed and how, unless it has said so itself."""
    last = time.monotonic()
    while alive := [rank for rank, worker in enumerate(workers) if worker.poll() is None]:
        if any(worker.returncode not in (None, 0, INTERRUPTED) for worker in workers):
            deadline = time.monotonic() + PATIENCE
            while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
                time.sleep(LOOK_S)
            failure = _failure_message(workers)
            _kill(workers)
            return failure
        time.sleep(LOOK_S)
        # a launcher that was stopped itself, as by Ctrl-Z, does not blame the others for it
        now, passed = time.monotonic(), min(time.monotonic() - last, 10 * LOOK_S)
        last = now
        if hung := watchdog.look(alive, passed):
            _kill(workers)
            ranks, why = hung
            return (
                f"{_named(ranks, workers)} {why} for rollout.watchdog_s={watchdog.watchdog_s:g} seconds (ten times as "
                "long before the first update), so all were ended. If it was only slow, raise rollout.watchdog_s."
            )
    return _failure_message(workers)


def _failure_message(workers: list[subprocess.Popen]) -> str | None:
    """Which one failed: the others leave because they are alone. None: it has printed all there is to say."""
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


def _exit_code(codes: list[int]) -> int:
    """As if there were one process: 130 where all left because they were asked to."""
    failures = [code for code in codes if code not in (0, INTERRUPTED)]
    return MISTAKE if MISTAKE in failures else 1 if failures else max(codes)


def _kill(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
