"""Policies for the parity gate: correct ones, and mutants with one known error each.

Used by parity.py and by the tests. Letters: B decisions, C executed steps of a chunk, S scored denoising steps.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.algorithms.scoring import Decisions, Parity
from sparring.collect.collector import Collector
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.backend import Step
from sparring.envs.env import Env
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig, FlowConfig
from sparring.policies.flow.policy import FlowPolicy

METHODS = {
    "flow_sde": {"method": "flow_sde"},
    "one_step": {"method": "flow_sde_one_step"},
    "flow_noise": {"method": "flow_noise"},
    "mdp_sde": {"method": "denoising_mdp", "denoising_steps": 2},
    "mdp_noise": {"method": "denoising_mdp", "kernel": "noise"},
    "fpo": {"method": "fpo"},
}
DIMS, STATE, POINTS, REPLAY = 3, 5, 12, 256
# tiny networks
SMALL = {"channels": (8, 8), "image_features": 16, "point_channels": (16,), "point_features": 16}


class RandomEnv:
    """An env with random observations; episodes of 7 steps end within a chunk. `padding` action dims have no effect."""

    def __init__(self, num_envs: int, padding: int = 0, images: bool = False, points: bool = False, choices: int = 0):
        self.num_envs = num_envs
        observation = {"state": ((STATE,), "float32")}
        observation |= {"image/head": ((3, 36, 36), "uint8")} if images else {}
        observation |= {"points": ((POINTS, 6), "float32")} if points else {}
        dims = 1 if choices else DIMS + padding
        self.spec = EnvSpec(observation, dims, choices, action_padding=padding, max_episode_steps=7)

    def reset(self, seeds):
        self.rng = np.random.default_rng(seeds(0, 0))
        self.count = np.zeros(self.num_envs, int)
        return self._observe()

    def step(self, action):
        n, c = action.shape[:2]
        executed = np.minimum(c, 7 - self.count)
        self.count += executed
        done = self.count == 7
        self.count[done] = 0
        reward = np.where(np.arange(c) < executed[:, None], self.rng.random((n, c)), 0).astype(np.float32)
        ended, seen = np.flatnonzero(done), self._observe()
        final = {name: value[ended] for name, value in seen.items()}
        return Step(seen, reward, executed, done & False, done, done & False, ended, final)

    def record(self, envs): ...

    def close(self): ...

    def _observe(self):
        seen = {"state": self.rng.standard_normal((self.num_envs, STATE)).astype(np.float32)}
        if "image/head" in self.spec.observation:
            seen["image/head"] = self.rng.integers(0, 256, (self.num_envs, 3, 36, 36), np.uint8)
        if "points" in self.spec.observation:
            seen["points"] = self.rng.standard_normal((self.num_envs, POINTS, 6)).astype(np.float32)
        return seen


def make_policy(policy_class=FlowPolicy, chunk=4, spec=None, **config):
    torch.manual_seed(0)
    spec = spec or RandomEnv(1).spec
    if issubclass(policy_class, FlowPolicy):
        policy = policy_class(FlowConfig(width=32, heads=2, **SMALL, **config), spec, chunk)
    else:
        policy = policy_class(ActorCriticConfig(**SMALL, **config), spec, chunk)
        nn.init.normal_(policy.head.linear.weight, std=0.3)
    # initial weights are zero, so the velocity is zero and errors have no effect
    for name, parameter in policy.named_parameters():
        if parameter.abs().max() == 0 and not name.startswith("critic"):
            nn.init.normal_(parameter, std=0.1)
    dims = getattr(policy, "action_dim", DIMS)
    actions = {"mean": np.full(dims, 0.1), "std": np.full(dims, 0.5)}
    state = {"mean": np.zeros(STATE), "std": np.full(STATE, 2.0)}
    policy.fit_normalizers({"action": actions, "observation/state": state}, "mean_std", "mean_std")
    return policy.eval()


def rollout_of(policy_class=FlowPolicy, num_envs=16, chunk=4, device="cpu", seen=None, **config):
    """(policy, buffer of at least REPLAY decisions); `seen`: observations besides the state, see RandomEnv."""
    env = Env(RandomEnv(num_envs, **(seen or {})), device)
    policy = make_policy(policy_class, chunk, env.spec, **config).to(device)
    buffer = RolloutBuffer(-(-REPLAY // num_envs))
    Collector(env, policy, seed=0, chunk=chunk).collect(buffer)
    return policy, buffer


def gate(policy, buffer) -> Parity:
    """The parity of REPLAY decisions, scored in one batch."""
    return PPO(PPOConfig(), policy).scorer.parity(Decisions(buffer.get()[:REPLAY]))


# ---- mutants


class RedrawsNoise(FlowPolicy):
    """Denoises again at the update, from new noise, and scores the result: the most common error."""

    def evaluate(self, td):
        _, about = self.encode(td)
        noise = torch.rand(len(td), self.noise_size, device=about.device).clamp(1e-6, 1 - 1e-6)
        _, trace = self._sample(self.denoise, about.detach(), noise)
        td = td.clone()
        for key in self.trace_keys:
            td[key] = trace[key[1]].detach()
        return super().evaluate(td)


class ShiftsTheGrid(FlowPolicy):
    """Scores at the middles of the denoising steps."""

    def evaluate(self, td):
        times, td = self.times.clone(), td.clone()
        self.times -= 0.5 * self.step_size
        if self.is_fpo:
            td["trace", "times"] -= 0.5 * self.step_size
        scored = super().evaluate(td)
        self.times.copy_(times)
        return scored


class DropsOut(FlowPolicy):
    """Scores in training mode."""

    def evaluate(self, td):
        self.train()
        return super().evaluate(td)


class ChangesItsNormalizer(FlowPolicy):
    """Scores with a normaliser that was updated since acting."""

    def evaluate(self, td):
        self.encoder.normalizer.shift += 0.01
        return super().evaluate(td)


class ScoresClamped(FlowPolicy):
    """Scores the clipped action, as an env clips it."""

    def evaluate(self, td):
        td = td.clone()
        td["trace", "states"][:, -1].clamp_(-0.5, 0.5)
        return super().evaluate(td)


class CountsPadding(FlowPolicy):
    """Denoises the padding, as VLAs do; excludes it from the log-probability when acting, includes it when scoring."""

    def __init__(self, config: FlowConfig, spec, chunk: int):
        super().__init__(config, replace(spec, action_padding=0), chunk)
        self.counted = spec.action_dim - spec.action_padding

    def evaluate(self, td):
        real, self.counted = self.counted, self.action_dim
        scored = super().evaluate(td)
        self.counted = real
        for name in ("mean", "std") if "trace" in scored else ():
            scored["trace", name] = scored["trace", name][..., :real]
        return scored

    def _executable(self, x):
        # [B, C, S, A with padding] -> [B, C, S, counted]
        return super()._executable(x)[..., : self.counted]


class CountsUnexecutedSteps(FlowPolicy):
    """Sums over all steps of a chunk, even if the episode ended within it."""

    def evaluate(self, td):
        td = td.clone()
        td["next", "executed"][:] = self.chunk
        return super().evaluate(td)


MUTANTS = {
    "noise re-drawn": RedrawsNoise,
    "time grid shifted": ShiftsTheGrid,
    "dropout on": DropsOut,
    "normaliser changed": ChangesItsNormalizer,
    "padding counted": CountsPadding,
    "clamped action scored": ScoresClamped,
    "unexecuted steps counted": CountsUnexecutedSteps,
}
HEADS = {
    "gaussian": (ActorCritic, {"distribution": "gaussian"}),
    "squashed": (ActorCritic, {"distribution": "squashed"}),
    "gsde": (ActorCritic, {"distribution": "gsde"}),
    "tokens": (ActorCritic, {"distribution": "tokens"}),
    "discrete": (ActorCritic, {"distribution": "discrete"}),
} | {name: (FlowPolicy, config) for name, config in METHODS.items()}
