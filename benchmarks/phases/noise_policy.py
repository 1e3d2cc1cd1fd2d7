"""Random actions as a policy for the phases: the baseline of explorers. It never learns."""

import torch
from pydantic import Field
from tensordict import TensorDict
from torch import nn

from sparring.config.section import Section
from sparring.policies.random import ColouredNoise


class NoiseConfig(Section):
    """Settings of the noise: those of the teacher phase."""

    robots: int = Field(16, gt=0, description="rollout.n_envs")
    coloured: float = Field(0.5, ge=0, le=1, description="teacher.coloured")
    correlation: float = Field(0.95, ge=0, lt=1, description="teacher.correlation")


class Noise(ColouredNoise):
    """Uniform and coloured noise; log-probabilities and values are zeros."""

    def __init__(self, config: NoiseConfig, spec, chunk: int):
        super().__init__(spec, chunk, ColouredNoise.share_of(config.robots, config.coloured) * config.correlation)
        # an optimiser needs at least one parameter
        self.nothing = nn.Parameter(torch.zeros(1))

    def complete(self, td: TensorDict) -> TensorDict:
        zeros = torch.zeros(len(td), self.chunk, device=td["action"].device)
        trace = {name: zeros for name in ("log_prob", "z2", "dims", "mean")}
        return TensorDict({"log_prob": zeros[:, 0], "value": zeros[:, 0], "trace": trace}, td.batch_size)

    def value(self, td: TensorDict) -> torch.Tensor:
        return torch.zeros(len(td), device=self.nothing.device)
