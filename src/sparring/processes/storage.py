"""Pre-allocated columns in one piece of memory: in RAM, in shared memory, or in a file.

Where each column lies is worked out before anything is allocated, so that its size can be told, and refused, first.
Memory is not touched until it is written: columns that are rarely needed in full cost what is used of them.
"""

import errno
import fcntl
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from sparring.errors import UserError
from sparring.processes.memory_errors import free_ram

Key = tuple[str, ...]
# a cache line: what one process writes does not slow down what another reads beside it
_ALIGNMENT = 64
# what reserving fails with: there is no room, or the file system has no such thing
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_PREFIX, _SUFFIX = "sparring-buffer-", ".bin"


@dataclass(frozen=True)
class Column:
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        return memory[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True)
class Layout:
    """Which column lies where; travels to other processes in a handle."""

    columns: Mapping[Key, Column]
    nbytes: int

    @classmethod
    def of(cls, columns: Mapping[Key, Column]) -> "Layout":
        """One after the other, in the order given."""
        placed, end = {}, 0
        for key, column in columns.items():
            placed[key] = Column(column.shape, column.dtype, end)
            end += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
        return cls(placed, end)

    @torch.inference_mode(False)
    def views(self, memory: torch.Tensor) -> dict[Key, torch.Tensor]:
        return {key: column.view(memory) for key, column in self.columns.items()}


@dataclass
class Memory:
    """Bytes to write into, and the file they are in; None: RAM of this process alone."""

    data: torch.Tensor
    file: Path | None = None

    @classmethod
    @torch.inference_mode(False)
    def in_ram(cls, nbytes: int) -> "Memory":
        return cls(empty((nbytes,), torch.uint8))

    @classmethod
    @torch.inference_mode(False)
    def in_file(
        cls,
        nbytes: int,
        needed: int,
        folder: Path,
        shared: bool,
        what: str = "the buffer",
        instead: str = "a smaller buffer.size, or another buffer.folder",
        reserved: bool = False,
    ) -> "Memory":
        """A new sparse file, gone with this object. `needed`: how much of it is sure to be written.

        Only a `shared` one keeps its name: without, the system frees it when the process ends in whatever way.
        A `reserved` one is not sparse: others, who may have looked at the same room, cannot take it before it is
        written, which would kill whoever writes.
        Where there is no room, `what` it is for and what to choose `instead` are said.
        """
        folder.mkdir(parents=True, exist_ok=True)
        _sweep(folder)
        free = _free_space(folder)
        told = f"{what} needs {gigabytes(needed)}, but {folder} has {gigabytes(free)} free; choose {instead}"
        if needed > free:
            raise UserError(told)
        handle, file = _new_file(folder)
        os.ftruncate(handle, nbytes)
        try:
            if reserved:
                _reserve(handle, nbytes)
        except OSError as error:
            _remove(handle, file)
            if error.errno in _NO_ROOM:
                raise UserError(told) from None
            raise
        memory = cls.open(file, nbytes)
        if shared:
            weakref.finalize(memory, _remove, handle, file)
        else:
            _remove(handle, file)
            memory.file = None
        return memory

    @classmethod
    @torch.inference_mode(False)
    def open(cls, file: Path, nbytes: int) -> "Memory":
        """The same bytes, from any process."""
        # torch would make a file that is missing, and lengthen one that is too short
        if (found := file.stat().st_size) != nbytes:
            raise ValueError(f"{file} has {found} bytes, not {nbytes}")
        return cls(torch.from_file(str(file), shared=True, size=nbytes, dtype=torch.uint8), file)


@torch.inference_mode(False)
def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Room for a large tensor. In RAM through numpy, which asks the system for huge pages, as torch does not: touching
    new memory is then four times as fast, writing to it again a tenth."""
    if torch.device(device).type != "cpu" or not prod(shape):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)


def shared_memory_folder() -> Path:
    """Where files are RAM, if the system has such a place."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else Path(tempfile.gettempdir())


def half_of_free_ram() -> int:
    return free_ram() // 2


def gigabytes(nbytes: int) -> str:
    """'1.3 GB', '52 MB', '1.2 kB': two digits, as people say it."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if nbytes >= size / 2:
            return _two_digits(nbytes / size) + f" {unit}"
    return _two_digits(nbytes / 1e3) + " kB"


def _two_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _new_file(folder: Path) -> tuple[int, Path]:
    """A file and its lock, which is held as long as the process lives, see _sweep."""
    while True:
        handle, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # another process may have swept it before it was locked
        if Path(name).exists():
            return handle, Path(name)
        os.close(handle)


def _reserve(handle: int, nbytes: int) -> None:
    # macOS has none
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, 0, nbytes)
    except OSError as error:
        # where a file system cannot, it stays sparse
        if error.errno not in _CANNOT:
            raise


def _remove(handle: int, file: Path) -> None:
    file.unlink(missing_ok=True)
    os.close(handle)


def _sweep(folder: Path) -> None:
    """Delete what killed processes left: files that nobody holds. Process ids would not do: containers share memory."""
    for file in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        try:
            handle = os.open(file, os.O_RDWR)
        except OSError:
            # of another user, or gone just now
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.unlink(missing_ok=True)
        except OSError:
            # in use, or not ours to delete
            pass
        finally:
            os.close(handle)


def _free_space(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
