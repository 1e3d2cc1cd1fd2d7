"""Policy: turns observations into action chunks, and can score them again."""

import torch
from tensordict import TensorDict
from torch import nn


class Policy(nn.Module):
    """What every policy offers. A class of your own takes (config, spec, chunk) and overrides act, evaluate, value.

    `act` and `evaluate` must agree: scoring what was just sampled, with the same weights, gives the same numbers
    (the parity gate refuses to train otherwise).
    """

    # observation entries that act and evaluate read, and that minibatches therefore gather
    in_keys: list[tuple[str, ...]]
    # uniform random numbers a decision takes
    noise_size: int = 0
    # decisions over which a robot's noise stays the same
    noise_hold: int = 1

    def act(self, td: TensorDict) -> TensorDict:
        """Adds action, log_prob, value and trace/* to `td [N]`. Without `noise` in it, acts greedily."""
        raise NotImplementedError

    def evaluate(self, td: TensorDict) -> TensorDict:
        """A *new* TensorDict [B] with log_prob, value, entropy and trace/{mean,std,z2,dims} of `td`'s actions."""
        raise NotImplementedError

    def value(self, td: TensorDict) -> torch.Tensor:
        """V of `td/observation`, [B]."""
        raise NotImplementedError

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        """Fold the observations of a rollout into running statistics. Called between two versions of the weights."""

    def critic_parameters(self) -> list[nn.Parameter]:
        """Those that learn with critic_lr."""
        return []

    def forward(self, td: TensorDict) -> TensorDict:
        """The update's forward: through here a wrapped (distributed) module synchronises its gradients."""
        return self.evaluate(td)


def executed_mask(td: TensorDict, chunk: int) -> torch.Tensor:
    """`[B, C]` float: 1 for the steps of the chunk that were executed; all of them where the td does not say."""
    executed = td.get(("next", "executed"), None)
    if executed is None:
        return torch.ones(*td.batch_size, chunk, device=td["action"].device)
    return (torch.arange(chunk, device=executed.device) < executed[..., None]).float()
