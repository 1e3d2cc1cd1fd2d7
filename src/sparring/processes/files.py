"""Files that survive a power cut, and the lock of a folder that one process writes to."""

import fcntl
import os
import time
from pathlib import Path

from sparring.errors import UserError

LOCK = "writer.lock"
# whoever only asks whether somebody writes holds the lock for a moment
_LOCK_S = 0.3


def flush(path: Path, tree: bool = False) -> None:
    """A file or folder onto the disk, so that a rename never points at an empty file after a power cut.

    `tree`: with all that is in the folder.
    """
    for each in (*(path.rglob("*") if tree else ()), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_whole(path: Path, text: str, sync: bool = False) -> None:
    """A file that is never there in part, whoever reads it and whenever the process ends; `sync`: onto the disk."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, "utf-8")
    if sync:
        flush(partial)
    partial.replace(path)
    if sync:
        flush(path.parent)


def take_lock(folder: Path) -> int:
    """A file descriptor: the lock is held until it is closed or the process ends, in whatever way."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                advice = "open it with read_only=True, or give another folder"
                raise UserError(f"'{folder}' is already open for writing; {advice}") from None
            time.sleep(_LOCK_S / 10)
        except OSError:
            os.close(descriptor)
            raise
