"""Small native VLAs, and an env and inputs for them."""

import numpy as np
import torch
from parity_cases import DIMS, REPLAY, STATE, RandomEnv
from torch import nn

from sparring.collect.collector import Collector
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.policies.native.config import NativeVLAConfig, Sizes
from sparring.policies.native.model import Inputs, NativeModel
from sparring.policies.native.policy import NativeVLA

INSTRUCTIONS = ("lift the cube", "push it", "")
SMALL = {
    "image_size": 32,
    "patch_size": 16,
    "vision_width": 32,
    "vision_heads": 2,
    "vision_layers": 1,
    "vision_mlp": 40,
    "width": 48,
    "mlp": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "expert_width": 32,
    "expert_mlp": 40,
    "max_state_dim": 6,
    "max_action_dim": 8,
}
SIZES = Sizes(layers=2, vocabulary=300, **SMALL)


class Instructed(RandomEnv):
    """Two cameras with images that the model must resize, and one of three instructions for each robot."""

    def __init__(self, num_envs: int, padding: int = 0):
        super().__init__(num_envs, padding, images=True)
        observation = self.spec.observation | {"image/wrist": ((3, 36, 36), "uint8"), "task": ((), "int64")}
        self.spec = EnvSpec(
            observation,
            DIMS + padding,
            action_padding=padding,
            task_names=INSTRUCTIONS,
            instructions=INSTRUCTIONS,
            max_episode_steps=7,
        )

    def _observe(self):
        wrist = self.rng.integers(0, 256, (self.num_envs, 3, 36, 36), np.uint8)
        return {**super()._observe(), "image/wrist": wrist, "task": np.arange(self.num_envs) % 3}


def make_native(spec=None, chunk=4, **config) -> NativeVLA:
    torch.manual_seed(0)
    policy = NativeVLA(NativeVLAConfig(**SMALL | config), spec or Instructed(1).spec, chunk)
    shake(policy.model)
    actions = {"mean": np.full(policy.action_dim, 0.1), "std": np.full(policy.action_dim, 0.5)}
    state = {"mean": np.zeros(STATE), "std": np.full(STATE, 2.0)}
    policy.fit_normalizers({"action": actions, "observation/state": state}, "mean_std", "mean_std")
    return policy.eval()


def shake(model: nn.Module) -> None:
    """Replace zero weights, with which the velocity would be zero for all inputs."""
    for parameter in model.parameters():
        if parameter.abs().max() == 0:
            nn.init.normal_(parameter, std=0.2)


def make_model(**sizes) -> NativeModel:
    torch.manual_seed(0)
    model = NativeModel(Sizes(**{**vars(SIZES), **sizes})).eval()
    shake(model)
    return model


def make_inputs(batch=3, cameras=2, words=7, lengths=(7, 4, 1), memory=False) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(batch, cameras, 3, 32, 32, generator=generator) * 2 - 1
    tokens = torch.randint(0, 256, (batch, words), generator=generator)
    text = torch.arange(words) < torch.tensor(lengths)[:, None]
    state, remembered = (torch.randn(batch, size, generator=generator) for size in (5, 3))
    return Inputs(images, tokens, text, state, remembered if memory else None)


def rollout_of_native(num_envs=6, padding=0, chunk=4, **config):
    env = Env(Instructed(num_envs, padding))
    policy = make_native(env.spec, chunk, **config)
    buffer = RolloutBuffer(-(-REPLAY // num_envs))
    Collector(env, policy, seed=0, chunk=chunk).collect(buffer)
    return policy, buffer
