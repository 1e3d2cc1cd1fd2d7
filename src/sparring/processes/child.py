"""Child interpreters: how they start, talk, are noticed to die and end; what parent and child do about signals."""

import logging
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparring.errors import UserError
from sparring.processes.heartbeat import DOING, OwnStages

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

log = logging.getLogger("sparring.env")

# lines of output that an error about a dead child repeats; a longer line, as of a progress bar, is cut
_LAST_LINES, _LONGEST_LINE = 20, 2000
# how long after its death a child's output may still be on its way
_OUTPUT_S = 1.0
# how often a parent that waits looks whether its children live; a normal death shows at once as a closed pipe
_LOOK_S = 0.2
# bytes of a message that are written at once: of up to 16,384 a reader who sees the first has all
_PART = 16_000
_MORE, _LAST = b"+", b"."
# what a scheduler, or a terminal that is closed, sends
_TO_LEAVE = (signal.SIGTERM, signal.SIGHUP)
# exit code of a child that a signal ended -> what that often means
_HINTS = {
    -signal.SIGKILL: "; killed, by hand or by the system: that often means out of memory, try fewer envs",
    -signal.SIGBUS: "; often no room is left in shared memory, or in buffer.folder",
}


class MessagePipe:
    """One end of a pipe for pickled messages, which are written and read in parts.

    `wait` is called before each part. It returns when that part will not block, or raises: the other side may stop in
    the middle of a message.
    """

    def __init__(self, connection: "Connection"):
        self.connection = connection

    def send(self, message: Any, wait: Callable[[], None] | None = None) -> None:
        self.write(self.pack(message), wait)

    @staticmethod
    def pack(message: Any) -> bytes:
        """By value: torch would have a plain `send` pass its tensors on through files and sockets of its own."""
        return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)

    def write(self, packed: bytes, wait: Callable[[], None] | None = None) -> None:
        for first in range(0, len(packed), _PART):
            if wait:
                wait()
            mark = _LAST if first + _PART >= len(packed) else _MORE
            self.connection.send_bytes(mark + packed[first : first + _PART])

    def receive(self, wait: Callable[[], None] | None = None) -> Any:
        parts: list[bytes] = []
        while not parts or parts[-1][:1] == _MORE:
            if wait:
                wait()
            parts.append(self.connection.recv_bytes())
        return pickle.loads(b"".join(part[1:] for part in parts))


