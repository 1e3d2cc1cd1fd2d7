"""Bounded reads and atomic writes of regular files, and the lock of a folder with a single writer."""

import errno
import fcntl
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

from sparring.errors import UserError

LOCK = "writer.lock"
# how long to try, because `is_held` takes the lock for a moment
_LOCK_S = 0.3
# default limit of `read_small`, for status, settings and results
_SMALL = 16 << 20


def open_regular(file: Path) -> BinaryIO:
    """Open a file for reading; OSError for a FIFO, which would block, or a device, which may have no end."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    kind = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(kind):
        os.close(descriptor)
        code, why = (errno.EISDIR, "Is a directory") if stat.S_ISDIR(kind) else (errno.ENXIO, "not a regular file")
        raise OSError(code, why, str(file))
    return os.fdopen(descriptor, "rb")


def read_small(file: Path, most: int = _SMALL) -> bytes:
    """Read a regular file; OSError if it has more than `most` bytes."""
    with open_regular(file) as opened:
        content = opened.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EOVERFLOW, f"larger than the limit of {most / 1e6:.2g} MB", str(file))
    return content


def flush(path: Path, tree: bool = False) -> None:
    """Flush a file or folder to the disk, so that a rename never leads to an empty file after a power failure.

    `tree`: including everything below the folder.
    """
    for each in (*(path.rglob("*") if tree else ()), path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def refuse_special(path: Path) -> None:
    """OSError for a link, FIFO or device, so that nothing is written through it or replaces it."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        what = "a link" if path.is_symlink() else "Is a directory" if path.is_dir() else "not a regular file"
        raise OSError(errno.ENXIO, what, str(path))


def refuse_links_out(folder: Path) -> None:
    """Raise for links inside a folder that lead out of it; call it before writing. The folder itself may be a link."""
    root = folder.resolve()
    for inner, names, _ in os.walk(folder):
        for path in (Path(inner, name) for name in names):
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise UserError(f"'{path}' is a link that leads out of '{folder}'; replace it with a folder")


def partial_of(path: Path) -> Path:
    """The temporary path for writing a file; removes what a killed process left there, or a link."""
    refuse_special(path)
    # hidden, because out.partial may be a file of the user
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    return partial


def write_whole(path: Path, content: str | bytes, sync: bool = False) -> None:
    """Write a file atomically: readers never see a part of it, even if the process is killed. `sync`: flush it."""
    partial = partial_of(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with os.fdopen(os.open(partial, flags, 0o666), "wb") as opened:
            opened.write(content.encode() if isinstance(content, str) else content)
        if sync:
            flush(partial)
    except OSError as error:  # e.g. a full disk
        partial.unlink(missing_ok=True)
        error.filename = str(path)
        raise
    partial.replace(path)
    if sync:
        flush(path.parent)


def take_lock(folder: Path) -> int:
    """Take the lock; it is held until the returned file descriptor is closed or the process ends."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
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


def is_held(folder: Path) -> bool | None:
    """Whether a process holds the lock; None: unknown. This check takes the lock for a moment, see `take_lock`."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except PermissionError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            return None
        raise
    finally:
        os.close(handle)
    return False
