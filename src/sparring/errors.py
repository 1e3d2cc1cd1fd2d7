"""Mistakes a person can mend: shown as a sentence, never as a traceback."""


class UserError(ValueError):
    """What was given, what was expected, how to fix it."""

    # of the process, when nothing catches it
    exit_code = 2


class StageFailed(UserError):
    """A part of a run that has a process of its own failed, hung or died. What was learned so far can be saved."""

    exit_code = 1
