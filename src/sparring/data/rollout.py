"""RolloutBuffer: one rollout [T, N], used once.

Every image is kept once: `observation` is [T+1, N] (the last row is where the next rollout begins), and the true last
observations of episodes that ended on the way sit in a compact list beside it. Memory is allocated on the first add
and written in place from then on.
"""

import torch
from tensordict import TensorDict


class RolloutBuffer:
    """`add` T transitions [N], then `get` them, then `clear`."""

    def __init__(self, steps: int):
        self.steps = steps
        self.position = 0
        self._observation: TensorDict | None = None
        self._transition: TensorDict | None = None
        # branch -> (leaf, its T rows) pairs: views into the two above, so that `add` is a handful of plain copies
        self._rows: dict[str | tuple[str, ...], list[tuple[str, tuple[torch.Tensor, ...]]]] = {}
        self._columns: dict[tuple[str, ...] | str, torch.Tensor] = {}
        # (step, env) of each true last observation, and these observations
        self.final_at: list[torch.Tensor] = []
        self.final: list[TensorDict] = []

    def is_full(self) -> bool:
        return self.position == self.steps

    def add(self, td: TensorDict) -> None:
        """One decision of every env, with `next/*`; of `next/observation` only what no other row holds is kept."""
        if self.is_full():
            raise RuntimeError(f"the rollout already holds its {self.steps} decisions; get() and clear() it first")
        if self._transition is None:
            self._allocate(td)
        for branch, leaves in self._rows.items():
            values = td.get(branch) if branch else td
            for leaf, rows in leaves:
                rows[self.position].copy_(values.get(leaf))
        done = td["next", "terminated"] | td["next", "truncated"]
        if done.any():
            ended = done.nonzero()[:, 0]
            self.final_at.append(torch.stack([torch.full_like(ended, self.position), ended]))
            self.final.append(td["next", "observation"][ended])
        self.position += 1

    def close(self, td: TensorDict) -> None:
        """The observation after the last transition: row T."""
        self._observation[self.steps] = td["observation"]

    def set(self, key, value: torch.Tensor) -> None:
        """Attach a column [T, N] that is worked out after the fact; it is gone with the rollout."""
        self._columns[key] = value

    @property
    def last(self) -> TensorDict:
        """`observation` after the last transition, [N]."""
        return TensorDict({"observation": self._observation[self.steps]}, self._observation.batch_size[1:])

    def get(self, flatten: bool = True) -> TensorDict:
        """`[T, N]`, or `[T*N]` in time order; views, not copies."""
        if not self.is_full():
            raise RuntimeError(f"the rollout holds {self.position} of {self.steps} decisions; add() the rest first")
        rollout = self._transition.copy().set("observation", self._observation[:-1])
        for key, value in self._columns.items():
            rollout.set(key, value)
        return rollout.flatten(0, 1) if flatten else rollout

    def clear(self) -> None:
        self.position = 0
        self.final_at, self.final, self._columns = [], [], {}

    def bytes(self) -> int:
        stores = [s for s in (self._observation, self._transition) if s is not None]
        return sum(tensor.nbytes for store in stores for tensor in store.values(True, True))

    @torch.inference_mode(False)
    def _allocate(self, td: TensorDict) -> None:
        transition = td.exclude("observation", ("next", "observation"), "noise").clone(recurse=False)
        self._transition = _zeros(transition, self.steps)
        self._observation = _zeros(td.select("observation"), self.steps + 1)["observation"]
        for prefix, store in (((), self._transition), (("observation",), self._observation)):
            for key, value in store.items(True, True):
                *branch, leaf = (*prefix, *key) if isinstance(key, tuple) else (*prefix, key)
                self._rows.setdefault(tuple(branch), []).append((leaf, value.unbind(0)))


def _zeros(td: TensorDict, rows: int) -> TensorDict:
    # [N, ...] -> [rows, N, ...]
    return td.apply(
        lambda x: torch.zeros(rows, *x.shape, dtype=x.dtype, device=x.device), batch_size=[rows, *td.batch_size]
    )
