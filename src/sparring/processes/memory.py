"""Memory: free RAM, arrays shared between processes, and out-of-memory errors with advice.

torch is imported only for tensors: workers of envs share numpy arrays and do not need it.
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
# a cache line, so that writes of one process do not slow down reads of adjacent data by another
_ALIGNMENT = 64
# errors of reserving space: no space left, or not supported by the file system
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_CANNOT = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.ENODEV)
_PREFIX, _SUFFIX = "sparring-shared-", ".bin"
# units in torch's error messages
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
# messages of errors without their own class: the CPU allocator on Linux and elsewhere, and CUDA libraries
_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_CUDA = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def free_ram() -> int:
    """Available bytes, including memory that can be reclaimed (page cache); all RAM if unknown."""
    try:
        (available,) = re.findall(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available) * 1024


@dataclass(frozen=True)
class Column:
    """Shape and dtype (numpy's or torch's) of one array."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class SharedHandle:
    """The information with which another process can attach."""

    file: Path
    columns: Mapping[Key, Column]


class SharedMemory:
    """Arrays by key, as `arrays` or `tensors`, that several processes share.

    When the last process has attached, the file is unlinked, so that nothing remains after all processes have ended. If
    the creating process is killed before that, the next `make` in the folder deletes the file.
    """

    def __init__(self, handle: SharedHandle):
        self.handle = handle
        self._offsets, nbytes = _layout(handle.columns)
        # in the creating process: deletes the file; to be called when all others have attached
        self.unlink: Callable[[], Any] = lambda: None
        # see `pin`
        self._device: torch.device | None = None
        with open(handle.file, "r+b") as opened:
            self.bytes = np.frombuffer(mmap.mmap(opened.fileno(), nbytes), np.uint8)

    @classmethod
    def make(
        cls,
        columns: Mapping[Key, Column],
        folder: Path | None = None,
        what: str = "memory shared with the actor process",
        advice: str = "another buffer.folder",
    ) -> "SharedMemory":
        """In a file in `folder`; None: in RAM. `what` and `advice` are for the error if there is too little space."""
        descriptor, file = _make_file(folder or _memory_folder(), _layout(columns)[1], what, advice)
        memory = cls(SharedHandle(file, dict(columns)))
        memory.unlink = weakref.finalize(memory, _remove, descriptor, file)
        return memory

    @classmethod
    def attach(cls, handle: SharedHandle, last: bool = True) -> "SharedMemory":
        """`last`: no other process will attach."""
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

        # never inference tensors, even if first used in inference mode
        with torch.inference_mode(False):
            return self._views(torch.from_numpy(self.bytes))

    def _views(self, memory: Any) -> dict[Key, Any]:
        views = {}
        for key, column in self.handle.columns.items():
            first = self._offsets[key]
            views[key] = memory[first : first + column.nbytes].view(column.dtype).reshape(column.shape)
        return views

    def pin(self, device: "torch.device") -> None:
        """Pin the memory for a GPU, which can then copy asynchronously and several times as fast."""
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
            log.debug("shared memory could not be pinned (CUDA error %s); copies are slower", refused)
            # clear the error, which CUDA would report for the next kernel
            with suppress(RuntimeError):
                torch.zeros(1, device=device)

    def finish_copies(self) -> None:
        """Wait for copies of the device that were started with `non_blocking`."""
        if self._device is not None and self._device.type == "cuda":
            import torch

            torch.cuda.current_stream(self._device).synchronize()


def _layout(columns: Mapping[Key, Column]) -> tuple[dict[Key, int], int]:
    """The offset of each column, and the total size in bytes."""
    offsets, end = {}, 0
    for key, column in columns.items():
        offsets[key] = end
        end += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
    # an empty file cannot be mapped
    return offsets, max(end, _ALIGNMENT)


def _memory_folder() -> Path:
    """A folder whose files are in RAM, if the system has one."""
    folder = Path("/dev/shm")
    return folder if folder.is_dir() else Path(tempfile.gettempdir())


