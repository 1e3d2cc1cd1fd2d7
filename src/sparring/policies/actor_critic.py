"""The plain policy: an encoder, an actor and a critic."""

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.encoders import ObservationEncoder, mlp
from sparring.policies.heads import DiscreteHead, GaussianHead, Score, SquashedGaussianHead, StateDependentHead
from sparring.policies.policy import Policy, executed_mask


class ActorCritic(Policy):
    """Actor and critic share the encoder (normaliser, CNN) and nothing else."""

    def __init__(self, config: ActorCriticConfig, spec, chunk: int):
        super().__init__()
        self.config, self.chunk = config, chunk
        self.encoder = ObservationEncoder(config, spec)
        self.in_keys = self.encoder.in_keys
        self.actor = mlp(self.encoder.size, config.hidden, config.activation)
        self.critic = mlp(self.encoder.size, config.hidden, config.activation)
        width = config.hidden[-1] if config.hidden else self.encoder.size
        self.critic_output = nn.Linear(width, 1)
        nn.init.orthogonal_(self.critic_output.weight, 1.0)
        nn.init.zeros_(self.critic_output.bias)
        self.head = _head(config, spec, width, chunk)
        self.noise_size = self.head.noise_size
        if isinstance(self.head, StateDependentHead):
            self.noise_hold = config.sde_sample_freq

    def act(self, td: TensorDict) -> TensorDict:
        features = self.encoder(td)
        action, score = self.head.act(self.actor(features), td.get("noise", None))
        td.set("action", action)
        td.set("log_prob", score.log_prob.sum(-1))
        td.set("value", self._value(features))
        # std is a function of the weights alone: not worth storing
        trace = {"log_prob": score.log_prob, "mean": score.mean, "z2": score.z2, "dims": score.dims}
        return td.set("trace", TensorDict(trace, td.batch_size))

    def evaluate(self, td: TensorDict) -> TensorDict:
        features = self.encoder(td)
        score = self.head.score(self.actor(features), td["action"])
        mask = executed_mask(td, self.chunk) if self.chunk > 1 else None
        return TensorDict(
            {
                "log_prob": _executed_sum(score.log_prob, mask),
                "entropy": _executed_sum(score.entropy, mask),
                "value": self._value(features),
                "trace": _trace(score, td.batch_size),
            },
            td.batch_size,
        )

    def value(self, td: TensorDict) -> torch.Tensor:
        return self._value(self.encoder(td))

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        if self.encoder.normalizer is not None:
            self.encoder.normalizer.update(td["observation", "state"], sum_over_processes)

    def critic_parameters(self) -> list[nn.Parameter]:
        return [*self.critic.parameters(), *self.critic_output.parameters()]

    def _value(self, features):
        return self.critic_output(self.critic(features))[..., 0]


def _head(config, spec, width, chunk):
    kind = config.distribution
    if kind == "auto":
        kind = "discrete" if spec.discrete_actions else "gaussian"
    if (kind == "discrete") != bool(spec.discrete_actions):
        takes = f"one of {spec.discrete_actions} choices" if spec.discrete_actions else "continuous actions"
        raise UserError(f"policy.distribution={kind}, but the env takes {takes}; set policy.distribution=auto")
    if kind == "discrete":
        return DiscreteHead(width, chunk, spec.discrete_actions)
    head_class = {"gaussian": GaussianHead, "squashed": SquashedGaussianHead, "gsde": StateDependentHead}[kind]
    return head_class(width, chunk, spec.action_dim, config.init_std)


def _executed_sum(per_position: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    # [B, C] -> [B]
    return per_position.sum(-1) if mask is None else (per_position * mask).sum(-1)


def _trace(score: Score, batch_size) -> TensorDict:
    std = score.std.expand_as(score.mean)
    return TensorDict({"mean": score.mean, "std": std, "z2": score.z2, "dims": score.dims}, batch_size)
