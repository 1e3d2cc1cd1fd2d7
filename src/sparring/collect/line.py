"""The collecting process's end of the pipe to its learner."""

import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from sparring.collect.messages import CLOSE_S, NewVersion
from sparring.collect.shared import pack, receive, send_packed

# what is left of a hung process to end in peace, after the learner hung up
LEAVE_S = 1.0


class HungUp(Exception):
    """The learner is not there any more."""


class Line:
    """The pipe to the learner.

    What is said is sent by a thread of its own: a learner that is busy does not hold up the robots. Another listens to
    what the learner says, and a third for when it hangs up, as it also does when it dies.
    """

    def __init__(self, connection: Connection):
        self.connection = connection
        self.version, self.staleness, self.films, self.hung_up = -1, 0, 0, False
        # it has heard of the end, and puts the robots away
        self.ending = False
        # what there is to put away then, in whatever the robots are at
        self.at_hang_up: Callable[[], None] = lambda: None
        self._news = threading.Condition()
        self._sender = ThreadPoolExecutor(1)
        threading.Thread(target=self._leave, daemon=True).start()

    def say(self, message: Any) -> None:
        """As it is now; it may change before it is sent."""
        self._sender.submit(self._send, pack(message))

    def finish(self) -> None:
        """When all that was said is sent, or nobody is there to hear it."""
        self._sender.shutdown()

    def hear(self) -> Any:
        try:
            return receive(self.connection)
        except (EOFError, OSError):
            raise HungUp from None

    def listen(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def _send(self, text: bytes) -> None:
        try:
            send_packed(self.connection, text)
        except OSError:
            self._hang_up()

    def _listen(self) -> None:
        with suppress(HungUp):
            while True:
                message = self.hear()
                with self._news:
                    if isinstance(message, NewVersion):
                        self.version, self.staleness = message.version, message.staleness
                    else:
                        self.films = message.robots
                    self._news.notify()

    def _leave(self) -> None:
        """Whoever waits for this process does not wait for robots in the middle of something."""
        gone = select.poll()
        # of no event but the end, which is always told
        gone.register(self.connection.fileno(), 0)
        gone.poll()
        self._hang_up()
        time.sleep(LEAVE_S)
        closing = threading.Thread(target=self.at_hang_up, daemon=True)
        closing.start()
        closing.join(LEAVE_S)
        if self.ending:
            closing.join(CLOSE_S - LEAVE_S)
        os._exit(1)

    def _hang_up(self) -> None:
        with self._news:
            self.hung_up = True
            self._news.notify()

    def wait_for_turn(self, number: int) -> None:
        """Until the rollout of this number may begin."""
        with self._news:
            self._news.wait_for(lambda: self.hung_up or self.version >= number - self.staleness)
        self.check()

    def check(self) -> None:
        if self.hung_up:
            raise HungUp

    def take_films(self) -> int:
        with self._news:
            films, self.films = self.films, 0
        return films
