"""The guard of a command that makes envs: a small process that outlives the command. Linux only.

A thread cannot act while an env holds Python's lock, nor after os._exit, a crash or SIGKILL. The guard kills a command
whose env is late, reports an end that the command did not report, and ends processes that envs left behind, except
those with their own session.
"""

import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from pathlib import Path

from sparring.processes.heartbeat import OWN, overdue

# environment variable that marks the processes of a command
_COMMAND = "SPARRING_COMMAND"
# period of the guard; its delay after a deadline, until which the watchdog in the process should have acted; time for a
# process to end after SIGABRT (which prints its stack) or SIGTERM; time for workers, which close their envs first
_POLL_S, _LATE_S, _ABORT_S, _CLOSE_S = 0.5, 7.0, 2.0, 6.0
# time for a command to end after its last message: uploads may take six minutes, and libraries may have threads
_LEAVE_S = 600.0
_DIED = (
    "the command ended without a message: it was killed (by the system, often for lack of memory, or by a user), or "
    "code of an env ended it (os._exit, or a crash in a C library, whose stack is above). With env.vectorize=process "
    "gymnasium envs run in separate processes: the run then reports such an end and saves. The same command resumes "
    "from the last checkpoint."
)


def start_guard(owner: object, table: int, watchdog_s: float) -> None:
    """Start the guard of this process; it ends with `owner`. `table`: the file of the process's `OwnStages`."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # another system, or an old Linux
        return
    os.environ[_COMMAND] = f"{os.getpid()}-{time.monotonic_ns()}"
    arguments = [pidfd, table, os.getpid(), os.getpgrp(), os.getsid(0), watchdog_s]
    guard = subprocess.Popen(
        [sys.executable, "-P", "-m", "sparring.processes.guard", *map(str, arguments)],
        pass_fds=[pidfd, table],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        # its own group, so that Ctrl-C does not reach it
        process_group=0,
    )
    os.close(pidfd)
    weakref.finalize(owner, guard.kill).atexit = False


def _main() -> None:
    pidfd, file, pid, group, session = map(int, sys.argv[1:6])
    watchdog_s = float(sys.argv[6])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    table, end = memoryview(mmap.mmap(file, 0)).cast("d"), select.poll()
    end.register(pidfd, select.POLLIN)
    last, late_from = time.monotonic(), 0.0
    while not end.poll(1000 * _POLL_S):
        now = time.monotonic()
        # after a stop (Ctrl-Z), running stages get their whole time again, as in the watchdog
        if now - last > 10 * _POLL_S or _is_stopped(pid):
            late_from, table[0] = now + watchdog_s, now if table[0] else 0
        last = now
        late = [column for column, deadline in enumerate(table[1:]) if 0 < deadline < now - _LATE_S]
        why = (
            ""
            if now - (table[0] or now) < _LEAVE_S
            else f"the command is still running {_LEAVE_S:g} seconds after it reported its end"
        )
        if late and now > late_from:
            group_index, column = divmod(late[0], len(OWN))
            why = f"{overdue(OWN[column], group_index, watchdog_s)}, and it holds Python's lock"
        if why:
            table[0] = now
            print(f"sparring: {why}: the command is killed. Its stack:", file=sys.stderr, flush=True)
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            signal.pidfd_send_signal(pidfd, signal.SIGABRT)
            if not end.poll(1000 * _ABORT_S):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    # with several ranks, the launcher reports it
    if not table[0] and "RANK" not in os.environ:
        print(f"sparring: {_DIED}", file=sys.stderr, flush=True)
    _end_remaining(group, session)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _end_remaining(group: int, session: int) -> None:
    """End the processes that envs and workers left behind: SIGTERM first for those of envs, then SIGKILL."""
    began, terminated = time.monotonic(), set()
    while remaining := _remaining(session):
        for pid in remaining:
            with suppress(ProcessLookupError):
                is_env = os.getpgid(pid) == group
                if time.monotonic() - began > (_ABORT_S if is_env else _CLOSE_S):
                    os.kill(pid, signal.SIGKILL)
                elif is_env and pid not in terminated:
                    terminated.add(pid)
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)


def _remaining(session: int) -> list[int]:
    mark, found = f"{_COMMAND}={os.environ[_COMMAND]}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


if __name__ == "__main__":
    _main()
