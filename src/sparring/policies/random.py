"""Random actions: the baseline of every evaluation, and the first training data of a world model."""

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.policies.policy import Policy


class RandomPolicy(Policy):
    """Uniformly random actions, independent of each other."""

    in_keys = []

    def __init__(self, spec: EnvSpec, chunk: int):
        super().__init__()
        self.spec, self.chunk = spec, chunk
        self.noise_size = chunk * spec.action_dim

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        """Add actions in [-1, 1], or the index of a discrete action; without an autograd graph."""
        uniform = self._uniform(td)
        choices = self.spec.discrete_actions
        td.set("action", (uniform * choices).floor() if choices else 2 * uniform - 1)
        zero = torch.zeros(td.batch_size, device=uniform.device)
        return td.update({"log_prob": zero, "value": zero.clone()})

    def _uniform(self, td: TensorDict) -> torch.Tensor:
        return td["noise"].unflatten(-1, (self.chunk, self.spec.action_dim))


class ColouredNoise(RandomPolicy):
    """Random actions that change slowly: uniform in [-1, 1], but correlated from step to step.
    A normal AR(1) process x' = r x + sqrt(1 - r^2) e per episode, mapped to uniform; `correlation` [N]: r per robot."""

    def __init__(self, spec: EnvSpec, chunk: int, correlation: torch.Tensor):
        super().__init__(spec, chunk)
        self.correlation = nn.Buffer(correlation.float()[:, None], persistent=False)  # [N, 1]
        # [N, A]: the state of the process at the last step; saved in checkpoints
        self.last = nn.Buffer(torch.zeros(len(correlation), spec.action_dim))

    def _uniform(self, td: TensorDict) -> torch.Tensor:
        noise = torch.special.ndtri(super()._uniform(td).double()).float()  # [N, C, A]
        correlation = torch.where(td["is_first"][:, None], 0.0, self.correlation)
        last, steps = self.last, []
        for step in range(self.chunk):
            last = correlation * last + (1 - correlation**2).sqrt() * noise[:, step]
            steps.append(last)
            correlation = self.correlation
        self.last.copy_(last)
        # float32 rounds the tails to 0 or 1, but uniform numbers must lie inside (0, 1)
        return torch.special.ndtr(torch.stack(steps, 1).double()).float().clamp(2**-24, 1 - 2**-24)

    @staticmethod
    def share_of(robots: int, share: float, first: int = 0, tasks: int = 1) -> torch.Tensor:
        """Return `[N]` bool: a `share` of the robots, from number `first` on, spread evenly over robots and tasks."""
        robot = torch.arange(first, first + robots)
        index = (robot // tasks + robot % tasks).double()
        return ((index + 1) * share + 0.5).floor() > (index * share + 0.5).floor()
