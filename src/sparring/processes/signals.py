"""Signals: a run stops after its update, and children leave signals to their parent."""

import logging
import os
import signal

# ---- What a child process does about signals that end a whole job: nothing, its parent saves and then hangs up.


def leave_signals_to_the_parent() -> None:
    """Ctrl-C and SIGTERM.

    SIGTERM by a handler: what is ignored would be ignored by all that the child starts as well, and an env could not
    end its simulator.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)
    # calls in libraries go on as if there had been none
    signal.siginterrupt(signal.SIGTERM, False)
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


# ---- Ctrl-C, `kill` and Slurm: asked to stop, a run ends its update and saves.


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
