"""Somebody's flow-matching VLA as a Policy."""

from collections.abc import Mapping

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import fit_all
from sparring.policies.critic import PRIVILEGED, Critic
from sparring.policies.flow.chain import FlowChain
from sparring.policies.policy import Policy
from sparring.policies.vla import interface as parts
from sparring.policies.vla.config import VLAConfig
from sparring.policies.vla.interface import denoises
from sparring.policies.vla.observations import STATE, Observations
from sparring.policies.vla.policy import VLAPolicy, called, model_class, wrapped_model
from sparring.processes.memory_errors import shortage

# ---- VLAFlowPolicy: a model of anybody's with a flow head, drawn from and scored as our own flow policies are.


class VLAFlowPolicy(FlowChain):
    """The model's `encode` once a decision, its `denoise` every step; the value head here reads its features."""

    def __init__(self, config: VLAConfig, spec, chunk: int):
        observations = Observations(config, spec)
        model, _ = wrapped_model(config, spec, chunk, observations)
        features = _tried(model, config, observations, config.horizon or chunk, spec.action_dim - spec.action_padding)
        super().__init__(config, spec, chunk, features, config.normalize_actions)
        self.observations, self.model = observations, model
        self.critic = Critic(config, spec, features, normalize=True)
        self.in_keys = [*observations.in_keys, *self.critic.in_keys, *self.trace_keys]

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        with called(self.model, self.config):
            features, prefix = self.model.encode(self.observations(td))
        features = features.float()
        both = {"features": features, "prefix": prefix}
        return features, TensorDict(both, td.batch_size, device=features.device)

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: TensorDict) -> torch.Tensor:
        with called(self.model, self.config):
            return self.model.denoise(x, t, prefix["prefix"]).float()

    def noise_condition(self, prefix: TensorDict) -> torch.Tensor:
        return prefix["features"]

    def judge(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        return self.critic(features.detach(), td)

    def value(self, td: TensorDict) -> torch.Tensor:
        return self.judge(self.encode(td)[0], td)

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:
        own = [("observation", STATE)] if self.observations.normalizer is not None else []
        return [*own, *self.critic.in_keys]

    def critic_parameters(self) -> list[nn.Parameter]:
        return list(self.critic.parameters())

    def fit_normalizers(self, statistics: Mapping[str, Mapping[str, np.ndarray]], state: str, action: str) -> None:
        normalizers = (self.observations.normalizer, self.critic.privileged, self.actions)
        fit_all(statistics, *(None if getattr(n, "fitted", False) else n for n in normalizers), state, action)

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        if self.observations.normalizer is not None:
            self.observations.normalizer.update(td["observation", STATE], sum_over_processes)
        if PRIVILEGED in self.critic.in_keys:
            self.critic.update_normalizer(td, sum_over_processes)

    def train(self, mode: bool = True) -> "VLAFlowPolicy":
        super().train(mode)
        parts.rest(self.model)
        return self


@torch.no_grad()
def _tried(model: nn.Module, config: VLAConfig, observations: Observations, horizon: int, action_dim: int) -> int:
    """How many features it gives, found by asking; and that it denoises chunks of this shape."""
    blank, name = observations.blank(1), type(model).__name__
    x = torch.zeros(1, horizon, action_dim)
    with called(model, config):
        encoded = model.encode(observations(blank))
        if not (isinstance(encoded, tuple) and len(encoded) == 2 and encoded[0].ndim == 2):
            raise UserError(f"{name}.encode: expected (features [B, F], prefix), got {_shape(encoded)}")
        features, prefix = encoded
        try:
            velocity = model.denoise(x, torch.ones(1), prefix)
        except RuntimeError as error:
            if shortage(error):
                raise
            raise UserError(
                f"{name}.denoise cannot read chunks [1, {horizon}, {action_dim}] ({str(error).splitlines()[0]}); make "
                f"the model for {horizon} steps (policy.horizon or rollout.action_steps) of {action_dim} action entries"
            ) from error
    if velocity.shape != x.shape:
        raise UserError(f"{name}.denoise gave {list(velocity.shape)} for a chunk {list(x.shape)}; expected its shape")
    return features.shape[1]


def _shape(given) -> str:
    return str(list(given.shape)) if isinstance(given, torch.Tensor) else f"a {type(given).__name__}"


# ---- policy.name=vla: which policy a model gets follows from what it has.


def make_vla_policy(config: VLAConfig, spec, chunk: int) -> Policy:
    kind = VLAFlowPolicy if denoises(model_class(config)) else VLAPolicy
    return kind(config, spec, chunk)
