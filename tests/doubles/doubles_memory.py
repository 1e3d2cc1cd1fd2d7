"""A policy whose memory can be computed by hand, and an env that needs a memory."""

import numpy as np
import torch
from doubles import LinearPolicy

from sparring.contract import POLICY_MEMORY, EnvSpec
from sparring.envs.backend import Step

DECISIONS = 4


class CountingPolicy(LinearPolicy):
    """Memory: decisions of the episode, and the sum of their steps; each decision adds 0.5 to the value."""

    in_keys = [("observation", "state"), POLICY_MEMORY]
    memory_size = 2

    def remember(self, td):
        step = td["observation", "state"][:, 2]
        return td[POLICY_MEMORY] + torch.stack([torch.ones_like(step), step], 1)

    def _value(self, td):
        return super()._value(td) + 0.5 * td[POLICY_MEMORY][:, 0]


class CueBackend:
    """The state is a cue of -1 or 1 at first, then 0. The reward of later decisions is 1 - |action - cue|.

    A policy without memory has an expected reward of at most 0.
    """

    def __init__(self, num_envs: int):
        self.num_envs = num_envs
        self.spec = EnvSpec({"state": ((1,), "float32")}, action_dim=1, max_episode_steps=DECISIONS)

    def reset(self, seeds):
        self.rng = np.random.default_rng(seeds(0, 0))
        self.count = 0
        return self._begin()

    def step(self, action):
        reward = 1 - np.abs(action[:, :, 0] - self.cue) if self.count else np.zeros((self.num_envs, 1))
        self.count += 1
        done = np.full(self.num_envs, self.count == DECISIONS)
        none, ended = np.zeros(self.num_envs, bool), np.flatnonzero(done)
        final = {"state": np.zeros((len(ended), 1), np.float32)}
        seen = self._begin() if done.all() else {"state": np.zeros((self.num_envs, 1), np.float32)}
        executed = np.ones(self.num_envs, np.int64)
        return Step(seen, reward.astype(np.float32), executed, done, none, none, ended, final)

    def record(self, envs): ...

    def render(self, env): ...

    def state(self):
        return None

    def close(self): ...

    def _begin(self):
        self.count = 0
        # [N, 1]
        self.cue = self.rng.choice([-1.0, 1.0], (self.num_envs, 1))
        return {"state": self.cue.astype(np.float32)}
