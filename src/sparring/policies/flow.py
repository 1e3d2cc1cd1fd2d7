"""The flow policy: a transformer denoises action chunks, told of what an encoder sees.

Letters: B decisions, H steps of a chunk, A action dims, F features, W width.
"""

import copy

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.policies.configs import FlowConfig
from sparring.policies.critic import Critic
from sparring.policies.dit import ActionTransformer
from sparring.policies.encoded import EncodedPolicy
from sparring.policies.encoders import ObservationEncoder
from sparring.policies.flow_chain import FlowChain, uniform

# along a path, in one step of the consistency term
_LONGEST_STRIDE = 0.2


class FlowPolicy(FlowChain, EncodedPolicy):
    """The critic reads the encoder's features and does not shape them."""

    def __init__(self, config: FlowConfig, spec, chunk: int):
        if config.width % config.heads:
            raise UserError(f"policy.width={config.width} cannot be split over policy.heads={config.heads}")
        super().__init__(config, spec, chunk, config.width, config.normalize_actions)
        self.encoder = ObservationEncoder(config, spec)
        self.condition = nn.Linear(self.encoder.size, config.width)
        self.velocity = ActionTransformer(
            self.horizon, self.action_dim, config.width, config.layers, config.heads, config.dropout
        )
        self.target = self.aim = None
        if config.consistency:
            # follows the velocity slowly
            self.target = copy.deepcopy(self.velocity).requires_grad_(False)
            # told to the network where its velocity is to point at the end of the path, not along it
            self.aim = nn.Parameter(torch.randn(config.width) * 0.02)
        self.critic = Critic(config, spec, self.encoder.size, config.normalize_observations)
        self.in_keys = [*self.encoder.in_keys, *self.critic.in_keys, *self.trace_keys]

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        features, about = self._encode(td)
        return features, about if self.aim is None else about + self.aim

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        return self._velocity(self.velocity, x, t, prefix)

    def judge(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        return self.critic(features.detach(), td)

    def value(self, td: TensorDict) -> torch.Tensor:
        with self._precision():
            features = self.encoder(td)
        return self.judge(features.float(), td)

    def imitation_loss(
        self, td: TensorDict, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        _, about = self._encode(td)
        shown = self.shown(td, generator)
        loss = shown.loss(lambda x, t: self.denoise(x, t, about))
        told = {"flow_matching": loss.detach()}
        if self.target is not None:
            velocity = self.denoise(shown.x, shown.t, about + self.aim)
            end = self._later_end(shown.x, shown.t, about, generator)
            aimed = (shown.x - end) / shown.t[:, None, None].clamp_min(1e-3)
            told["consistency"] = shown.mean((velocity - aimed).square())
            loss = loss + self.config.consistency * told["consistency"]
        return loss, {name: value.detach() for name, value in told.items()}

    def fit_normalizers(self, statistics, state: str, action: str) -> None:
        self._fit(statistics, self.actions, state, action)

    def _encode(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, F], and what the action transformer is told of them [B, W]."""
        with self._precision():
            features = self.encoder(td)
            about = self.condition(features).float()
        return features.float(), about

    def _velocity(self, net: nn.Module, x: torch.Tensor, t: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        with self._precision():
            velocity = net(x, t, about)
        return velocity.float()

    @torch.no_grad()
    def _later_end(self, x, t, about, generator) -> torch.Tensor:
        """Where a point a little further along the path leads to, by the slow network: this one must lead there too."""
        self.target.eval()
        for slow, fast in zip(self.target.parameters(), self.velocity.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.config.target_decay)
        stride = torch.minimum(t, _LONGEST_STRIDE * uniform(len(t), generator, t.device))
        later = t - stride
        x = x - stride[:, None, None] * self._velocity(self.target, x, t, about)
        return x - later[:, None, None] * self._velocity(self.target, x, later, about + self.aim)
