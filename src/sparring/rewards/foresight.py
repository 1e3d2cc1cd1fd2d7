"""What a transition was to the world model that should have foreseen it; all of it worked out by its `score`."""

import torch
from tensordict import TensorDict

from sparring.rewards.term import RewardTerm


class PredictionError(RewardTerm):
    """Pays for what really came next and was not foretold: cross-entropy of the true tokens. Drawn to pure noise."""

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return td["judged", "error"]


class PredictionEntropy(RewardTerm):
    """Pays for going where the world model is unsure, whatever then happens. Drawn to pure noise."""

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return td["judged", "entropy"]


class Disagreement(RewardTerm):
    """Pays for going where the ensemble's members foretell different things: H[mean p] - mean H[p]; 0 on pure noise."""

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return td["judged", "disagreement"]


class LatentSurprise(RewardTerm):
    """Pays for surprise beyond what was foretold to be random."""

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return td["judged", "surprise"]
