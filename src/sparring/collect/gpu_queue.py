"""On a GPU that acts and learns, acting is to come first: robots wait for it, and it is short."""

from collections.abc import Callable
from functools import partial

import torch

# of streams, lower numbers are served first; usual ones have 0
_FIRST = -1


def go_first(device: torch.device) -> None:
    """What this thread asks of the GPU from now on, before what others do; of other processes, where MPS runs."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=_FIRST))


def same_queue(device: torch.device) -> Callable[[], None]:
    """For a thread that works together with this one, to begin with: what they ask of the GPU is done in order."""
    if device.type != "cuda":
        return lambda: None
    return partial(torch.cuda.set_stream, torch.cuda.current_stream(device))
