"""The env's own reward and success, so that exploring and a task can be paid for together."""

import torch
from tensordict import TensorDict

from sparring.rewards.term import RewardTerm


class TaskSuccess(RewardTerm):
    """1 where an episode ends in success."""

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return td["next", "success"].float()


class TaskReward(RewardTerm):
    """The env's rewards, summed over the steps of the chunk."""

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return td["next", "reward"].sum(-1)
