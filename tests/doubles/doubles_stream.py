"""Transitions without an env, whose numbers identify their step and env."""

import torch
from tensordict import TensorDict


class Stream:
    """Observation of env n at clock t: state (t, n), image t % 251; an episode's last one has clock t + 0.5."""

    def __init__(self, envs: int):
        self.envs, self.clock = envs, 0

    def step(self, ends: list[str] | None = None) -> TensorDict:
        """The next transition [N]; `ends[n]` is "terminated", "truncated" or anything else."""
        ends = ends or ["continue"] * self.envs
        terminated, truncated = (torch.tensor([e == name for e in ends]) for name in ("terminated", "truncated"))
        before, self.clock = self.root(), self.clock + 1
        after = self.root()["observation"].clone()
        done = terminated | truncated
        after[done] = self._observation(self.clock - 0.5)[done]
        following = {
            "observation": after,
            "reward": torch.full((self.envs, 1), float(self.clock)),
            "terminated": terminated,
            "truncated": truncated,
        }
        before["noise"] = torch.rand(self.envs, 2)
        before["action"] = torch.full((self.envs, 1, 3), self.clock - 1.0)
        before["next"] = TensorDict(following, [self.envs])
        return before

    def root(self) -> TensorDict:
        return TensorDict({"observation": self._observation(self.clock)}, [self.envs])

    def jump(self) -> None:
        self.clock += 10

    def _observation(self, clock: float) -> TensorDict:
        env = torch.arange(self.envs, dtype=torch.float32)
        state = torch.stack([torch.full((self.envs,), float(clock)), env], 1)
        image = torch.full((self.envs, 3, 2, 2), int(2 * clock) // 2 % 251, dtype=torch.uint8)
        return TensorDict({"state": state, "image": image}, [self.envs])
