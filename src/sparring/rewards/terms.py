"""Reward terms: each maps transitions to one component of the reward."""

import math
from collections.abc import Callable

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.normalize import RunningNormalizer
from sparring.policies.weights import load_optimizer
from sparring.processes.distributed import Distributed
from sparring.rewards.configs import RewardsConfig

_ORIGINAL_COST = 0.07  # in the original formula: cost of each step of divergence
_HIDDEN, _CODE = 128, 32
_LEARNING_RATE, _BATCH = 1e-3, 256
_SQUARES = 8  # images are averaged over 8 x 8 squares, enough to locate an object
PASSES = 10


class RewardTerm:
    """Base class of terms; most only override `__call__`. A td holds the transition and the world model's scores:
    `judged/{error,entropy,disagreement,surprise}`, `memory/world_model [.., D]` and `next/memory/world_model`; with
    `compares_memories` also `*/world_model_wrist`, computed without the cameras that the explorer does not have."""

    compares_memories: bool = False

    def __init__(self, config: RewardsConfig, spec: EnvSpec, chunk: int, device: torch.device):
        self.config = config

    def __call__(self, td: TensorDict) -> torch.Tensor:
        """The unscaled rewards of transitions `[N]` or `[T, N]`; the same shape."""
        raise NotImplementedError

    def learn(self, td: TensorDict, distributed: Distributed) -> None:
        """Learn from transitions `[B]` after they were rewarded."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


def _stateless(reward: Callable[[TensorDict], torch.Tensor]) -> type[RewardTerm]:
    class Stateless(RewardTerm):
        def __call__(self, td: TensorDict) -> torch.Tensor:
            return reward(td)

    return Stateless


TaskSuccess = _stateless(lambda td: td["next", "success"].float())  # 1 if an episode ends in success
TaskReward = _stateless(lambda td: td["next", "reward"].sum(-1))
# cross-entropy of the true next tokens. High on pure noise
PredictionError = _stateless(lambda td: td["judged", "error"])
# entropy of the prediction, whatever happens next. High on pure noise
PredictionEntropy = _stateless(lambda td: td["judged", "entropy"])
# disagreement of the ensemble: H[mean p] - mean H[p]; 0 on pure noise
Disagreement = _stateless(lambda td: td["judged", "disagreement"])
LatentSurprise = _stateless(lambda td: td["judged", "surprise"])  # prediction error beyond the predicted entropy
# change of the memory: ||h' - h||
MemoryChange = _stateless(
    lambda td: torch.linalg.vector_norm(td["next", "memory", "world_model"] - td["memory", "world_model"], dim=-1)
)


class MemoryDivergence(RewardTerm):
    """Rewards a decreasing distance d between the memories from the explorer's cameras and from all cameras.
    `potential`: d - discount * d'. `original`: -(d' - d) - 0.07 d on raw memories. 0 at the start of an episode."""

    compares_memories = True

    def __call__(self, td: TensorDict) -> torch.Tensor:
        before, after = self._distance(td["memory"]), self._distance(td["next", "memory"])
        if self.config.divergence == "original":
            reward = -(after - before) - _ORIGINAL_COST * before
        else:
            reward = before - self.config.divergence_discount * after
        return torch.where(td["is_first"], 0.0, reward)

    def _distance(self, memory: TensorDict) -> torch.Tensor:
        """||h_wrist - h||, or ||LN(h_wrist) - LN(h)|| / sqrt(D), in [0, 2]; an empty memory is normalised to zeros."""
        all_cameras, own = memory["world_model"], memory["world_model_wrist"]
        if self.config.divergence == "original":
            return torch.linalg.vector_norm(own - all_cameras, dim=-1)
        size, norm = all_cameras.shape[-1:], nn.functional.layer_norm
        return torch.linalg.vector_norm(norm(own, size) - norm(all_cameras, size), dim=-1) / math.sqrt(*size)


class RandomNetworkDistillation(RewardTerm):
    """Rewards novel frames: the error, on the next frame, of a network that learns the outputs of a random network."""

    def __init__(self, config: RewardsConfig, spec: EnvSpec, chunk: int, device: torch.device):
        super().__init__(config, spec, chunk, device)
        size = _glimpse_size(spec)
        self.random = _network(size, _CODE, seed=0).to(device).requires_grad_(False)
        self.learner = _Regressor(size, _CODE, device)

    def __call__(self, td: TensorDict) -> torch.Tensor:
        seen = _glimpse(td["next", "observation"])
        return (self.learner(seen) - self._answer(seen)).square().mean(-1)

    def learn(self, td: TensorDict, distributed: Distributed) -> None:
        seen = _glimpse(td["next", "observation"])
        self.learner.normalizer.update(seen, distributed.sum)
        self.learner.fit(seen, self._answer(seen), distributed)

    def _answer(self, seen: torch.Tensor) -> torch.Tensor:
        return self.random(self.learner.normalizer(seen))

    def state_dict(self) -> dict:
        return self.learner.training_state()

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_training_state(state)


class LearningProgress(RewardTerm):
    """Rewards transitions on which the world model has improved: g(s, a) - error, where g learns the errors of earlier
    rollouts. 0 in expectation on noise, and before g has learned anything."""

    def __init__(self, config: RewardsConfig, spec: EnvSpec, chunk: int, device: torch.device):
        super().__init__(config, spec, chunk, device)
        self.learner = _Regressor(_glimpse_size(spec) + chunk * spec.action_dim, 1, device)
        self.errors = RunningNormalizer(1).to(device)  # units of g

    def __call__(self, td: TensorDict) -> torch.Tensor:
        error = td["judged", "error"]
        if not self.learner.normalizer.count:
            return torch.zeros_like(error)
        return self.errors.inverse(self.learner(self._inputs(td)))[..., 0] - error

    def learn(self, td: TensorDict, distributed: Distributed) -> None:
        inputs, errors = self._inputs(td), td["judged", "error"][:, None]
        self.learner.normalizer.update(inputs, distributed.sum)
        if not self.errors.count:
            self.errors.update(errors, distributed.sum)  # fixed after the first rollout
        for _ in range(PASSES):
            self.learner.fit(inputs, self.errors(errors), distributed)

    def state_dict(self) -> dict:
        return self.learner.training_state() | {"errors": self.errors.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.learner.load_training_state(state)
        self.errors.load_state_dict(state["errors"])

    def _inputs(self, td: TensorDict) -> torch.Tensor:
        return torch.cat([_glimpse(td["observation"]), td["action"].flatten(-2)], -1)


class _Regressor(nn.Module):
    """A small regression network with its own input normalizer and optimizer, identical in all processes."""

    def __init__(self, inputs: int, outputs: int, device: torch.device):
        super().__init__()
        self.network = _network(inputs, outputs, seed=1)
        self.normalizer = RunningNormalizer(inputs, clip=5.0)
        self.to(device)
        self.optimizer = torch.optim.Adam(self.network.parameters(), _LEARNING_RATE)
        self.fits = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(self.normalizer(x))

    def fit(self, x: torch.Tensor, y: torch.Tensor, distributed: Distributed) -> None:
        """One pass over `[B, inputs]` and `[B, outputs]` in shuffled minibatches."""
        shuffle = torch.Generator().manual_seed(self.fits * 1009 + distributed.rank)
        order = torch.randperm(len(x), generator=shuffle).to(x.device)
        # all processes take the same number of steps: one with fewer rows takes smaller minibatches or repeats rows
        count = int(distributed.max(-(-len(x) // _BATCH)))
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
        load_optimizer(self.optimizer, state["optimizer"])
        self.fits = state["fits"]


def _glimpse_size(spec: EnvSpec) -> int:
    shown = spec.observation
    pictures = sum(name.startswith("image/") for name in shown)
    return 3 * _SQUARES**2 * pictures + (math.prod(shown["state"][0]) if "state" in shown else 0)


def _glimpse(observation: TensorDict) -> torch.Tensor:
    """`[.., glimpse_size]`: all images at a resolution of 8 x 8, and the state."""
    shape, parts = observation.batch_size, []
    for _, picture in sorted(observation.get("image", {}).items()):
        # [.., 3, H, W] -> [.., 3 * 64]
        squares = nn.functional.adaptive_avg_pool2d(picture.flatten(0, len(shape) - 1).float(), _SQUARES)
        parts.append(squares.reshape(*shape, -1) / 255)
    state = observation.get("state", None)
    return torch.cat(parts if state is None else [*parts, state], -1)


def _network(inputs: int, outputs: int, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, outputs))
