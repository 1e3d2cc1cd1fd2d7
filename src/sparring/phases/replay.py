"""Replay: windows of a store that grows between updates, such that a resumed run sees the same ones."""

from collections.abc import Iterator

import torch
from tensordict import TensorDict

from sparring.data.batches import BatchBuilder, Samples
from sparring.data.sequential_windows import SequentialWindows
from sparring.world_models.memory import MemoryStateManager


class Replay:
    """An iterator over batches of windows `[B, T]`, for ever. Call `refresh` when the store has grown.

    From `SequentialWindows` pass follows pass, and the memory after a batch (`memory_after`, which the world model's
    loss writes into it) enters the next one; from windows drawn at random each is for itself.
    """

    def __init__(
        self,
        windows: Samples | SequentialWindows,
        batch_size: int,
        memory_size: int,
        seed: int,
        device: torch.device,
    ):
        in_order = isinstance(windows, SequentialWindows)
        source, drawn = (_Passes(windows), None) if in_order else (windows, batch_size)
        self.builder = BatchBuilder(source, drawn, seed, device)
        self.memory = MemoryStateManager(batch_size, memory_size, device=device) if in_order else None
        self._given: TensorDict | None = None

    def refresh(self) -> None:
        """Drop what was made ahead: those batches were of the store as it used to be."""
        self.builder.load_state_dict(self.builder.state_dict())

    def __iter__(self) -> "Replay":
        return self

    def __next__(self) -> TensorDict:
        self._keep_memory()
        batch = next(self.builder)
        if self.memory is not None:
            self._given = self.memory.enter(batch)
        return batch

    def close(self) -> None:
        self.builder.close()

    def state_dict(self) -> dict:
        self._keep_memory()
        return {"batches": self.builder.state_dict(), "memory": self.memory.state_dict() if self.memory else None}

    def load_state_dict(self, state: dict) -> None:
        self.builder.load_state_dict(state["batches"])
        if self.memory is not None:
            self.memory.load_state_dict(state["memory"])
        self._given = None

    def _keep_memory(self) -> None:
        """Of the batch before, which has been learned from by now."""
        if self._given is not None:
            self.memory.leave(self._given["memory_after"])
            self._given = None


class _Passes:
    """Pass after pass over the same windows."""

    def __init__(self, windows: SequentialWindows):
        self.windows = windows
        self.state_dict, self.load_state_dict = windows.state_dict, windows.load_state_dict

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield from self.windows
