"""Memory that processes share: arrays or tensors by key in one mapped file. Imports torch only where tensors are."""

import errno
import fcntl
import logging
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparring.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

Key = tuple[str, ...]
# a cache line: what one process writes does not slow down what another reads next to it
_ALIGNMENT = 64
# what reserving fails with: there is no room, or the file system cannot reserve
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_PREFIX, _SUFFIX = "sparring-shared-", ".bin"
_WHAT, _INSTEAD = "what is shared with the collecting process", "another buffer.folder"
# bytes: from this size on, tensors of a message go through shared memory
LARGE = 1 << 16


@dataclass(frozen=True)
class Column:
    """One array; its dtype is numpy's or torch's."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SharedHandle:
    """What another process needs to attach."""

    file: Path
    columns: Mapping[Key, Column]


class SharedMemory:
    """Arrays by key, as `arrays` or `tensors`, that other processes see too.

    Once the last one has attached, the file loses its name: nothing is left when all have ended, in whatever way.
    A maker that is killed before leaves a file, which goes when the next one is made in that folder.
    """

    def __init__(self, handle: SharedHandle):
        self.handle = handle
        self._offsets, nbytes = _layout(handle.columns)
        # of its maker, to be called when all others have attached
        self.forget_name: Callable[[], Any] = lambda: None
        # the device that copies, see `pin`
        self._device: torch.device | None = None
        with open(handle.file, "r+b") as opened:
            self.bytes = np.frombuffer(mmap.mmap(opened.fileno(), nbytes), np.uint8)

    @classmethod
    def make(cls, columns: Mapping[Key, Column], folder: Path | None = None, what=_WHAT, instead=_INSTEAD):
        """In a file in `folder`; None: in RAM. Where there is no room, it says for `what`, and what to do `instead`."""
        descriptor, file = _make_file(folder or _memory_folder(), _layout(columns)[1], what, instead)
        memory = cls(SharedHandle(file, dict(columns)))
        memory.forget_name = weakref.finalize(memory, _remove, descriptor, file)
        return memory

    @classmethod
    def attach(cls, handle: SharedHandle, last: bool = True) -> "SharedMemory":
        """`last`: nobody else will."""
        memory = cls(handle)
        if last:
            handle.file.unlink()
        return memory

    @cached_property
    def arrays(self) -> dict[Key, np.ndarray]:
        return self._views(self.bytes)

    @cached_property
    def tensors(self) -> dict[Key, "torch.Tensor"]:
        import torch

        return self._views(torch.from_numpy(self.bytes))

    def _views(self, memory: Any) -> dict[Key, Any]:
        views = {}
        for key, column in self.handle.columns.items():
            first = self._offsets[key]
            views[key] = memory[first : first + column.nbytes].view(column.dtype).reshape(column.shape)
        return views

    def pin(self, device: "torch.device") -> None:
        """For a GPU, which then copies from here and to here by itself, several times as fast."""
        import torch

        self._device = device
        if device.type != "cuda":
            return
        runtime, pointer = torch.cuda.cudart(), self.bytes.ctypes.data
        with torch.cuda.device(device):
            refused = int(runtime.cudaHostRegister(pointer, self.bytes.nbytes, 0))
            if not refused:
                weakref.finalize(self, runtime.cudaHostUnregister, pointer)
                return
            log.debug("memory that is shared could not be pinned (CUDA error %s): copies of it are slower", refused)
            # CUDA keeps the error for the next kernel, which would be blamed for it
            with suppress(RuntimeError):
                torch.zeros(1, device=device)

    def finish_copies(self) -> None:
        """Wait for copies of its device that were started with `non_blocking`."""
        if self._device is not None and self._device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._device).synchronize()


def _layout(columns: Mapping[Key, Column]) -> tuple[dict[Key, int], int]:
    """Where each begins, one after the other, and how many bytes all take."""
    offsets, end = {}, 0
    for key, column in columns.items():
        offsets[key] = end
        end += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
    # nothing can be mapped from an empty file
    return offsets, max(end, _ALIGNMENT)


def _memory_folder() -> Path:
    """Where files are RAM, if the system has such a place."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else Path(tempfile.gettempdir())


