"""Out of memory, in words: what to lower, and by how much."""

import contextlib
import re

import torch
from torch import nn

from sparring.errors import UserError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = r"([\d.]+) (bytes|[KMGT]iB)"


class OutOfMemory(UserError):
    exit_code = 1


@contextlib.contextmanager
def memory_told(doing: str, rows: int, setting: str, model: nn.Module | None = None, precision: str = "fp32"):
    """Around a call of a model for `rows` decisions, of which `setting` says how many there are."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(_told(doing, rows, setting, model, precision, str(error))) from error
    except RuntimeError as error:
        # the CPU's allocator has no error of its own
        if "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(_told(doing, rows, setting, model, precision, str(error))) from error


def _told(doing: str, rows: int, setting: str, model: nn.Module | None, precision: str, message: str) -> str:
    asked, free = _bytes(rf"allocate {_SIZE}", message), _bytes(rf"{_SIZE} is free", message)
    used = _bytes(rf"{_SIZE} is allocated by PyTorch", message) or 0
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) if model is not None else 0
    told = f"out of memory while {doing}: {_size(asked)} more were asked for"
    told += f" and {_size(free)} were free" if free is not None else ""
    told += f"; the weights take {_size(weights)}" if weights else ""
    return f"{told}. {_advice(rows, setting, asked, free, max(used - weights, 0), model, precision)}"


def _advice(rows, setting, asked, free, activations, model, precision) -> str:
    fits = rows // 2
    if asked and free is not None:
        # what decisions take grows with their number; at least what was asked for last did not fit
        fits = min(fits, int(rows * (activations + free) / (activations + asked)))
    ways = [f"{setting} from {rows} to at most {fits}"] if fits >= 1 else []
    ways += ["policy.precision=bf16, about half of what decisions take"] if rows and precision == "fp32" else []
    parameters = list(model.parameters()) if model is not None else []
    learning = sum(p.numel() for p in parameters if p.requires_grad)
    wide = sum(p.numel() for p in parameters if p.dtype == torch.float32 and not p.requires_grad)
    ways += [f"policy.dtype=bf16, {_size(2 * wide)} less of frozen weights"] if wide else []
    # a gradient, and two moments of Adam
    ways += [f"policy.lora_r=8 or policy.frozen, up to {_size(12 * learning)} less for learning"] if learning else []
    return "Set " + "; or ".join(ways) if ways else "Take a smaller model, or a larger machine"


def _bytes(pattern: str, message: str) -> int | None:
    found = re.search(pattern, message)
    return None if found is None else int(float(found.group(1)) * _UNITS[found.group(2)])


def _size(count: int | None) -> str:
    if count is None:
        return "some bytes"
    unit = next((u for u in ("TiB", "GiB", "MiB", "KiB") if count >= _UNITS[u]), "bytes")
    return f"{count / _UNITS[unit]:.3g} {unit}"
