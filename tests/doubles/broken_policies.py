"""A healthy policy, and the same one with one fault each, for `sparring check`."""

import torch
from torch import nn

from sparring.contract import POLICY_MEMORY, EnvSpec
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig


class Healthy(ActorCritic):
    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__(config, spec, chunk)


class Remembers(Healthy):
    """Its value depends on the number of decisions in the episode."""

    memory_size = 1

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__(config, spec, chunk)
        self.in_keys = [*self.in_keys, POLICY_MEMORY]
        self.weight = nn.Parameter(torch.tensor(0.1))

    def remember(self, td):
        return td[POLICY_MEMORY] + 1

    def value(self, td):
        return super().value(td) + self.weight * td[POLICY_MEMORY][:, 0]

    def evaluate(self, td):
        scored = super().evaluate(td)
        return scored.set("value", scored["value"] + self.weight * td[POLICY_MEMORY][:, 0])


class Confident(Healthy):
    """Takes one of its choices with a probability of 98 %."""

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__(config, spec, chunk)
        with torch.no_grad():
            [weight for name, weight in self.head.named_parameters() if name.endswith("bias")][-1][0] += 4


class RedrawsNoise(Healthy):
    """Renders new noise when it scores a decision."""

    def evaluate(self, td):
        scored = super().evaluate(td)
        noise = torch.randn_like(scored["trace", "mean"])
        scored["trace", "mean"] = scored["trace", "mean"] + noise
        return scored


class Exits(Healthy):
    def act(self, td):
        raise SystemExit(0)


class ForgetsLogProb(Healthy):
    def complete(self, td):
        return super().complete(td).exclude("log_prob")


class ForgetsTrace(Healthy):
    def complete(self, td):
        return super().complete(td).exclude(("trace", "z2"))


class NeverRandom(Healthy):
    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__(config, spec, chunk)
        self.noise_size = 0


class NotFinished(Healthy):
    def evaluate(self, td):
        raise NotImplementedError


class ActsWithNaN(Healthy):
    def act(self, td):
        td = super().act(td)
        return td.set("action", td["action"] * torch.nan)


class ActsInHalf(Healthy):
    def act(self, td):
        td = super().act(td)
        return td.set("action", td["action"].half())


class TooFewActions(Healthy):
    def act(self, td):
        td = super().act(td)
        return td.set("action", td["action"][..., :1])


class FarOut(Healthy):
    """Samples with a standard deviation of 20."""

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__(config, spec, chunk)
        nn.init.constant_(self.head.log_std, 3.0)


class CountsItsDecisions(Healthy):
    """Its actions depend on how often it has acted."""

    count = 0

    def act(self, td):
        self.count += 1
        td = super().act(td)
        return td.set("action", td["action"] + 0.01 * self.count)


class IgnoresItsNoise(Healthy):
    """Draws one noise for all decisions."""

    def act(self, td):
        if td.get("noise", None) is not None:
            td["noise"] = torch.full_like(td["noise"], 0.3)
        return super().act(td)


class ReadsTheBatch(Healthy):
    """Subtracts the mean of the batch from its action; scores are those of the action."""

    def act(self, td):
        td = super().act(td)
        return td.set("action", td["action"] - td["action"].mean(0))


class ValuesTheBatch(Healthy):
    """Its value depends on the batch, but its decisions do not."""

    def value(self, td):
        return super().value(td) + 0.1 * torch.arange(len(td))


class SpareLayer(Healthy):
    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__(config, spec, chunk)
        self.spare = nn.Linear(4, 4)


class Detaches(Healthy):
    def _encode(self, td):
        features, latent = super()._encode(td)
        return features, latent.detach()


class KeepsATensor(Healthy):
    """Its offset is no part of the saved state."""

    made = 0

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, chunk: int):
        super().__init__(config, spec, chunk)
        KeepsATensor.made += 1
        self.offset = [torch.tensor(0.1 * KeepsATensor.made)]

    def act(self, td):
        td = super().act(td)
        return td.set("action", td["action"] + self.offset[0])


class RefusesItsState(Healthy):
    def load_state_dict(self, state, *args, **kwargs):
        raise KeyError("head")


class VLA(nn.Module):
    """A normal distribution around a linear function of the proprioceptive state."""

    def __init__(self, action_dim: int, proprio_dim: int):
        super().__init__()
        self.mean, self.value_head = nn.Linear(proprio_dim, action_dim), nn.Linear(proprio_dim, 1)
        self.log_std = nn.Parameter(torch.full((action_dim,), -1.0))

    def forward(self, observations):
        return self.distribution(observations).sample()

    def get_value(self, observations):
        return self.value_head(observations["proprio"])

    def evaluate_actions(self, observations, actions):
        distribution = self.distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)

    def distribution(self, observations):
        return torch.distributions.Normal(self.mean(observations["proprio"]), self.log_std.exp())


class SparesALayer(VLA):
    def __init__(self, action_dim: int, proprio_dim: int):
        super().__init__(action_dim, proprio_dim)
        self.spare = nn.Linear(4, 4)


class HasNoScores(nn.Module):
    def forward(self, observations): ...

    def get_value(self, observations): ...


class FlowVLA(nn.Module):
    """The same with a flow head."""

    def __init__(self, action_dim: int, proprio_dim: int):
        super().__init__()
        self.trunk, self.head = nn.Linear(proprio_dim, 8), nn.Linear(8 + action_dim + 1, action_dim)

    def encode(self, observations):
        features = self.trunk(observations["proprio"]).tanh()
        return features, features

    def denoise(self, x, t, prefix):
        inputs = torch.cat([prefix, t[:, None]], -1)[:, None].expand(-1, x.shape[1], -1)
        return self.head(torch.cat([x, inputs], -1))
