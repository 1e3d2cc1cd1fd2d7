"""One thread that draws and encodes what training has filmed, so that training does not wait for it."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from sparring.errors import UserError
from sparring.record.log import LOGGER

log = logging.getLogger(LOGGER)
# videos that wait for their turn; a run films a few at a time
WAITING = 32
# what is left when a run ends gets so long, seconds
PATIENCE_S = 120.0


class Encoder:
    """Does jobs in the order they came, in a thread that is there only while there is something to do.

    When `waiting` jobs wait, a further one is left out, and how many were is told: a video less is better than training
    that stands still, or a queue that grows until memory is full. What goes wrong in a job is told once, as a warning,
    and costs no more than its picture.
    """

    def __init__(self, waiting: int = WAITING):
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        # held while a job is put in and while the thread finds that there is none
        self._lock = threading.Lock()
        self._told: set[type[Exception]] = set()
        self.left_out = 0
        # jobs that are done, and how long they took
        self.done, self.seconds = 0, 0.0

    def submit(self, job: Callable[[], None]) -> bool:
        """At once. False: it was left out."""
        with self._lock:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                self.left_out += 1
                return False
            if self._thread is None:
                # a daemon: a process that is told to end at once does
                self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
                self._thread.start()
        return True

    def finish(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is done, though not for ever."""
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
            if thread.is_alive():
                log.warning("%s videos or pictures are not ready after %.0f s", self._jobs.qsize() + 1, patience_s)
        if self.left_out:
            advice = "set rollout.render_episodes lower, or training.save_every and training.log_every higher"
            log.warning(
                "%s videos or pictures were left out, as %s waited; %s", self.left_out, self._jobs.maxsize, advice
            )
            self.left_out = 0

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began = time.monotonic()
            try:
                job()
            except Exception as error:  # drawing, disks and ffmpeg fail in many ways; training goes on in each
                self._tell(error)
            self.done, self.seconds = self.done + 1, self.seconds + time.monotonic() - began

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                self._thread = None
                return None

    def _tell(self, error: Exception) -> None:
        """As a warning once of each kind: its words name the file, and so are never the same."""
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        level = logging.DEBUG if type(error) in self._told else logging.WARNING
        self._told.add(type(error))
        log.log(level, "a picture or video is missing: %s", what)