class Child:
    """A fresh interpreter that runs `python -m MODULE FD`, where FD is its end of a pipe; see `connect_to_parent`.

    Not by multiprocessing: scripts need no `if __name__ == "__main__"`, notebooks work, and torch is not inherited.
    """

    def __init__(self, module: str, name: str, environment: Mapping[str, str]):
        from multiprocessing import Pipe

        connection, theirs = Pipe()
        # it imports what this process can
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.name, self._owner = name, os.getpid()
        self.process = subprocess.Popen(
            # -u, -X faulthandler: its last output comes through. -P: without the current folder, see PYTHONPATH
            [sys.executable, "-u", "-X", "faulthandler", "-P", "-m", module, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**environment, "PYTHONPATH": path},
            # out of the terminal's foreground group: Ctrl-C reaches the parent only, even while the child starts
            process_group=0,
            **_Output.streams(),
        )
        theirs.close()
        self.pipe = MessagePipe(connection)
        self._output = _Output(self.process, name)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection.fileno(), select.POLLIN)
        self._writable.register(connection.fileno(), select.POLLOUT)
        log.debug("%s started as process %s", name, self.process.pid)

    def send(self, message: Any, check: Callable[[], None] | None = None) -> None:
        """`check` is called now and then while there is no room, and may raise."""
        # a death is noticed by `receive`
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(message, partial(_wait, self._writable, check) if check else None)

    def receive(self, check: Callable[[], None]) -> Any:
        """`check` is called now and then while nothing comes, and may raise. EOFError: it has hung up, or died."""
        try:
            return self.pipe.receive(partial(_wait, self._readable, check))
        except ConnectionResetError:
            raise EOFError from None

    def has_message(self) -> bool:
        return bool(self._readable.poll(0))

    def is_stopped(self) -> bool:
        """By a signal: it can neither answer nor leave by itself."""
        if self.process.poll() is not None or not hasattr(os, "waitid"):
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # it has ended since
            return False

    def death(self, patience_s: float) -> str:
        """How it died, once it has closed its end of the pipe: the end of a sentence about it."""
        self.end(patience_s)
        code = self.process.returncode
        log.debug("%s died with exit code %s", self.name, code)
        return f"died with exit code {code}{_HINTS.get(code, '')}{self._output.last_words()}"

    def hang_up(self) -> None:
        self.pipe.connection.close()

    def end(self, patience_s: float) -> None:
        """Hang up; it gets so many seconds to leave by itself."""
        self.hang_up()
        # a process forked from the owner has copies of all this, which are not its own to end
        if os.getpid() != self._owner:
            return
        try:
            self.process.wait(0 if self.is_stopped() else patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # what an env started, and did not end
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _wait(ready: "select.poll", check: Callable[[], None]) -> None:
    while not ready.poll(1000 * _LOOK_S):
        check()


class _Output:
    """What a child writes to stdout and stderr goes into a log, line by line; a thread reads it until the child ends.

    Where logging is not set up, nobody would keep it: the child then writes where its parent does.
    """

    def __init__(self, process: subprocess.Popen, name: str):
        self.name = name
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._thread = threading.Thread(target=self._read, args=[process.stdout], daemon=True)
        if process.stdout is not None:
            self._thread.start()

    @staticmethod
    def streams() -> dict:
        """For `subprocess.Popen`."""
        is_kept = logging.getLogger("sparring").handlers
        return {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if is_kept else {}

    def last_words(self) -> str:
        if self._thread.ident is not None:
            self._thread.join(_OUTPUT_S)
        return "\n".join(["; its last words:", *(f"  {line}" for line in self.lines)]) if self.lines else ""

    def _read(self, stream) -> None:
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                if text := line.decode(errors="replace").rstrip():
                    self.lines.append(text)
                    log.debug("%s: %s", self.name, text)


def connect_to_parent(leave: Callable[[], None]) -> MessagePipe:
    """In a child: its end of the pipe. Ctrl-C, SIGTERM and SIGHUP are left to the parent, which saves and hangs up.

    It also hangs up by dying. Then `leave` is called in a thread of its own, and the process ends, whatever it is at.
    """
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # by a handler: all that the child starts would ignore it as well, and an env could not end its simulator
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
        # calls in libraries go on as if there had been none
        signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    connection = Connection(int(sys.argv[1]))

    def leave_with_parent() -> None:
        hung_up = select.poll()
        # for no event but the end, which is always reported
        hung_up.register(connection.fileno(), 0)
        hung_up.poll()
        leave()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    return MessagePipe(connection)


def error_report(error: BaseException) -> tuple[str, str | None]:
    """What happened, and the traceback; None where it says nothing more, as of a mistake that a person can mend."""
    mendable = isinstance(error, UserError) or not isinstance(error, Exception)
    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    if not isinstance(error, Exception):
        what = f"called sys.exit({error.code})" if isinstance(error, SystemExit) else f"raised {what}"
    return " ".join([what, *getattr(error, "__notes__", ())]), None if mendable else traceback.format_exc()


def describe_env_failure(error: Exception) -> str | None:
    """A sentence about an error that an env raised, and below it the lines of the env's own. None: any other error."""
    stage = getattr(error, "failed_at", None)
    if stage is None:
        return None
    said, _ = error_report(error)
    # of a worker they are in the message
    frames, ours = traceback.extract_tb(error.__traceback__), Path(__file__).parents[1]
    own = next((n for n, frame in enumerate(reversed(frames)) if Path(frame.filename).is_relative_to(ours)), 0)
    lines = traceback.format_list(frames[len(frames) - own :])
    return "".join(
        [f"{DOING[stage]} failed: {said}", *(["\n\nTraceback of the env:\n", *lines] if own else [])]
    ).rstrip()


@contextmanager
def forward_signals(children: list[subprocess.Popen]) -> Iterator[None]:
    """While children run that save and leave on their own: a terminal tells them of Ctrl-C itself, `kill` only us."""

    def tell(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)

    handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN, **dict.fromkeys(filter(_is_heard, _TO_LEAVE), tell)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_heard(number: int) -> bool:
    """Not where nohup has it ignored."""
    return signal.getsignal(number) is not signal.SIG_IGN


class Interrupt:
    """The first Ctrl-C (or SIGTERM, SIGHUP) asks the loop to stop after this update; the second stops at once.

    An env that is at work `grace_s` seconds after the first is broken off.
    """

    def __init__(self, speaks: bool = True, grace_s: float = math.inf):
        self.speaks, self.grace_s, self.asked = speaks, grace_s, False
        self._before: dict[int, Any] = {}

    def __enter__(self):
        # in another thread, whoever runs us there handles its own signals
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, *filter(_is_heard, _TO_LEAVE)]
            self._before = {number: signal.signal(number, self._ask) for number in numbers}
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if OwnStages.now is not None:
            OwnStages.now.stop_at = time.monotonic() + self.grace_s
        if self.speaks:
            asked = "stopping after this update, then saving; once more gives up without saving"
            logging.getLogger(__name__).warning("\n%s", asked)


def usable_cores(shared_by: int = 1) -> int:
    """For each of so many that work at the same time. Of a machine of 64 cores this process may have 4."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // shared_by)
