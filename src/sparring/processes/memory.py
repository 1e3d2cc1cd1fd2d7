"""Memory of this machine: large tensors, memory that processes share, and errors that say what to do where it runs out.

torch is imported where tensors are only: workers of envs share arrays, and do without it.
"""

import errno
import fcntl
import logging
import mmap
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparring.errors import OutOfMemory, UserError

if TYPE_CHECKING:
    import torch
    from torch import nn

log = logging.getLogger(__name__)

Key = tuple[str, ...]
# a cache line: what one process writes does not slow down what another reads next to it
_ALIGNMENT = 64
# what reserving fails with: there is no room, or the file system cannot reserve
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_PREFIX, _SUFFIX = "sparring-shared-", ".bin"
# as torch writes them in its errors
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
# the CPU's allocator, on Linux and elsewhere, has no error of its own; nor do CUDA's libraries
_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_CUDA = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def free_ram() -> int:
    """Bytes, with what the system would give up, such as its cache of files; where it does not say, all there is."""
    try:
        (available,) = re.findall(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available) * 1024


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
    def make(
        cls,
        columns: Mapping[Key, Column],
        folder: Path | None = None,
        what: str = "what is shared with the collecting process",
        instead: str = "another buffer.folder",
    ) -> "SharedMemory":
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

        # usable everywhere, wherever they are asked for first
        with torch.inference_mode(False):
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
    no_room = f"{what} needs {_size(nbytes)}, but {folder} has {_size(free)} free; choose {instead}"
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


@contextmanager
def explain_oom(doing: str, policy: "nn.Module | None" = None, rows: int = 0, setting: str = "") -> Iterator[None]:
    """Around what is done for `rows` decisions at once, of which `setting` says how many there are; 0: for none.

    `policy`: whose `config`, where it has one, says what else could be set.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # of an env it is the env's, whose memory nobody here knows
        message = None if hasattr(error, "failed_at") else oom_message(error)
        if message is None:
            raise
        raise OutOfMemory(_explanation(doing, policy, rows, setting, message)) from error


def oom_message(error: BaseException) -> str | None:
    """The message of the error that memory ran out with, if that is behind an error.

    Compilers wrap it; and a CUDA graph that is being recorded fails once more, without a reason.
    """
    import torch

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or any(words in str(seen) for words in _CPU + _CUDA):
            return str(seen)
        seen = seen.__cause__ or seen.__context__
    return None


def _explanation(doing: str, policy: "nn.Module | None", rows: int, setting: str, message: str) -> str:
    asked, free = _bytes(rf"allocate {_SIZE}", message), _bytes(rf"{_SIZE} is free", message)
    used = _bytes(rf"{_SIZE} is allocated by PyTorch", message)
    parameters = list(policy.parameters()) if policy is not None else []
    weights = sum(p.numel() * p.element_size() for p in parameters)
    ways = []
    if rows >= 2:
        fits = rows // 2
        if asked and free is not None and used is not None:
            # what decisions take grows with their number; at least what was asked for last did not fit
            activations = max(used - weights, 0)
            fits = max(1, min(fits, int(rows * (activations + free) / (activations + asked))))
        ways.append(f"{setting}={fits} or less ({rows} decisions at once were too many)")
    ways += _ways_of_policy(getattr(policy, "config", None), parameters, rows)
    if free is None and any(words in message for words in _CPU):
        free = free_ram()
    what = f"out of memory while {doing}: {_size(asked)} more were asked for"
    what += f" and {_size(free)} were free" if free is not None else ""
    what += f"; the weights take {_size(weights)}" if weights else ""
    return f"{what}. {'Set ' + '; or '.join(ways) if ways else 'Take a smaller model, or a machine with more memory'}"


def _ways_of_policy(config: Any, parameters: list["nn.Parameter"], rows: int) -> list[str]:
    """What its section of the config could say instead."""
    learning = sum(p.numel() for p in parameters if p.requires_grad)
    wide = sum(p.numel() for p in parameters if p.is_floating_point() and p.element_size() == 4 and not p.requires_grad)
    ways, gains = [], []
    if getattr(config, "precision", None) == "fp32":
        gains += ["about half of what decisions take"] if rows else []
    # pretrained models keep frozen weights in bf16, by a setting of its own or along with `precision`
    pretrained = hasattr(config, "lora_r")
    dtype = getattr(config, "dtype", getattr(config, "precision", None))
    gains += [f"{_size(2 * wide)} less of frozen weights"] if pretrained and dtype == "fp32" and wide else []
    if gains:
        names = [name for name in ("precision", "dtype") if getattr(config, name, None) == "fp32"]
        settings = " ".join(f"policy.{name}=bf16" for name in names)
        ways.append(f"{settings} (RL then needs parity_tolerance=0.05), {' and '.join(gains)}")
    if pretrained and not config.lora_r and learning:
        # a gradient, and two moments of Adam
        ways.append(f"policy.lora_r=8 or policy.frozen, up to {_size(12 * learning)} less for learning")
    return ways


def _bytes(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    return None if found is None else int(float(found.group(1)) * _UNITS[found.group(2)])


def _size(count: int | None) -> str:
    if count is None:
        return "some bytes"
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= _UNITS[u]), "bytes")
    number = count / _UNITS[unit]
    # 1e+03 is no size
    return f"{number:.{4 if number >= 999.5 else 3}g} {unit}"
