"""MemoryStateManager: the memory of each robot (or stream of windows), carried from one decision to the next."""

import torch
from tensordict import TensorDict


class MemoryStateManager:
    """`enter(td)` before a decision or window, `leave(memory)` after it.

    One row per robot or stream. Rows whose episode begins start from zeros; gradients never pass from one to the next.
    `key` is where the memory enters, e.g. with the head camera masked: ("memory", "world_model_wrist").
    """

    def __init__(self, rows: int, size: int, key: tuple[str, ...] = ("memory", "world_model"), device="cpu"):
        self.key = key
        self.memory = torch.zeros(rows, size, device=device)

    def enter(self, td: TensorDict) -> TensorDict:
        """Writes the memory into decisions `[N]` or windows `[N, T]`, zeros where `is_first`; of windows only the first
        column is what entered, the others are zeros."""
        windows = td.batch_dims == 2
        is_first = td["is_first"][:, 0] if windows else td["is_first"]
        memory = torch.where(is_first[:, None], 0.0, self.memory)
        if windows:
            entered = memory.new_zeros(*td.batch_size, memory.shape[-1])
            entered[:, 0] = memory
            memory = entered
        return td.set(self.key, memory)

    def leave(self, memory: torch.Tensor) -> None:
        """Keeps `[N, D]` for the next `enter`; of windows `[N, T, D]` (`memory_after`) the last column."""
        self.memory = memory.detach()[:, -1] if memory.dim() == 3 else memory.detach()

    def state_dict(self) -> dict:
        return {"memory": self.memory.cpu()}

    def load_state_dict(self, state: dict) -> None:
        self.memory = state["memory"].to(self.memory.device)
