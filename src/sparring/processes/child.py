"""Child processes: their last output, and the cores they share."""

import logging
import os
import signal
import subprocess
from collections import deque
from threading import Thread

# ---- What a child process says on stdout and stderr: into a log line by line, not between the lines of a progress bar.
#
# Where logging is not set up (nobody would keep it), a child says it where its parent does.


log = logging.getLogger("sparring.env")

# lines that are told with its death
LAST_WORDS = 20
# a line is cut there: a progress bar may never end one
LONGEST = 2000
# how long after its death a child's words may still be on their way
ON_THEIR_WAY_S = 1.0


def outputs() -> dict:
    """For `subprocess.Popen`, before `ChildWords`."""
    kept = logging.getLogger("sparring").handlers
    return {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if kept else {}


def hint_of_death(code: int) -> str:
    """What an exit code often means, as the end of a sentence about it."""
    hints = {
        -signal.SIGKILL: "; killed, by hand or by the system: that often means out of memory, try fewer envs",
        -signal.SIGBUS: "; often no room is left in shared memory, or in buffer.folder",
    }
    return hints.get(code, "")


class ChildWords:
    """Of one child; `who` says them. A thread of its own listens until the child has closed its end."""

    def __init__(self, process: subprocess.Popen, who: str):
        self.who = who
        self.last: deque[str] = deque(maxlen=LAST_WORDS)
        self._thread = Thread(target=self._listen, args=[process.stdout], daemon=True)
        if process.stdout is not None:
            self._thread.start()

    def last_words(self) -> str:
        """After its death, as the end of a sentence about it; nothing where it said nothing."""
        if self._thread.ident is not None:
            self._thread.join(ON_THEIR_WAY_S)
        return "\n".join(["; its last words:", *(f"  {line}" for line in self.last)]) if self.last else ""

    def _listen(self, stream) -> None:
        with stream:
            while line := stream.readline(LONGEST):
                words = line.decode(errors="replace").rstrip()
                if words:
                    self.last.append(words)
                    log.debug("%s: %s", self.who, words)


# ---- How many cores there are to share out.


def usable_cores() -> int:
    """Those that this process may use, where the system can tell: of a machine of 64 a job may have 4."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(parts: int) -> int:
    """For each of `parts` that work at the same time."""
    return max(1, usable_cores() // parts)
