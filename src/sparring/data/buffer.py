"""Buffer: what every store of recent experience can do."""

from collections.abc import Iterator
from typing import Protocol

import torch
from tensordict import TensorDict, TensorDictBase


def check_transition(td: TensorDict) -> None:
    if not isinstance(td, TensorDictBase) or td.batch_dims not in (1, 2):
        got = f"a TensorDict {list(td.batch_size)}" if isinstance(td, TensorDictBase) else type(td).__name__
        raise TypeError(f"expected a TensorDict: a transition [N] or a rollout [T, N], with next/*; got {got}")


class Buffer(Protocol):
    """Transitions of N envs, in time order.

    The first half is for anyone. The second serves the newest rollout to those who collect and train in turns.
    """

    # decisions of a rollout, at most
    steps: int

    def add(self, td: TensorDict) -> None:
        """A transition [N] or a rollout [T, N], with `next/*`."""

    def close(self, td: TensorDict) -> None:
        """The observation [N] after the last transition."""

    def get(self, flatten: bool = True, following: bool = False) -> TensorDict:
        """All there is: `[T, N]`, or `[T*N]` in time order; `following` adds `next/observation`."""

    def windows(self, length: int, following: bool = False) -> Iterator[TensorDict]:
        """Slices of time `[length, N]`, the oldest first."""

    def sample(self, batch_size: int, generator: torch.Generator | None = None) -> TensorDict:
        """`[B]` transitions with `next/observation`, each stored one as likely as the others."""

    def is_full(self) -> bool: ...

    def clear(self) -> None: ...

    def bytes(self) -> int: ...

    def start(self) -> None:
        """A rollout begins."""

    def rollout(self) -> TensorDict:
        """The newest `steps` decisions `[T, N]`, and the columns that were `set`."""

    def set(self, key, value: torch.Tensor) -> None:
        """Attach a column [T, N] to the newest rollout; it is gone with it."""

    def finals(self) -> tuple[torch.Tensor, TensorDict] | None:
        """(step, env) [2, F] of the episodes that ended in the newest rollout, and their last observations [F]."""

    @property
    def last(self) -> TensorDict:
        """`observation` after the last transition, [N]."""