def _make_file(folder: Path, nbytes: int, what: str, instead: str) -> tuple[int, Path]:
    """A new file and its descriptor, whose lock is held as long as the process lives, see `_sweep`.

    Its room is reserved: else others, who saw the same room, could take it before it is written, which would kill
    whoever writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    free = shutil.disk_usage(folder).free
    no_room = f"{what} needs {gigabytes(nbytes)}, but {folder} has {gigabytes(free)} free; choose {instead}"
    if nbytes > free:
        raise UserError(no_room)
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # another process may have swept it before it was locked
        if Path(name).exists():
            break
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, nbytes)
        # macOS has none
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        # a file system that cannot reserve leaves it sparse
        if error.errno not in _CANNOT:
            _remove(descriptor, Path(name))
            raise UserError(no_room) if error.errno in _NO_ROOM else error from None
    return descriptor, Path(name)


def _remove(descriptor: int, file: Path) -> None:
    file.unlink(missing_ok=True)
    os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Delete what killed processes left: files that nobody holds. Process ids would not do: containers share memory."""
    for file in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        # of another user, or gone just now
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDWR)
            try:
                # fails where it is in use
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


@dataclass(frozen=True)
class _InSlot:
    """In a message, where a tensor was that lies in shared memory."""

    key: Key


class TensorSlots:
    """Large tensors of messages, which go through shared memory: over a pipe 20 MB take as long as several decisions.

    There are as many `slots` as messages under way: the next message is written over the first. The first message
    decides which tensors have a place; what does not fit later on stays in its message.
    """

    def __init__(self, slots: int, folder: Path | None):
        self.slots, self.folder, self.begun = slots, folder, False
        self.shared: SharedMemory | None = None

    def take_out(self, content: Any, number: int) -> Any:
        """What is left of the message of this number, to be sent otherwise."""
        import torch

        large: dict[Key, torch.Tensor] = {}

        def collect(key: Key, part: Any) -> None:
            if isinstance(part, torch.Tensor) and part.nbytes >= LARGE:
                large[key] = part

        _map(content, collect)
        if not self.begun and large:
            columns = {key: Column((self.slots, *tensor.shape), tensor.dtype) for key, tensor in large.items()}
            self.shared = SharedMemory.make(columns, self.folder)
        self.begun = True
        known = self.shared.handle.columns if self.shared else {}
        fitting = {key for key, t in large.items() if known.get(key) == Column((self.slots, *t.shape), t.dtype)}
        for key in fitting:
            self.shared.tensors[key][number % self.slots].copy_(large[key])
        return _map(content, lambda key, part: _InSlot(key) if key in fitting else part)

    @staticmethod
    def put_back(content: Any, shared: SharedMemory | None, number: int) -> Any:
        """The whole message of this number, of which nothing lies in shared memory any more."""

        def restored(_: Key, part: Any) -> Any:
            if not isinstance(part, _InSlot):
                return part
            slots = shared.tensors[part.key]
            return slots[number % len(slots)].clone()

        return _map(content, restored)


def _map(content: Any, function: Callable[[Key, Any], Any], key: Key = ()) -> Any:
    """The same dicts and lists with function(where, part) for each part of them that is neither."""
    if isinstance(content, dict):
        return {name: _map(part, function, (*key, str(name))) for name, part in content.items()}
    if isinstance(content, list):
        return [_map(part, function, (*key, str(place))) for place, part in enumerate(content)]
    return function(key, content)


def gigabytes(nbytes: int) -> str:
    """'1.3 GB', '52 MB', '1.2 kB': two digits, as people say it."""
    unit, size = next((pair for pair in (("GB", 1e9), ("MB", 1e6)) if nbytes >= pair[1] / 2), ("kB", 1e3))
    value = nbytes / size
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
