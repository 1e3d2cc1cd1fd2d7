"""Tiny pretrained policies for the parity gate: four kinds, with and without LoRA, and mutants.

Used by parity_vla.py and by the tests. Needs the extra `vla`.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from parity_cases import DIMS, REPLAY, STATE, RandomEnv
from torch import nn

from sparring.collect.collector import Collector
from sparring.config.section import Section
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.policies.configs import PI0PolicyConfig, VLAConfig
from sparring.policies.native.config import NativeVLAConfig
from sparring.policies.policy import Policy, make_policy

INSTRUCTIONS = ("push", "lift it")
# the chunk is shorter than the horizon: the last predicted actions are not executed
CHUNK, HORIZON, PADDING = 3, 4, 2
LORA = {"lora_r": 4, "lora_alpha": 8, "lora_dropout": 0.5}


class RandomCameraEnv(RandomEnv):
    """RandomEnv with two cameras, depth and instructions."""

    def __init__(self, num_envs: int, padding: int = 0):
        super().__init__(num_envs, padding)
        more = {"image/head": ((3, 8, 8), "uint8"), "image/wrist": ((3, 8, 8), "uint8")}
        more |= {"depth/head": ((1, 8, 8), "float32"), "task": ((), "int64")}
        names = {"task_names": ("push", "lift"), "instructions": INSTRUCTIONS}
        self.spec = replace(self.spec, observation=self.spec.observation | more, **names)

    def _observe(self):
        n, rng = self.num_envs, self.rng
        images = {f"image/{name}": rng.integers(0, 256, (n, 3, 8, 8), np.uint8) for name in ("head", "wrist")}
        depth = {"depth/head": rng.random((n, 1, 8, 8)).astype(np.float32)}
        return super()._observe() | images | depth | {"task": rng.integers(0, 2, n)}


class Plain(nn.Module):
    """A normal distribution around a linear function of all observations; `forward` samples from it."""

    def __init__(self, action_dim: int = DIMS, proprio_dim: int = STATE, width: int = 16):
        super().__init__()
        self.vision = nn.Sequential(nn.Flatten(), nn.LazyLinear(width))
        self.vision(torch.zeros(1, 2 * 3 * 8 * 8))
        self.words = nn.Embedding(256, width)
        self.joints = nn.Linear(proprio_dim, width)
        self.mean = nn.Linear(width, action_dim)
        self.log_std = nn.Parameter(torch.full((action_dim,), -0.5))
        self.value_head = nn.Linear(width, 1)

    def forward(self, observations):
        return self.distribution(observations).sample()

    def get_value(self, observations):
        return self.value_head(self.features(observations).detach()).float()

    def evaluate_actions(self, observations, actions):
        distribution = self.distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)

    def distribution(self, observations):
        mean = self.mean(self.features(observations)).float()
        return torch.distributions.Normal(mean, self.log_std.exp(), validate_args=False)

    def features(self, observations):
        words = (self.words(observations["language"]) * observations["language_mask"][..., None]).sum(1)
        return torch.tanh(self.vision(observations["rgb"]) + words + self.joints(observations["proprio"]))


class Samples(Plain):
    """`sample` draws with the given noise; `forward` returns the mean."""

    def forward(self, observations):
        return self.distribution(observations).mean

    def sample(self, observations, noise):
        distribution = self.distribution(observations)
        actions = distribution.mean + distribution.stddev * torch.special.ndtri(noise)
        return actions, distribution.log_prob(actions).sum(-1)


class Flows(nn.Module):
    """A flow head: the velocity is linear in the chunk, the time and the features."""

    def __init__(self, action_dim: int, steps: int = 4, width: int = 16):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(STATE, width), nn.Tanh())
        self.head = nn.Linear(width + action_dim + 1, action_dim)
        self.steps = steps

    def encode(self, observations):
        features = self.trunk(observations["proprio"])
        return features, features

    def denoise(self, x, t, prefix):
        steps = x.shape[1]
        inputs = torch.cat([prefix, t[:, None]], -1)[:, None].expand(-1, steps, -1)
        return self.head(torch.cat([x, inputs], -1))


# ---- the four kinds


def gaussian(checkpoint: Path, **settings) -> Section:
    """A model behind VLAModelInterface."""
    own = {"model_class": "vla_cases:Samples", "critic_parts": ("value_head",)}
    return VLAConfig(**own, normalize_observations=True, normalize_actions=True, **settings)


def flow(checkpoint: Path, **settings) -> Section:
    """A model with encode and denoise."""
    normalize = {"normalize_observations": True, "normalize_actions": True}
    return VLAConfig(model_class="vla_cases:Flows", horizon=HORIZON, **normalize, **settings)


def pi0(checkpoint: Path, **settings) -> Section:
    """The pi0 of transformers, from a folder that save_pretrained wrote."""
    return PI0PolicyConfig(model_path=str(checkpoint), **settings)


def native(checkpoint: Path, **settings) -> Section:
    return NativeVLAConfig(preset="tiny", horizon=HORIZON, **{"fast": False} | settings)


def native_graphs(checkpoint: Path, **settings) -> Section:
    """Acts through compiled CUDA graphs; scoring does not use them."""
    return native(checkpoint, fast=True, **settings)


KINDS: dict[str, Callable[..., Section]] = {
    "vla, Gaussian": gaussian,
    "vla, flow head": flow,
    "pi0": pi0,
    "native_vla, tiny": native,
}
ON_A_GPU_IN_BF16 = {"native_vla, tiny, graphs": native_graphs}


def settings_of(kind: Callable[..., Section], lora: bool, precision: str) -> dict:
    """LoRA in bf16 stores frozen weights in bf16, as users configure it; the native VLA does so by default."""
    halved = lora and precision == "bf16" and kind not in (native, native_graphs)
    return {"precision": precision} | (LORA if lora else {}) | ({"dtype": "bf16"} if halved else {})


def rollout_of(kind: Callable[..., Section], robots: int, device: str, checkpoint: Path, **settings):
    """(policy, buffer of at least REPLAY decisions)."""
    torch.manual_seed(0)
    env = Env(RandomCameraEnv(robots, PADDING), device)
    policy = make_policy(kind(checkpoint, **settings), env.spec, CHUNK)
    _perturb(policy)
    actions = {"mean": np.full(DIMS, 0.1), "std": np.full(DIMS, 0.5)}
    state = {"mean": np.zeros(STATE), "std": np.full(STATE, 2.0)}
    policy.fit_normalizers({"action": actions, "observation/state": state}, "mean_std", "mean_std")
    policy.eval().to(device)
    buffer = RolloutBuffer(-(-REPLAY // robots))
    Collector(env, policy, seed=0, chunk=CHUNK).collect(buffer)
    return policy, buffer


def _perturb(policy: Policy) -> None:
    """Perturb zero-initialised weights: with zero adapters and velocities, errors have no effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.abs().max() == 0 and not name.startswith("critic"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


# ---- mutants: what goes wrong between acting and scoring


def drop_out(policy: Policy) -> None:
    """The dropout of LoRA stays on."""
    policy.train()


def scale_adapters(policy: Policy) -> None:
    """The effect of adapters doubles: scoring uses another lora_alpha than acting."""
    from peft.tuners.lora import LoraLayer

    for layer in policy.model.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling["default"] *= 2


MUTANTS = {"dropout on": drop_out, "adapters scaled otherwise": scale_adapters}
