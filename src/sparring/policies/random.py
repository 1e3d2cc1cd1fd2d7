"""Random actions: the baseline of every evaluation, and what a world model is first shown."""

import torch
from tensordict import TensorDict

from sparring.policies.policy import Policy


class RandomPolicy(Policy):
    """Uniformly random actions, each independent of the one before."""

    in_keys = []

    def __init__(self, spec, chunk: int):
        super().__init__()
        self.spec, self.chunk = spec, chunk
        self.noise_size = chunk * spec.action_dim

    def act(self, td: TensorDict) -> TensorDict:
        uniform = self._uniform(td)
        choices = self.spec.discrete_actions
        td.set("action", (uniform * choices).floor() if choices else 2 * uniform - 1)
        zero = torch.zeros(td.batch_size, device=uniform.device)
        return td.update({"log_prob": zero, "value": zero.clone()})

    def _uniform(self, td: TensorDict) -> torch.Tensor:
        """`[N, C, A]` in (0, 1)."""
        return td["noise"].unflatten(-1, (self.chunk, self.spec.action_dim))


class ColouredNoise(RandomPolicy):
    """Random actions that change slowly: an arm that keeps its direction for a while gets about.

    Each step's action is as uniform in [-1, 1] as RandomPolicy's, but resembles the one before: behind it is a normal
    number that follows x' = r x + sqrt(1 - r^2) e (AR(1)), drawn anew where an episode begins. `correlation` [N] is r
    of each robot; 0 is RandomPolicy. What a robot does depends on its noise since its episode began, on nothing else.
    """

    def __init__(self, spec, chunk: int, correlation: torch.Tensor):
        super().__init__(spec, chunk)
        # [N, 1]
        self.register_buffer("correlation", correlation.float()[:, None], persistent=False)
        # [N, A]: the normal numbers behind the last actions, which a stopped run must find again
        self.register_buffer("last", torch.zeros(len(correlation), spec.action_dim))

    def _uniform(self, td: TensorDict) -> torch.Tensor:
        # [N, C, A]
        fresh = torch.special.ndtri(super()._uniform(td).double()).float()
        correlation = torch.where(td["is_first"][:, None], 0.0, self.correlation)
        last, steps = self.last, []
        for step in range(self.chunk):
            last = correlation * last + (1 - correlation**2).sqrt() * fresh[:, step]
            steps.append(last)
            correlation = self.correlation
        self.last.copy_(last)
        # float32 rounds what is far out to 0 or 1, which no uniform number may be
        return torch.special.ndtr(torch.stack(steps, 1).double()).float().clamp(2**-24, 1 - 2**-24)


def share_of(robots: int, share: float, first: int = 0, tasks: int = 1) -> torch.Tensor:
    """`[N]` bool: which of the robots from number `first` on belong to a share that is spread evenly over all.

    Over the robots of each of the tasks too, which are dealt out in turn.
    """
    robot = torch.arange(first, first + robots)
    place = (robot // tasks + robot % tasks).double()
    return ((place + 1) * share + 0.5).floor() > (place * share + 0.5).floor()
