"""`--gpus N`: runs this command in N connected processes. Does not import torch, so that it starts fast.

A process that dies or hangs ends the run: the others can neither continue nor save without it.
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

INTERRUPTED, USER_ERROR = 130, UserError.exit_code
POLL_S = 0.05
# time for the others to detect that one has failed and to close their envs; NCCL never detects it
GRACE_S = 3.0


def launch(processes: int, arguments: list[str], watchdog_s: float, folder: Path) -> int:
    """Run `sparring ARGUMENTS`, which trains in `folder`, in several processes of this machine; returns the exit code.

    A process that hangs for `watchdog_s` seconds fails, and the first failure ends all of them.
    """
    with tempfile.TemporaryDirectory(prefix="sparring-") as temporary:
        file = Path(temporary) / "heartbeats"
        watchdog = Watchdog(file, processes, watchdog_s)
        workers = _start(processes, arguments, file)
        with forward_signals(workers):
            failure = _wait_for_all(workers, watchdog)
    code = _exit_code([worker.returncode for worker in workers])
    if failure:
        numbers = [path.name.rpartition("-")[2] for path in folder.glob("checkpoint-*")]
        last = max((int(number) for number in numbers if number.isdigit()), default=None)
        advice = f"The same command resumes from {folder / f'checkpoint-{last}'}."
        advice = "There is no checkpoint yet: the same command starts from scratch." if last is None else advice
        print(f"sparring: {failure} {advice}", file=sys.stderr, flush=True)
        # nothing is left to clean up, and unloading libraries, which user-defined classes may have imported, takes time
        os._exit(code)
    return code


def leave(code: int) -> NoReturn:
    """End one of these processes: run its exit functions, but do not unload libraries.

    Threads of gloo end with the interpreter and can abort the process if another one has already disconnected.
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
    """Wait until all have ended, or end them. Returns a message about the one that failed, unless it printed one."""
    last = time.monotonic()
    while alive := [rank for rank, worker in enumerate(workers) if worker.poll() is None]:
        if any(worker.returncode not in (None, 0, INTERRUPTED) for worker in workers):
            deadline = time.monotonic() + GRACE_S
            while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
                time.sleep(POLL_S)
            failure = _failure_message(workers)
            _kill(workers)
            return failure
        time.sleep(POLL_S)
        # limited, so that a stop of the launcher itself (Ctrl-Z) does not count as a hang of the others
        now, passed = time.monotonic(), min(time.monotonic() - last, 10 * POLL_S)
        last = now
        if hung := watchdog.check(alive, passed):
            _kill(workers)
            ranks, why = hung
            return (
                f"{_named(ranks, workers)} {why} for rollout.watchdog_s={watchdog.watchdog_s:g} seconds (ten times as "
                "long before the first update), so all were ended. If it was only slow, raise rollout.watchdog_s."
            )
    return _failure_message(workers)


def _failure_message(workers: list[subprocess.Popen]) -> str | None:
    """A message about the process that failed first; the others end with LEFT_ALONE. None: it printed a message."""
    codes = {rank: w.returncode for rank, w in enumerate(workers) if w.returncode not in (None, 0, INTERRUPTED)}
    if not codes or USER_ERROR in codes.values():
        return None
    _, code, rank = min((code == LEFT_ALONE, code, rank) for rank, code in codes.items())
    who = _named([rank], workers)
    if code >= 0:
        return f"{who} failed with exit code {code}; its output is above."
    hint = ", often by the system for lack of memory: try fewer envs" if -code == signal.SIGKILL else ""
    return f"{who} died: killed by signal {-code} ({signal.Signals(-code).name}{hint})."


def _named(ranks: list[int], workers: list[subprocess.Popen]) -> str:
    numbers = ", ".join(f"{rank} (pid {workers[rank].pid})" for rank in ranks)
    return f"process{'es' if len(ranks) > 1 else ''} {numbers} of 0..{len(workers) - 1}"


def _exit_code(codes: list[int]) -> int:
    """The exit code of the whole command: 130 if all processes ended because of an interrupt."""
    failures = [code for code in codes if code not in (0, INTERRUPTED)]
    return USER_ERROR if USER_ERROR in failures else 1 if failures else max(codes)


def _kill(workers: list[subprocess.Popen]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
