"""Ctrl-C, `kill` and Slurm: asked to stop, a run ends its update and saves."""

import logging
import signal

log = logging.getLogger(__name__)


class Interrupt:
    """The first Ctrl-C (or SIGTERM) asks the loop to stop after this update; the second stops at once."""

    def __init__(self, speaks: bool = True):
        self.speaks = speaks
        self.asked = False
        self.before: dict = {}

    def __enter__(self):
        try:
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us there handles its own signals
            self.before = {}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.speaks:
            log.warning("\nstopping after this update, then saving; once more gives up without saving")
