"""VLA models small enough to know by heart, and an env that shows all they read."""

from dataclasses import replace

import numpy as np
import torch
from parity_cases import DIMS, STATE, Drifting
from torch import nn

from sparring.policies.vla_configs import VLAConfig

INSTRUCTIONS = ("push", "lift it")


class Seeing(Drifting):
    """Drifting, with two cameras, depth and instructions."""

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
    """A normal around a linear function of all it is shown; draws inside forward."""

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


class Told(Plain):
    """Is told whether to draw."""

    def forward(self, observations, deterministic=False):
        distribution = self.distribution(observations)
        return distribution.mean if deterministic else distribution.sample()


class Samples(Plain):
    """Draws with the noise it is given, and gives the mean otherwise."""

    def forward(self, observations):
        return self.distribution(observations).mean

    def sample(self, observations, noise):
        distribution = self.distribution(observations)
        actions = distribution.mean + distribution.stddev * torch.special.ndtri(noise)
        return actions, distribution.log_prob(actions).sum(-1)


class Sized(Samples):
    """Says how many numbers its actions have."""

    def __init__(self, action_dim: int):
        super().__init__(action_dim)
        self.action_dim = action_dim


class Lies(Samples):
    """Draws from a wider normal than it scores."""

    def sample(self, observations, noise):
        mean, std = self.distribution(observations).mean, 1.1 * self.log_std.exp()
        actions = mean + std * torch.special.ndtri(noise)
        return actions, torch.distributions.Normal(mean, std).log_prob(actions).sum(-1)


class DropsOut(Samples):
    """Forgets to be still when it scores."""

    def evaluate_actions(self, observations, actions):
        log_prob, entropy = super().evaluate_actions(observations, actions)
        return nn.functional.dropout(log_prob, 0.5, training=True), entropy


class StepByStep(Samples):
    """Scores the steps of a chunk one by one."""

    def evaluate_actions(self, observations, actions):
        distribution = self.distribution(observations)
        terms = distribution.log_prob(actions), distribution.entropy()
        return tuple(term.unflatten(-1, (-1, DIMS)).sum(-1) for term in terms)

    def sample(self, observations, noise):
        return super().sample(observations, noise)[0]


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
        told = torch.cat([prefix, t[:, None]], -1)[:, None].expand(-1, steps, -1)
        return self.head(torch.cat([x, told], -1))


class Mute(Plain):
    """Always does the same."""

    def forward(self, observations):
        return self.distribution(observations).mean


class Valueless(nn.Module):
    def forward(self, observations): ...


class HalfAFlow(nn.Module):
    def encode(self, observations): ...


class NotAModule:
    pass


class WholeConfig(Samples):
    """Takes its settings as one dict."""

    def __init__(self, model_config):
        super().__init__(**model_config)


class Fussy(Samples):
    def __init__(self, action_dim: int):
        raise ValueError("no")


class OddValue(Samples):
    def get_value(self, observations):
        return torch.zeros(len(observations), 2)


class OddScore(Samples):
    def evaluate_actions(self, observations, actions):
        return torch.zeros(len(observations))


class OddActions(Samples):
    def forward(self, observations):
        return torch.zeros(len(observations), 2 * DIMS)


class Tied(Samples):
    """Two names for one tensor."""

    def __init__(self, action_dim: int = DIMS, proprio_dim: int = STATE):
        super().__init__(action_dim, proprio_dim)
        self.readout = nn.Linear(16, 256, bias=False)
        self.readout.weight = self.words.weight


def config(model: str = "Samples", **settings) -> VLAConfig:
    keys = {"model_class": f"doubles_vla:{model}", "critic_parts": ("value_head",)}
    if model == "Flows":
        keys["critic_parts"] = ()
    return VLAConfig(**(keys | settings))
