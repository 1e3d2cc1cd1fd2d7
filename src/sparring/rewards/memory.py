"""What actions do to a world model's memory (formulas.md, section 4)."""

import math

import torch
from tensordict import TensorDict

from sparring.rewards.term import RewardTerm

# of the original's formula: what each step of divergence costs
ORIGINAL_COST = 0.07


class MemoryDivergence(RewardTerm):
    """Pays for bringing what the explorer's own cameras let it know to what all cameras let it know.

    d is the distance between the memories of one frozen world model: with all cameras, and without those that the
    explorer does not see. `potential`: d - discount * d'. `original`: -(d' - d) - 0.07 d on raw memories. Both are 0
    where an episode begins: empty memories are alike, and that they part is not the explorer's doing.
    """

    compares_memories = True

    def __call__(self, td: TensorDict) -> torch.Tensor:
        entered, after = td["memory"], td["next", "memory"]
        if self.config.divergence == "original":
            before, now = _raw_distance(entered), _raw_distance(after)
            paid = -(now - before) - ORIGINAL_COST * before
        else:
            paid = _distance(entered) - self.config.divergence_discount * _distance(after)
        return torch.where(td["is_first"], 0.0, paid)


class MemoryChange(RewardTerm):
    """Pays for whatever changes the memory: ||h' - h||."""

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return torch.linalg.vector_norm(td["next", "memory", "world_model"] - td["memory", "world_model"], dim=-1)


def _distance(memory: TensorDict) -> torch.Tensor:
    """||LN(h_wrist) - LN(h)|| / sqrt(D), in [0, 2]; an empty memory is normalised to zeros."""
    all_cameras, own = memory["world_model"], memory["world_model_wrist"]
    size = all_cameras.shape[-1:]
    norm = torch.nn.functional.layer_norm
    return torch.linalg.vector_norm(norm(own, size) - norm(all_cameras, size), dim=-1) / math.sqrt(*size)


def _raw_distance(memory: TensorDict) -> torch.Tensor:
    return torch.linalg.vector_norm(memory["world_model_wrist"] - memory["world_model"], dim=-1)
