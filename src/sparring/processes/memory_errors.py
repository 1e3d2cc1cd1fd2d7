"""Memory of this process: out of memory, in words (what to lower, and by how much); what is free; large tensors."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sparring.errors import OutOfMemory

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"
# the CPU's allocator, on Linux and elsewhere, has no error of its own; nor do CUDA's libraries
_CPU = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")
_CUDA = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


@contextlib.contextmanager
def explain_oom(doing: str, policy: nn.Module | None = None, rows: int = 0, setting: str = "") -> Iterator[None]:
    """Around what is done for `rows` decisions at once, of which `setting` says how many there are; 0: for none.

    `policy`: whose `config`, where it has one, says what else could be set.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        message = oom_message(error)
        if message is None:
            raise
        raise OutOfMemory(_explanation(doing, policy, rows, setting, message)) from error


def oom_message(error: BaseException) -> str | None:
    """The message of the error that memory ran out with, if that is behind an error.

    Compilers wrap it; and a CUDA graph that is being recorded fails once more, without a reason.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, torch.OutOfMemoryError | MemoryError) or any(words in str(seen) for words in _CPU + _CUDA):
            return str(seen)
        seen = seen.__cause__ or seen.__context__
    return None


def free_ram() -> int:
    """Bytes, with what the system would give up, such as its cache of files; where it does not say, all there is."""
    try:
        (available,) = re.findall(r"^MemAvailable: +(\d+)", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(available) * 1024


@torch.inference_mode(False)
def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Room for a large tensor. In RAM through numpy, which asks the system for huge pages, as torch does not: touching
    new memory is then four times as fast, writing to it again a tenth."""
    if torch.device(device).type != "cpu" or not prod(shape):
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(*shape)


def _explanation(doing: str, policy: nn.Module | None, rows: int, setting: str, message: str) -> str:
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


def _ways_of_policy(config: Any, parameters: list[nn.Parameter], rows: int) -> list[str]:
    """What its section of the config could say instead."""
    learning = sum(p.numel() for p in parameters if p.requires_grad)
    wide = sum(p.numel() for p in parameters if p.dtype == torch.float32 and not p.requires_grad)
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
    return f"{count / _UNITS[unit]:.3g} {unit}"