def _make_file(folder: Path, nbytes: int, what: str, advice: str) -> tuple[int, Path]:
    """A new file and its descriptor, which holds a lock while the process lives, see `_sweep`.

    Its space is reserved: otherwise another process could use the space first, and writing to the mapped file would
    kill the writer (SIGBUS).
    """
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    free = shutil.disk_usage(folder).free
    no_room = f"{what} needs {_size(nbytes)}, but {folder} has {_size(free)} free; choose {advice}"
    if nbytes > free:
        raise UserError(no_room)
    while True:
        descriptor, name = tempfile.mkstemp(prefix=_PREFIX, suffix=_SUFFIX, dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # another process may have deleted it in `_sweep` before it was locked
        if Path(name).exists():
            break
        os.close(descriptor)
    try:
        os.ftruncate(descriptor, nbytes)
        # missing on macOS
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        # without support of the file system, the file stays sparse
        if error.errno not in _CANNOT:
            _remove(descriptor, Path(name))
            raise UserError(no_room) if error.errno in _NO_ROOM else error from None
    return descriptor, Path(name)


def _remove(descriptor: int, file: Path) -> None:
    file.unlink(missing_ok=True)
    os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Delete files of killed processes: those that are not locked. (Process ids differ between containers.)"""
    for file in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        # the file may belong to another user, or be deleted at the same time
        with suppress(OSError):
            descriptor = os.open(file, os.O_RDWR)
            try:
                # raises if it is in use
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                file.unlink(missing_ok=True)
            finally:
                os.close(descriptor)


@contextmanager
def explain_oom(doing: str, policy: "nn.Module | None" = None, rows: int = 0, setting: str = "") -> Iterator[None]:
    """Context that turns an out-of-memory error into advice. `rows`: the number of decisions processed at once, which
    `setting` limits; 0: none. `policy`: its `config`, if any, and its weights give further advice.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # errors of an env are excluded: settings of the policy do not change its memory
        message = None if hasattr(error, "failed_at") else oom_message(error)
        if message is None:
            raise
        raise OutOfMemory(_explanation(doing, policy, rows, setting, message)) from error


def oom_message(error: BaseException) -> str | None:
    """The message of an out-of-memory error in the chain of causes of `error`; None without one.

    Compilers wrap such errors, and recording a CUDA graph then fails again, without a reason.
    """
    import torch

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or any(text in str(seen) for text in _CPU + _CUDA):
            return str(seen)
        seen = seen.__cause__ or seen.__context__
    return None


def _explanation(doing: str, policy: "nn.Module | None", rows: int, setting: str, message: str) -> str:
    requested, free = _bytes(rf"allocate {_SIZE}", message), _bytes(rf"{_SIZE} is free", message)
    used = _bytes(rf"{_SIZE} is allocated by PyTorch", message)
    parameters = list(policy.parameters()) if policy is not None else []
    weights = sum(p.numel() * p.element_size() for p in parameters)
    ways = []
    if rows >= 2:
        fits = rows // 2
        if requested and free is not None and used is not None:
            # memory of decisions is proportional to their number; the last allocation, at least, did not fit
            activations = max(used - weights, 0)
            fits = max(1, min(fits, int(rows * (activations + free) / (activations + requested))))
        ways.append(f"{setting}={fits} or less ({rows} decisions at once were too many)")
    ways += _ways_of_policy(getattr(policy, "config", None), parameters, rows)
    if free is None and any(text in message for text in _CPU):
        free = free_ram()
    what = f"out of memory while {doing}: {_size(requested)} more were requested"
    what += f" and {_size(free)} were free" if free is not None else ""
    what += f"; the weights take {_size(weights)}" if weights else ""
    return f"{what}. {'Set ' + '; or '.join(ways) if ways else 'Use a smaller model, or a machine with more memory'}"


def _ways_of_policy(config: Any, parameters: list["nn.Parameter"], rows: int) -> list[str]:
    """Settings of the policy's section that would need less memory."""
    learning = sum(p.numel() for p in parameters if p.requires_grad)
    wide = sum(p.numel() for p in parameters if p.is_floating_point() and p.element_size() == 4 and not p.requires_grad)
    ways, gains = [], []
    if getattr(config, "precision", None) == "fp32":
        gains += ["about half of the memory of decisions"] if rows else []
    # pretrained models can have frozen weights in bf16, by a separate setting or with `precision`
    pretrained = hasattr(config, "lora_r")
    dtype = getattr(config, "dtype", getattr(config, "precision", None))
    gains += [f"{_size(2 * wide)} less of frozen weights"] if pretrained and dtype == "fp32" and wide else []
    if gains:
        names = [name for name in ("precision", "dtype") if getattr(config, name, None) == "fp32"]
        settings = " ".join(f"policy.{name}=bf16" for name in names)
        ways.append(f"{settings} (RL then needs parity_tolerance=0.05), {' and '.join(gains)}")
    if pretrained and not config.lora_r and learning:
        # one gradient and two moments of Adam, 4 bytes each
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
    # four digits, to avoid 1e+03
    return f"{number:.{4 if number >= 999.5 else 3}g} {unit}"
