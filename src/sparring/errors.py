"""Mistakes a person can mend: shown as a sentence, never as a traceback."""

# exit code of a process that ends because another of its run has failed
LEFT_ALONE = 3


class UserError(ValueError):
    """What was given, what was expected, how to fix it."""

    # of the process, when nothing catches it
    exit_code = 2


class StageFailed(UserError):
    """A part of a run that has a process of its own failed, hung or died. What was learned so far can be saved."""

    exit_code = 1


class OtherFailed(StageFailed):
    """Another process of the run failed, which tells of it itself."""

    exit_code = LEFT_ALONE


class OutOfMemory(UserError):
    """With what to lower, and by how much."""

    exit_code = 1


class LeftAlone(UserError):
    """Another process of the run has gone, without which this one can neither go on nor save."""

    exit_code = LEFT_ALONE
