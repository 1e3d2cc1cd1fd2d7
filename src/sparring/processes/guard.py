"""The guard of a command that makes envs: a small process that outlives it. Linux only.

No thread acts while an env holds Python's lock, nor after os._exit, a crash or SIGKILL. The guard kills a command whose
env is late, reports an end that the command did not, and ends the processes that envs started and left, except those
that have a session of their own.
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

# in the environment of all that the command starts: which command it was
_COMMAND = "SPARRING_COMMAND"
# how often the guard looks; how long after a deadline it acts, when the watchdog in the process has not; what a process
# gets to end after SIGABRT, which prints its stack, or SIGTERM; what workers get, which close their envs first
_LOOK_S, _LATE_S, _ABORT_S, _CLOSE_S = 0.5, 7.0, 2.0, 6.0
# what a command gets to end after its last message: uploads take up to six minutes, and libraries have threads
_LEAVE_S = 600.0
_DIED = (
    "the command ended without a message: the system killed it (often out of memory), somebody did, or an env's own "
    "code ended it (os._exit, a crash in a C library; then a stack is above). env.vectorize=process runs gymnasium "
    "envs in processes of their own: then the run reports such an end, and is saved. The same command resumes from the "
    "last checkpoint."
)


def start_guard(owner: object, table: int, watchdog_s: float) -> None:
    """Of this process, for as long as `owner` lives; `table`: the file of its `OwnStages`."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # another system, or an old Linux
        return
    os.environ[_COMMAND] = f"{os.getpid()}-{time.monotonic_ns()}"
    place = [pidfd, table, os.getpid(), os.getpgrp(), os.getsid(0), watchdog_s]
    guard = subprocess.Popen(
        [sys.executable, "-P", "-m", "sparring.processes.guard", *map(str, place)],
        pass_fds=[pidfd, table],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        # Ctrl-C does not reach it
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
    last, patient_until = time.monotonic(), 0.0
    while not end.poll(1000 * _LOOK_S):
        now = time.monotonic()
        # as of the watchdog: what was stopped, as by Ctrl-Z, is given its time again
        if now - last > 10 * _LOOK_S or _is_stopped(pid):
            patient_until, table[0] = now + watchdog_s, now if table[0] else 0
        last = now
        late = [column for column, deadline in enumerate(table[1:]) if 0 < deadline < now - _LATE_S]
        why = (
            ""
            if now - (table[0] or now) < _LEAVE_S
            else f"the command has not ended {_LEAVE_S:g} seconds after its end"
        )
        if late and now > patient_until:
            lane, column = divmod(late[0], len(OWN))
            why = f"{overdue(OWN[column], lane, watchdog_s)}, and it holds Python's lock"
        if why:
            table[0] = now
            print(f"sparring: {why}: it is killed. Its stack:", file=sys.stderr, flush=True)
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            signal.pidfd_send_signal(pidfd, signal.SIGABRT)
            if not end.poll(1000 * _ABORT_S):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    # of several ranks the launcher reports it
    if not table[0] and "RANK" not in os.environ:
        print(f"sparring: {_DIED}", file=sys.stderr, flush=True)
    _end_what_is_left(group, session)


def _is_stopped(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _end_what_is_left(group: int, session: int) -> None:
    began, asked = time.monotonic(), set()
    while left := _left(session):
        for pid in left:
            with suppress(ProcessLookupError):
                is_env = os.getpgid(pid) == group
                if time.monotonic() - began > (_ABORT_S if is_env else _CLOSE_S):
                    os.kill(pid, signal.SIGKILL)
                elif is_env and pid not in asked:
                    asked.add(pid)
                    os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)


def _left(session: int) -> list[int]:
    mark, found = f"{_COMMAND}={os.environ[_COMMAND]}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (entry / "environ").read_bytes().split(b"\0") and os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
    return [pid for pid in found if pid != os.getpid()]


if __name__ == "__main__":
    _main()
