"""What a child process does about signals that end a whole job: nothing, its parent saves and then hangs up."""

import os
import signal


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
