"""The value network of every policy."""

import math

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.normalize import RunningNormalizer
from sparring.policies.configs import CriticConfig
from sparring.policies.encoders import mlp

PRIVILEGED = ("observation", "privileged")
_MEMORY = 10  # updates over which the spread of returns is averaged: returns grow as a policy learns


class Critic(nn.Module):
    """V from the encoder's features and `observation/privileged`; the output layer learns normalised returns."""

    def __init__(self, config: CriticConfig, spec: EnvSpec, features: int, normalize: bool):
        super().__init__()
        privileged = math.prod(spec.observation["privileged"][0]) if "privileged" in spec.observation else 0
        self.in_keys = [PRIVILEGED] if privileged else []
        self.privileged = None
        if privileged:
            self.privileged = RunningNormalizer(privileged) if normalize else nn.Identity()
        inputs = features + privileged
        self.hidden = mlp(inputs, config.hidden, config.activation)
        self.output = nn.Linear(config.hidden[-1] if config.hidden else inputs, 1)
        nn.init.orthogonal_(self.output.weight, 1.0)
        nn.init.zeros_(self.output.bias)
        self.returns = RunningNormalizer(1, memory=_MEMORY)

    def forward(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        if self.privileged is not None:
            features = torch.cat([features, self.privileged(td[PRIVILEGED])], -1)
        return self.returns.inverse(self.output(self.hidden(features)))[..., 0]  # [B]

    @torch.no_grad()
    def shift_by(self, level: float) -> None:
        self.output.bias.add_(level * self.returns.scale)

    @torch.no_grad()
    def fit_returns(self, returns: torch.Tensor, sum_over_processes) -> float:
        """Fit mean and spread to recent returns [B], return the spread. Values stay the same (PopArt)."""
        shift, spread = self.returns.shift.clone(), 1 / self.returns.scale
        self.returns.update(returns[:, None], sum_over_processes)
        ratio = spread * self.returns.scale
        self.output.weight.mul_(ratio)
        self.output.bias.mul_(ratio).add_((shift - self.returns.shift) * self.returns.scale)
        return float(1 / self.returns.scale)
