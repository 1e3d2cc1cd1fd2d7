"""RewardTerm: one named reason to be paid."""

import torch
from tensordict import TensorDict

from sparring.distributed import Distributed
from sparring.rewards.configs import RewardsConfig


class RewardTerm:
    """What every term offers; most only override `__call__`.

    Beside the transition it finds in a td what the world model said of it (rewards/reward_model.py):
    `judged/{error,entropy,disagreement,surprise}`, `memory/world_model [.., D]` as it entered the decision and
    `next/memory/world_model` after it; `memory/world_model_wrist` and `next/memory/world_model_wrist` are those without
    the cameras that the explorer does not see, where `compares_memories`.
    """

    compares_memories: bool = False

    def __init__(self, config: RewardsConfig, spec, chunk: int, device: torch.device):
        self.config = config

    def __call__(self, td: TensorDict) -> torch.Tensor:
        """What the transitions `[N]` or `[T, N]` are worth, in units of its own; the same shape."""
        raise NotImplementedError

    def learn(self, td: TensorDict, distributed: Distributed) -> None:
        """From transitions `[B]` that have been paid."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...
