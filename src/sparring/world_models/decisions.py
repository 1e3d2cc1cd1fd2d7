"""What a decision is to the world model: the action taken, the robot's state and the instruction, as tokens."""

import math

import torch
from tensordict import TensorDict
from torch import nn

from sparring.normalize import RunningNormalizer
from sparring.policies.language import InstructionEncoder


class DecisionEncoder(nn.Module):
    """`td [N]` -> `[N, 1 + P, W]`: a token of its own, and what it means for each patch: where an arm will be is a
    matter of its joints, and each patch shows another part of it.

    State and instruction are read where the env shows them, the action always.
    """

    def __init__(self, spec, chunk: int, width: int, language_features: int, patches: int):
        super().__init__()
        shown = spec.observation
        self.choices = spec.discrete_actions
        self.state_size = math.prod(shown["state"][0]) if "state" in shown else 0
        self.normalizer = RunningNormalizer(self.state_size)
        told = language_features and "task" in shown
        self.language = InstructionEncoder(spec.instructions, language_features) if told else None
        action_size = chunk * (self.choices or spec.action_dim)
        inputs = action_size + self.state_size + (language_features if told else 0)
        hidden = 2 * width
        self.mlp = nn.Sequential(nn.Linear(inputs, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.tokens = nn.Linear(hidden, (1 + patches) * width)
        self.width = width

    def forward(self, td: TensorDict) -> torch.Tensor:
        parts = [self._action(td["action"])]
        if self.state_size:
            parts.append(self.normalizer(td["observation", "state"].flatten(1)))
        if self.language is not None:
            parts.append(self.language(td["observation", "task"]))
        # [N, 1 + P, W]
        return self.tokens(self.mlp(torch.cat(parts, -1))).unflatten(-1, (-1, self.width))

    def _action(self, action: torch.Tensor) -> torch.Tensor:
        # [N, C, A] -> [N, C * A], as the env takes them: clipped, or one of so many choices
        if self.choices:
            return nn.functional.one_hot(action[..., 0].long(), self.choices).flatten(1).float()
        return action.clamp(-1, 1).flatten(1)
