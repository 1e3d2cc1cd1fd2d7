"""Uniformly random actions: the baseline of every evaluation."""

import torch
from tensordict import TensorDict

from sparring.policies.policy import Policy


class RandomPolicy(Policy):
    in_keys = []

    def __init__(self, spec, chunk: int):
        super().__init__()
        self.spec, self.chunk = spec, chunk
        self.noise_size = chunk * spec.action_dim

    def act(self, td: TensorDict) -> TensorDict:
        uniform = td["noise"].unflatten(-1, (self.chunk, self.spec.action_dim))
        choices = self.spec.discrete_actions
        td.set("action", (uniform * choices).floor() if choices else 2 * uniform - 1)
        zero = torch.zeros(td.batch_size, device=uniform.device)
        return td.update({"log_prob": zero, "value": zero.clone()})
