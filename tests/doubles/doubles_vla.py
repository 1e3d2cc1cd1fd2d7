"""Small VLA models, correct and faulty ones."""

import torch
from parity_cases import DIMS, STATE
from torch import nn
from vla_cases import INSTRUCTIONS, Flows, Plain, RandomCameraEnv, Samples  # noqa: F401 (tests name them by this module)

from sparring.policies.configs import VLAConfig


class TakesDeterministic(Plain):
    """Takes `deterministic`: the mean instead of a sample."""

    def forward(self, observations, deterministic=False):
        distribution = self.distribution(observations)
        return distribution.mean if deterministic else distribution.sample()


class OneCamera(Samples):
    """Reads one camera of 32 pixels."""

    def __init__(self, action_dim: int, proprio_dim: int):
        super().__init__(action_dim, proprio_dim)
        self.vision = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 16))


class Sized(Samples):
    """Has an attribute `action_dim`."""

    def __init__(self, action_dim: int):
        super().__init__(action_dim)
        self.action_dim = action_dim


class UnusedLayer(Samples):
    """Has a layer that no output depends on."""

    def __init__(self, action_dim: int = DIMS, proprio_dim: int = STATE):
        super().__init__(action_dim, proprio_dim)
        self.spare = nn.Linear(16, 16)


class SamplesWider(Samples):
    """Samples from a wider normal than it scores with."""

    def sample(self, observations, noise):
        mean, std = self.distribution(observations).mean, 1.1 * self.log_std.exp()
        actions = mean + std * torch.special.ndtri(noise)
        return actions, torch.distributions.Normal(mean, std).log_prob(actions).sum(-1)


class DropsOut(Samples):
    """Applies dropout in evaluate_actions, although the model is in eval mode."""

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


class AlwaysMean(Plain):
    """Its actions are deterministic."""

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


class ConfigAndMore(Samples):
    """Takes some settings as one dict, and others as arguments."""

    def __init__(self, config, action_dim: int):
        super().__init__(action_dim, **config)


class RaisesInInit(Samples):
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
