"""Helpers for tests of pi0: an env with cameras and instructions, policies of the tiny checkpoint, rollouts."""

import copy

import numpy as np
import torch
from parity_cases import RandomEnv
from tensordict import TensorDict

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.collect.collector import Collector
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.policies.configs import PI0PolicyConfig
from sparring.policies.pi0 import PI0Policy

INSTRUCTIONS = ("push the block", "lift it", "stack the red block onto the green one")
LORA = {"lora_r": 2, "lora_alpha": 4, "lora_dropout": 0.5}


class Cameras(RandomEnv):
    """The env of the parity cases with two cameras and instructions."""

    def __init__(self, num_envs: int, padding: int = 0):
        super().__init__(num_envs, padding=padding)
        shown = self.spec.observation | {f"image/{name}": ((3, 20, 24), "uint8") for name in ("head", "wrist")}
        shown["task"] = ((), "int64")
        self.spec = EnvSpec(
            shown,
            self.spec.action_dim,
            action_padding=padding,
            instructions=INSTRUCTIONS,
            task_names=("push", "lift", "stack"),
            max_episode_steps=7,
        )

    def _observe(self):
        seen, n = super()._observe(), self.num_envs
        images = {f"image/{name}": self.rng.integers(0, 256, (n, 3, 20, 24), np.uint8) for name in ("head", "wrist")}
        return seen | images | {"task": self.rng.integers(0, 3, n)}


def make(checkpoint, spec=None, chunk=3, stir=True, **settings):
    torch.manual_seed(0)
    policy = PI0Policy(PI0PolicyConfig(model_path=str(checkpoint), **settings), spec or Cameras(1).spec, chunk).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in policy.named_parameters() if stir else ():
            # adapters and noise nets start at zero and would have no effect
            if parameter.abs().max() == 0 and not name.startswith("critic"):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def seen(batch=5, spec=None, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (spec or Cameras(1).spec).observation
    made = {
        name: rng.integers(0, 3 if name == "task" else 256, (batch, *shape)).astype(kind)
        if kind != "float32"
        else rng.standard_normal((batch, *shape)).astype(kind)
        for name, (shape, kind) in shapes.items()
    }
    td = TensorDict({}, [batch])
    for name, value in made.items():
        td["observation", *name.split("/")] = torch.from_numpy(value)
    return td


def rollout(policy, num_envs=4, decisions=32, padding=0):
    env, buffer = Env(Cameras(num_envs, padding), "cpu"), RolloutBuffer(decisions // num_envs)
    Collector(env, policy, seed=0, chunk=policy.chunk).collect(buffer)
    return buffer


def update(policy, **ppo):
    """One PPO update: the names of the tensors that it changed, and its metrics."""
    algorithm = PPO(PPOConfig(mini_batch_size=16, ppo_epochs=1, policy_lr=1e-2, critic_lr=1e-2, **ppo), policy)
    before = copy.deepcopy(policy.state_dict())
    metrics = algorithm.update(rollout(policy).rollout(), 0.0)
    after = policy.state_dict()
    return {key for key in after if not torch.equal(after[key], before[key])}, metrics
