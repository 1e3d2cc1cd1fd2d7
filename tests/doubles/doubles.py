"""Backends and policies whose numbers can be computed by hand."""

import numpy as np
import torch
from tensordict import TensorDict

from sparring.contract import EnvSpec
from sparring.envs.backend import EpisodeSeeds, Step
from sparring.envs.env import Env
from sparring.policies.policy import Policy


class CountingBackend:
    """Observation: (env, episode, step). Reward: 100 * env + step after the action. Episodes last `lengths[i]` steps.

    Even envs terminate, odd ones truncate.
    """

    def __init__(self, lengths=(3, 5)):
        self.lengths = np.array(lengths)
        self.num_envs = len(lengths)
        self.spec = EnvSpec({"state": ((3,), "float32")}, action_dim=1, max_episode_steps=int(self.lengths.max()))
        self.seen_actions = []

    def reset(self, seeds: EpisodeSeeds):
        self.seeds = seeds
        self.episode = np.zeros(self.num_envs, int)
        self.count = np.zeros(self.num_envs, int)
        return self._observe()

    def step(self, action):
        self.seen_actions.append(action.copy())
        n, c = action.shape[:2]
        reward, executed = np.zeros((n, c), np.float32), np.zeros(n, np.int64)
        for i in range(n):
            for k in range(min(c, self.lengths[i] - self.count[i])):
                self.count[i] += 1
                reward[i, k] = 100 * i + self.count[i]
                executed[i] += 1
        done = self.count == self.lengths
        even = np.arange(n) % 2 == 0
        ended = np.nonzero(done)[0]
        final = {name: value[ended] for name, value in self._observe().items()}
        self.episode[ended] += 1
        self.count[ended] = 0
        return Step(self._observe(), reward, executed, done & even, done & ~even, done & even, ended, final)

    def record(self, envs): ...

    def render(self, env):
        return None

    def state(self):
        return {"episode": self.episode.copy(), "count": self.count.copy()}

    def set_state(self, state):
        self.episode, self.count = state["episode"].copy(), state["count"].copy()

    def close(self): ...

    def _observe(self):
        columns = [np.arange(self.num_envs), self.episode, self.count]
        return {"state": np.stack(columns, 1).astype(np.float32)}


class LinearPolicy(Policy):
    """value = 1000 * env + 10 * episode + step, action = noise."""

    in_keys = [("observation", "state")]
    noise_size = 1

    def __init__(self, chunk: int = 1):
        super().__init__()
        self.chunk = chunk
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.value_inputs: list[torch.Tensor] = []

    def act(self, td):
        noise = td.get("noise", torch.zeros(*td.batch_size, 1))
        td["action"] = noise[:, None].expand(-1, self.chunk, 1).clone()
        td["value"] = self._value(td)
        td["log_prob"] = torch.zeros(td.batch_size)
        terms = -torch.arange(1.0, self.chunk + 1).expand(*td.batch_size, -1).clone()
        trace = {"log_prob": terms, "mean": terms.clone(), "z2": terms.clone(), "dims": terms.clone()}
        td["trace"] = TensorDict(trace, td.batch_size)
        return td

    def value(self, td):
        self.value_inputs.append(td["observation", "state"].clone())
        return self._value(td)

    def _value(self, td):
        return (td["observation", "state"] * torch.tensor([1000.0, 10.0, 1.0])).sum(-1) + self.bias


class IdentityBackend:
    """The simplest task: action = observation. Reward: 1 - |action - observation|, or 1 for the right choice."""

    def __init__(self, num_envs: int = 16, choices: int = 0):
        self.num_envs, self.choices = num_envs, choices
        size = choices or 1
        self.spec = EnvSpec({"state": ((size,), "float32")}, 1, choices, max_episode_steps=8)

    def reset(self, seeds):
        self.rng = np.random.default_rng(seeds(0, 0))
        self.count = 0
        return self._draw()

    def step(self, action):
        n, c = action.shape[:2]
        reward = np.stack([self._reward(action[:, k, 0]) for k in range(c)], 1).astype(np.float32)
        self.count += 1
        done = np.full(n, self.count == 8)
        self.count = 0 if done.all() else self.count
        seen = self._draw()
        ended = np.nonzero(done)[0]
        final = {name: value[ended] for name, value in seen.items()}
        executed = np.full(n, c, np.int64)
        return Step(seen, reward, executed, np.zeros(n, bool), done, done & False, ended, final)

    def record(self, envs): ...

    def render(self, env):
        return None

    def state(self):
        return None

    def set_state(self, state): ...

    def close(self): ...

    def _draw(self):
        if self.choices:
            self.target = self.rng.integers(self.choices, size=self.num_envs)
            return {"state": np.eye(self.choices, dtype=np.float32)[self.target]}
        self.target = self.rng.uniform(-0.8, 0.8, self.num_envs)
        return {"state": self.target[:, None].astype(np.float32)}

    def _reward(self, action):
        return action == self.target if self.choices else 1 - np.abs(action - self.target)


def counting_env(lengths=(3, 5)) -> Env:
    return Env(CountingBackend(lengths))
