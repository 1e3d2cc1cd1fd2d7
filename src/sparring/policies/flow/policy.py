"""FlowPolicy: a transformer denoises action chunks, conditioned on encoded observations.

Letters: B decisions, H steps of a chunk, A action dims, F features, W width."""

import copy
import math

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.policies.configs import FlowConfig
from sparring.policies.critic import Critic
from sparring.policies.encoders import ObservationEncoder, self_attention
from sparring.policies.flow.chain import FlowChain
from sparring.policies.policy import Loss

_LONGEST_STRIDE = 0.2  # largest time step of the consistency term; time runs from 0 to 1


class FlowPolicy(FlowChain):
    config: FlowConfig

    def __init__(self, config: FlowConfig, spec: EnvSpec, chunk: int):
        if config.width % config.heads:
            raise UserError(f"policy.width={config.width} must be a multiple of policy.heads={config.heads}")
        if config.consistency and config.method == "fpo":
            why = "policy.method=fpo scores the velocity along the path, but with this term a policy acts with another"
            raise UserError(f"policy.consistency={config.consistency}: {why}; set it to 0, or set another method")
        super().__init__(config, spec, chunk, config.width, config.normalize_actions)
        self.encoder = ObservationEncoder(config, spec)
        self.condition = nn.Linear(self.encoder.size, config.width)
        self.velocity = _ActionTransformer(config, self.horizon, self.action_dim)
        self.target: _ActionTransformer | None = None
        self.aim: nn.Parameter | None = None
        if config.consistency:
            self.target = copy.deepcopy(self.velocity).requires_grad_(False)
            # added to the condition to request the velocity towards the end of the path instead of along it
            self.aim = nn.Parameter(torch.randn(config.width) * 0.02)
        self.critic = Critic(config, spec, self.encoder.size, config.normalize_observations)
        self.in_keys = [*self.encoder.in_keys, *self.critic.in_keys, *self.trace_keys]

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        features, condition = self._encode(td)
        return features, condition if self.aim is None else condition + self.aim

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: torch.Tensor) -> torch.Tensor:
        return self._run(self.velocity, x, t, prefix)

    def value(self, td: TensorDict) -> torch.Tensor:
        with self._precision():
            features = self.encoder(td)
        return self.value_of(features.float(), td)

    def imitation_loss(self, td: TensorDict, generator: torch.Generator) -> Loss:
        _, condition = self._encode(td)
        points = self._points(td, generator)
        loss = points.mean((self.denoise(points.x, points.t, condition) - points.velocity).square())
        metrics = {"flow_matching": loss.detach()}
        if self.target is not None and self.aim is not None:
            end_condition = condition + self.aim
            velocity = self.denoise(points.x, points.t, end_condition)
            end = self._target_end(self.target, points.x, points.t, condition, end_condition, generator)
            target_velocity = (points.x - end) / points.t[:, None, None].clamp_min(1e-3)
            consistency = points.mean((velocity - target_velocity).square())
            loss = loss + self.config.consistency * consistency
            metrics["consistency"] = consistency.detach()
        return loss, metrics

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return super()._normalizers() | {"observation/state": self.encoder.normalizer}

    def _encode(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        with self._precision():
            features = self.encoder(td)
            condition = self.condition(features).float()
        return features.float(), condition

    def _run(self, net: nn.Module, x: torch.Tensor, t: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        with self._precision():
            velocity = net(x, t, condition)
        return velocity.float()

    @torch.no_grad()
    def _target_end(self, target: nn.Module, x, t, condition, end_condition, generator) -> torch.Tensor:
        """The end of the path that the target network (an EMA) predicts from a point slightly further along it."""
        target.eval()
        for average, current in zip(target.parameters(), self.velocity.parameters(), strict=True):
            average.lerp_(current, 1 - self.config.target_decay)
        uniform = torch.rand(len(t), generator=generator, device=generator.device).to(t.device)
        stride = torch.minimum(t, _LONGEST_STRIDE * uniform)
        later = t - stride
        x = x - stride[:, None, None] * self._run(target, x, t, condition)
        return x - later[:, None, None] * self._run(target, x, later, end_condition)


class _ActionTransformer(nn.Module):
    """(noisy chunk, time, condition) -> one vector per step of the chunk (a DiT). Initially returns zeros."""

    def __init__(self, config: FlowConfig, horizon: int, action_dim: int):
        super().__init__()
        width = config.width
        self.input = nn.Linear(action_dim, width)
        self.position = nn.Parameter(torch.randn(horizon, width) * 0.02)
        self.time = _TimeEmbedding(width)
        self.blocks = nn.ModuleList(_DiTBlock(width, config.heads, config.dropout) for _ in range(config.layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = _zeroed(nn.Linear(width, 2 * width))
        self.output = _zeroed(nn.Linear(width, action_dim))

    def forward(self, x: torch.Tensor, t: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        tokens = self.input(x) + self.position  # [B, H, A] -> [B, H, W]
        condition = nn.functional.silu(self.time(t) + condition)[:, None]  # [B, 1, W]
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(condition).chunk(2, -1)
        return self.output(torch.addcmul(shift, self.norm(tokens), 1 + scale))


class _DiTBlock(nn.Module):
    """Attention and an MLP, both shifted, scaled and gated by the condition. Initially the identity."""

    def __init__(self, width: int, heads: int, dropout: float):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )
        self.modulation = _zeroed(nn.Linear(width, 6 * width))

    def forward(self, tokens: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.modulation(condition).chunk(6, -1)
        projected = self.queries_keys_values(torch.addcmul(shift_1, self.norm(tokens), 1 + scale_1))
        tokens = torch.addcmul(tokens, gate_1, self.attended(self_attention(projected, self.heads)))
        return torch.addcmul(tokens, gate_2, self.mlp(torch.addcmul(shift_2, self.norm(tokens), 1 + scale_2)))


class _TimeEmbedding(nn.Module):
    """Embeds a time in [0, 1] as sines and cosines of many frequencies, followed by an MLP."""

    def __init__(self, width: int):
        super().__init__()
        frequencies = torch.exp(torch.linspace(0, math.log(1000.0), width // 2))
        self.frequencies = nn.Buffer(frequencies, persistent=False)
        self.mlp = nn.Sequential(nn.Linear(2 * (width // 2), width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * self.frequencies  # [B, W / 2]
        return self.mlp(torch.cat([angles.sin(), angles.cos()], -1))


def _zeroed(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
