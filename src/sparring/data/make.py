"""From the `buffer` section to a buffer."""

from pathlib import Path

from sparring.data import BUFFERS
from sparring.data.buffer import Buffer
from sparring.data.configs import BufferConfig
from sparring.resolve import resolve


def make_buffer(buffer: BufferConfig, steps: int, n_envs: int, folder: Path) -> Buffer:
    """For rollouts of `steps` decisions of `n_envs` robots; `folder`: where a ring goes that is too large for RAM."""
    cls = resolve(buffer.type, BUFFERS, "buffer")
    if buffer.type == "standard":
        return cls(steps)
    capacity = buffer.size // n_envs if buffer.size else steps
    limit = None if buffer.memory_limit_gb is None else int(buffer.memory_limit_gb * 1e9)
    return cls(capacity, steps, memory_limit=limit, folder=buffer.folder or folder)
