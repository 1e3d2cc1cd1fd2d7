"""Errors that the user can fix: shown as a one-line error, never as a traceback."""

import logging
from typing import Any

# exit code of a process that ends because another process of the run failed
LEFT_ALONE = 3


class UserError(ValueError):
    """What was given, what was expected, how to fix it."""

    # exit code of the process, if nothing catches the error
    exit_code = 2


class StageFailed(UserError):
    """A stage of a run, or the process that runs it, failed, hung or died. The training state can still be saved."""

    exit_code = 1


class OtherFailed(StageFailed):
    """Another process of the run failed and reports the error itself."""

    exit_code = LEFT_ALONE


class OutOfMemory(UserError):
    """Names the setting to lower, and by how much."""

    exit_code = 1


class Diverged(UserError):
    """A loss, gradient, weight or action is NaN or infinite; the message names the setting to lower.

    `batch`: the tensors of the failed step, `about`: numbers that describe it; both can be saved for inspection.
    """

    exit_code = 1

    def __init__(self, message: str, batch: Any = None, about: dict[str, float] | None = None):
        super().__init__(message)
        self.batch, self.about = batch, about or {}


class PeerGone(UserError):
    """Another process of the run has ended, so this one can neither continue nor save."""

    exit_code = LEFT_ALONE


def visible(text: object, kept: str = "\n\t") -> str:
    """Escape characters that control a terminal, as Python's repr does: other users' files may contain any."""
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in str(text))


class VisibleFormatter(logging.Formatter):
    """Formatter of log lines that escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def describe_error(error: BaseException, file: str | None = None) -> str:
    """An error of user code in one line, with the last line reached in `file`, or else the innermost line."""
    import traceback  # rarely needed, and errors.py is imported by everything

    message = " ".join(str(error).split())
    # frames of importlib itself are not useful
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    frames = [frame for frame in frames if frame.filename == file] or frames
    where = f" ({frames[-1].filename} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"
