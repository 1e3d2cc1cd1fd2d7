"""Child interpreters: start, messages, detection of death, end, and signal handling in parent and child."""

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

# lines of output in an error about a dead child; longer lines, e.g. of a progress bar, are split
_LAST_LINES, _LONGEST_LINE = 20, 2000
# seconds to wait for the remaining output of a dead child
_OUTPUT_S = 1.0
# period in which a waiting parent checks its children; a normal death is seen at once as a closed pipe
_POLL_S = 0.2
# bytes per part of a message: writes of up to 16,384 bytes arrive as a whole
_PART = 16_000
_MORE, _LAST = b"+", b"."
# signals from a scheduler, or from a terminal that is closed
_TO_LEAVE = (signal.SIGTERM, signal.SIGHUP)
# exit code of a child that a signal ended -> the usual cause
_HINTS = {
    -signal.SIGKILL: "; killed by a user or the system, often because of too little memory: try fewer envs",
    -signal.SIGBUS: "; often because shared memory or buffer.folder is full",
}


class MessagePipe:
    """One end of a pipe for pickled messages, which are written and read in parts.

    `wait` is called before each part and returns when that part will not block. It may raise, because the other side
    may stop in the middle of a message.
    """

    def __init__(self, connection: "Connection"):
        self.connection = connection

    def send(self, message: Any, wait: Callable[[], None] | None = None) -> None:
        self.write(self.pack(message), wait)

    @staticmethod
    def pack(message: Any) -> bytes:
        """Pickle by value: with `Connection.send`, torch would share its tensors through files and sockets."""
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
    """A new interpreter that runs `python -m MODULE FD`, where FD is its end of a pipe; see `connect_to_parent`.

    Not multiprocessing: scripts need no `if __name__ == "__main__"`, notebooks work, and torch is not inherited.
    """

    def __init__(self, module: str, name: str, environment: Mapping[str, str]):
        from multiprocessing import Pipe

        connection, theirs = Pipe()
        # the same sys.path as this process
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self.name, self._owner = name, os.getpid()
        self.process = subprocess.Popen(
            # -u, -X faulthandler: its last output is not lost. -P: without the current folder, see PYTHONPATH
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
        """Send a message. `check` is called periodically while the pipe is full, and may raise."""
        # `receive` reports a dead child
        with suppress(BrokenPipeError, ConnectionResetError):
            self.pipe.send(message, partial(_wait, self._writable, check) if check else None)

    def receive(self, check: Callable[[], None]) -> Any:
        """Wait for a message. `check` is called periodically and may raise. EOFError: the child hung up or died."""
        try:
            return self.pipe.receive(partial(_wait, self._readable, check))
        except ConnectionResetError:
            raise EOFError from None

    def has_message(self) -> bool:
        return bool(self._readable.poll(0))

    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) has stopped it: it can neither answer nor end by itself."""
        if self.process.poll() is not None or not hasattr(os, "waitid"):
            return False
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            # it has ended in the meantime
            return False

    def death(self, timeout_s: float) -> str:
        """After it closed its end of the pipe: how it died, as the end of a sentence."""
        self.end(timeout_s)
        code = self.process.returncode
        log.debug("%s died with exit code %s", self.name, code)
        return f"died with exit code {code}{_HINTS.get(code, '')}{self._output.last_output()}"

    def hang_up(self) -> None:
        self.pipe.connection.close()

    def end(self, timeout_s: float) -> None:
        """Hang up and wait this long for the child to end by itself; then kill it."""
        self.hang_up()
        # a process forked from the owner has a copy of this object, and must not end the child
        if os.getpid() != self._owner:
            return
        try:
            self.process.wait(0 if self.is_stopped() else timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        # processes that an env started and did not end
        with suppress(OSError):
            os.killpg(self.process.pid, signal.SIGKILL)


def _wait(ready: "select.poll", check: Callable[[], None]) -> None:
    while not ready.poll(1000 * _POLL_S):
        check()


class _Output:
    """Logs the stdout and stderr of a child line by line; a thread reads them until the child ends.

    Without logging handlers the output would be lost: the child then inherits the streams of its parent.
    """

    def __init__(self, process: subprocess.Popen, name: str):
        self.name = name
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._thread = threading.Thread(target=self._read, args=[process.stdout], daemon=True)
        if process.stdout is not None:
            self._thread.start()

    @staticmethod
    def streams() -> dict:
        """Arguments of `subprocess.Popen`."""
        is_logged = logging.getLogger("sparring").handlers
        return {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if is_logged else {}

    def last_output(self) -> str:
        if self._thread.ident is not None:
            self._thread.join(_OUTPUT_S)
        return "\n".join(["; its last output:", *(f"  {line}" for line in self.lines)]) if self.lines else ""

    def _read(self, stream) -> None:
        with stream:
            while line := stream.readline(_LONGEST_LINE):
                if text := line.decode(errors="replace").rstrip():
                    self.lines.append(text)
                    log.debug("%s: %s", self.name, text)


def connect_to_parent(leave: Callable[[], None]) -> MessagePipe:
    """In a child: returns its end of the pipe, and leaves Ctrl-C, SIGTERM and SIGHUP to the parent.

    The parent saves and then hangs up; its death hangs up, too. A thread then calls `leave` and ends this process.
    """
    from multiprocessing.connection import Connection

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # with handlers that do nothing: programs that the child starts would inherit SIG_IGN, and an env could not end them
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
        # system calls in libraries are restarted instead of interrupted
        signal.siginterrupt(number, False)
        os.register_at_fork(after_in_child=partial(signal.signal, number, signal.SIG_DFL))
    connection = Connection(int(sys.argv[1]))

    def leave_with_parent() -> None:
        hung_up = select.poll()
        # registered for no event: POLLHUP is always reported
        hung_up.register(connection.fileno(), 0)
        hung_up.poll()
        leave()
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()
    return MessagePipe(connection)


def error_report(error: BaseException) -> tuple[str, str | None]:
    """What happened, and the traceback; None if the traceback adds nothing, as for errors that the user can fix."""
    is_clear = isinstance(error, UserError) or not isinstance(error, Exception)
    what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}".removesuffix(": ")
    if not isinstance(error, Exception):
        what = f"called sys.exit({error.code})" if isinstance(error, SystemExit) else f"raised {what}"
    return " ".join([what, *getattr(error, "__notes__", ())]), None if is_clear else traceback.format_exc()


def describe_env_failure(error: Exception) -> str | None:
    """A sentence about an error that an env raised, and the part of its traceback in the env. None: any other error."""
    stage = getattr(error, "failed_at", None)
    if stage is None:
        return None
    message, _ = error_report(error)
    # for an env in a worker, its traceback is part of the message
    frames, ours = traceback.extract_tb(error.__traceback__), Path(__file__).parents[1]
    own = next((n for n, frame in enumerate(reversed(frames)) if Path(frame.filename).is_relative_to(ours)), 0)
    lines = traceback.format_list(frames[len(frames) - own :])
    return "".join(
        [f"{DOING[stage]} failed: {message}", *(["\n\nTraceback of the env:\n", *lines] if own else [])]
    ).rstrip()


@contextmanager
def forward_signals(children: list[subprocess.Popen]) -> Iterator[None]:
    """Context while children run that save and end by themselves: forwards SIGTERM and SIGHUP, which only this process
    gets. A terminal sends Ctrl-C to the children, too."""

    def forward(number: int, frame: object) -> None:
        for child in children:
            child.send_signal(number)

    handlers: dict[int, Any] = {signal.SIGINT: signal.SIG_IGN, **dict.fromkeys(filter(_is_handled, _TO_LEAVE), forward)}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_handled(number: int) -> bool:
    """False if the signal is ignored, as with nohup."""
    return signal.getsignal(number) is not signal.SIG_IGN


class Interrupt:
    """The first Ctrl-C (or SIGTERM, SIGHUP) requests the loop to stop after this update; the second stops at once.

    An env that is still busy `grace_s` seconds after the first is interrupted.
    """

    def __init__(self, logs: bool = True, grace_s: float = math.inf):
        self.logs, self.grace_s, self.requested = logs, grace_s, False
        self._before: dict[int, Any] = {}

    def __enter__(self):
        # signals can be handled in the main thread only
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, *filter(_is_handled, _TO_LEAVE)]
            self._before = {number: signal.signal(number, self._request) for number in numbers}
        return self

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number, frame):
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        if OwnStages.now is not None:
            OwnStages.now.stop_at = time.monotonic() + self.grace_s
        if self.logs:
            text = "stopping after this update, then saving; a second signal stops at once without saving"
            logging.getLogger(__name__).warning("\n%s", text)


def usable_cores(shared_by: int = 1) -> int:
    """Cores that this process may use (maybe not all of the machine), divided among `shared_by` processes."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // shared_by)
