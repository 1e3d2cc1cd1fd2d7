"""Mistakes a person can mend: shown as a sentence, never as a traceback."""

from typing import Any

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


class Diverged(UserError):
    """A loss, gradient, weight or action is NaN or infinite: says what to lower.

    `batch`: the tensors that were learned from, and numbers `about` it, for whoever keeps them in files.
    """

    exit_code = 1

    def __init__(self, message: str, batch: Any = None, about: dict[str, float] | None = None):
        super().__init__(message)
        self.batch, self.about = batch, about or {}


class PeerGone(UserError):
    """Another process of the run has gone, without which this one can neither go on nor save."""

    exit_code = LEFT_ALONE


def describe_error(error: BaseException, file: str | None = None) -> str:
    """What went wrong in somebody else's code, and where, in one line: at the last line of `file` that was reached, if
    any was; it may have called others."""
    import traceback  # errors.py is imported by everything, this seldom

    message = " ".join(str(error).split())
    # frames of importlib itself say nothing
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    frames = [frame for frame in frames if frame.filename == file] or frames
    where = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"
