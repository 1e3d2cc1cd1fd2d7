"""Terms with a network of their own, which learns from what was paid: RND and learning progress."""

import math

import torch
from tensordict import TensorDict
from torch import nn

from sparring.distributed import Distributed
from sparring.normalize import RunningNormalizer
from sparring.rewards.configs import RewardsConfig
from sparring.rewards.term import RewardTerm

HIDDEN = 128
CODE = 32
LEARNING_RATE = 1e-3
BATCH = 256
# pictures are seen in so many squares a side: enough to tell where something is
SQUARES = 8
# times that errors of a rollout are gone through: what is still unlearned of them would be taken for progress
PASSES = 10


class RandomNetworkDistillation(RewardTerm):
    """Pays for what was seen seldom: the error of a network that learns a random one's answers, on the next frame."""

    def __init__(self, config: RewardsConfig, spec, chunk: int, device: torch.device):
        super().__init__(config, spec, chunk, device)
        size = glimpse_size(spec)
        with torch.random.fork_rng(devices=[]):
            # the same in all processes, and the policy's weights do not depend on it
            torch.manual_seed(0)
            self.random = _network(size, CODE).to(device).requires_grad_(False)
        self.learner = Regressor(size, CODE, device)

    def __call__(self, td: TensorDict) -> torch.Tensor:
        seen = glimpse(td["next", "observation"])
        return (self.learner(seen) - self._answer(seen)).square().mean(-1)

    def learn(self, td: TensorDict, distributed: Distributed) -> None:
        seen = glimpse(td["next", "observation"])
        self.learner.watch(seen, distributed)
        self.learner.fit(seen, self._answer(seen), distributed)

    def _answer(self, seen: torch.Tensor) -> torch.Tensor:
        return self.random(self.learner.normalizer(seen))

    def state_dict(self) -> dict:
        return self.learner.training_state()

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_training_state(state)


class LearningProgress(RewardTerm):
    """Pays for going where the world model has become better: g(s, a) - error.

    g learns the errors of the rollouts before, hence those of the world model as it was. What cannot be learned is as
    wrong as it was: 0 in expectation. Before g has learned anything nothing is paid.
    """

    def __init__(self, config: RewardsConfig, spec, chunk: int, device: torch.device):
        super().__init__(config, spec, chunk, device)
        self.learner = Regressor(glimpse_size(spec) + chunk * spec.action_dim, 1, device)
        # g learns in units of them, so that it begins with the mean of the first rollout's
        self.errors = RunningNormalizer(1).to(device)

    def __call__(self, td: TensorDict) -> torch.Tensor:
        error = td["judged", "error"]
        if not self.learner.normalizer.count:
            return torch.zeros_like(error)
        return self.errors.inverse(self.learner(self._inputs(td)))[..., 0] - error

    def learn(self, td: TensorDict, distributed: Distributed) -> None:
        inputs, errors = self._inputs(td), td["judged", "error"][:, None]
        self.learner.watch(inputs, distributed)
        if not self.errors.count:
            # of the first rollout for good: other units would make g another function
            self.errors.update(errors, distributed.sum)
        for _ in range(PASSES):
            self.learner.fit(inputs, self.errors(errors), distributed)

    def state_dict(self) -> dict:
        return self.learner.training_state() | {"errors": self.errors.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_training_state(state)
        self.errors.load_state_dict(state["errors"])

    def _inputs(self, td: TensorDict) -> torch.Tensor:
        return torch.cat([glimpse(td["observation"]), td["action"].flatten(-2)], -1)


class Regressor(nn.Module):
    """A small network from numbers that it normalises itself to numbers, and how it learns. Alike in all processes."""

    def __init__(self, inputs: int, outputs: int, device: torch.device):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.network = _network(inputs, outputs)
        self.normalizer = RunningNormalizer(inputs, clip=5.0)
        self.to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE)
        self.fits = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(self.normalizer(x))

    def watch(self, x: torch.Tensor, distributed: Distributed) -> None:
        self.normalizer.update(x, distributed.sum)

    def fit(self, x: torch.Tensor, y: torch.Tensor, distributed: Distributed) -> None:
        """Once through `[B, inputs]` and `[B, outputs]`, in minibatches in an order of their own."""
        # a function of (process, call): nothing to save
        shuffle = torch.Generator().manual_seed(self.fits * 1009 + distributed.rank)
        order = torch.randperm(len(x), generator=shuffle).to(x.device)
        # processes step together, so one that has fewer rows takes smaller minibatches, or its rows several times
        count = int(distributed.max(-(-len(x) // BATCH)))
        for rows in order.repeat(-(-count // len(order))).tensor_split(count):
            with torch.enable_grad():
                loss = (self(x[rows]) - y[rows]).square().mean()
                gradients = torch.autograd.grad(loss, list(self.network.parameters()))
            for parameter, gradient in zip(self.network.parameters(), gradients, strict=True):
                parameter.grad = distributed.sum(gradient) / distributed.world_size
            self.optimizer.step()
        self.fits += 1

    def training_state(self) -> dict:
        return {"module": self.state_dict(), "optimizer": self.optimizer.state_dict(), "fits": self.fits}

    def load_training_state(self, state: dict) -> None:
        self.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.fits = state["fits"]


def glimpse_size(spec) -> int:
    shown = spec.observation
    pictures = sum(name.startswith("image/") for name in shown)
    return 3 * SQUARES**2 * pictures + (math.prod(shown["state"][0]) if "state" in shown else 0)


def glimpse(observation: TensorDict) -> torch.Tensor:
    """`[.., glimpse_size]`: all pictures, blurred to a few squares, and the state."""
    shape, parts = observation.batch_size, []
    for _, picture in sorted(observation.get("image", {}).items()):
        # [.., 3, H, W] -> [.., 3 * 64]
        squares = nn.functional.adaptive_avg_pool2d(picture.flatten(0, len(shape) - 1).float(), SQUARES)
        parts.append(squares.reshape(*shape, -1) / 255)
    state = observation.get("state", None)
    return torch.cat(parts if state is None else [*parts, state], -1)


def _network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs))
