"""What policies with an encoder of observations and a critic share."""

import contextlib

import torch
from tensordict import TensorDict
from torch import nn

from sparring.normalize import Normalizer, fit_all
from sparring.policies.critic import PRIVILEGED, Critic
from sparring.policies.encoders import STATE, ObservationEncoder
from sparring.policies.policy import Policy


class EncodedPolicy(Policy):
    """The encoder's and the critic's normalisers, the critic's parameters, and the precision of the networks."""

    encoder: ObservationEncoder
    critic: Critic

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:
        return [key for key in self.in_keys if key in (STATE, PRIVILEGED)]

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        self.encoder.update_normalizer(td, sum_over_processes)
        self.critic.update_normalizer(td, sum_over_processes)

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def _fit(self, statistics, action_normalizer: Normalizer | None, state: str, action: str) -> None:
        """Those that are not fitted yet: the others came with weights that know them."""
        normalizers = (self.encoder.normalizer, self.critic.privileged, action_normalizer)
        unfitted = [None if getattr(each, "fitted", False) else each for each in normalizers]
        fit_all(statistics, *unfitted, state, action)

    def _precision(self):
        """Around the networks, in acting and in scoring alike."""
        if self.config.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(next(self.critic.parameters()).device.type, torch.bfloat16)
