"""From what an env shows to what the network reads."""

import math
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F

from sparring.contract import POLICY_MEMORY
from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.encoders import STATE
from sparring.policies.memory import Traces
from sparring.policies.native.checkpoint import is_own
from sparring.policies.native.model import Inputs
from sparring.policies.native.presets import Sizes
from sparring.policies.native.text import Tokenizer, token_table
from sparring.policies.native_configs import NativeVLAConfig
from sparring.policies.pi0.images import ImagePreparation

_TASK = ("observation", "task")
# the memory keeps the colours of each picture on a grid of so many fields a side
_GRID = 4


class Observations(nn.Module):
    """Images in the network's size and range, the instruction's tokens, the normalised state, and a memory.

    An env may show none of them: there is always a text, if an empty one, and a state, if of zeros.
    """

    def __init__(self, config: NativeVLAConfig, spec, sizes: Sizes, tokenizer: Tokenizer):
        super().__init__()
        shown = spec.observation
        self.cameras = [("observation", *name.split("/")) for name in shown if name.startswith("image/")]
        self.image_size, self.memory_size = sizes.image_size, sizes.memory_size
        # a pi0 has learned from images that its own processor prepared
        folder = None if config.model_path is None or is_own(config.model_path) else Path(config.model_path)
        self.prepare = None if folder is None else ImagePreparation(folder.expanduser(), sizes.image_size)
        self.has_task = "task" in shown
        state_size = math.prod(shown["state"][0]) if "state" in shown else 0
        if state_size > sizes.max_state_dim:
            raise UserError(
                f"the env's state has {state_size} numbers, but the network reads policy.max_state_dim="
                f"{sizes.max_state_dim}; " + _raise_it(config, "max_state_dim", state_size)
            )
        self.has_state = state_size > 0
        self.normalizer = RunningNormalizer(state_size) if state_size and config.normalize_observations else None
        # they follow from the env, not from a checkpoint
        tokens, text = token_table(spec.instructions, tokenizer, config.text_tokens, sizes.vocabulary)
        self.register_buffer("tokens", tokens, persistent=False)
        self.register_buffer("text", text, persistent=False)
        self.in_keys = [*self.cameras]
        self.in_keys += [STATE] if self.has_state else []
        self.in_keys += [_TASK] if self.has_task else []
        self.in_keys += [POLICY_MEMORY] if self.memory_size else []
        glimpsed = state_size + 3 * _GRID**2 * len(self.cameras)
        self.traces = Traces(glimpsed, self.memory_size) if self.memory_size else None

    def forward(self, td: TensorDict) -> Inputs:
        batch, device = len(td), self.tokens.device
        task = td[_TASK] if self.has_task else torch.zeros(batch, dtype=torch.int64, device=device)
        state = self._state(td) if self.has_state else torch.zeros(batch, 1, device=device)
        images = [(self.prepare or self._scaled)(td[camera]) for camera in self.cameras]
        # [B, N, 3, S, S]
        images = torch.stack(images, 1) if images else torch.zeros(batch, 0, 3, 1, 1, device=device)
        return Inputs(images, self.tokens[task], self.text[task], state, self.memory(td))

    def memory(self, td: TensorDict) -> torch.Tensor | None:
        """As it entered the decisions [B, M]; where nobody carries one, as at the first of an episode."""
        if not self.memory_size:
            return None
        memory = td.get(POLICY_MEMORY, None)
        return self.tokens.new_zeros(len(td), self.memory_size, dtype=torch.float32) if memory is None else memory

    def remember(self, td: TensorDict) -> torch.Tensor:
        """As it enters the next ones [B, M]."""
        seen = [self._state(td)] if self.has_state else []
        # [B, 3, h, w] -> [B, 3 * G * G] in [-1, 1]
        seen += [F.adaptive_avg_pool2d(td[camera].float(), _GRID).flatten(1) / 127.5 - 1.0 for camera in self.cameras]
        memory = self.memory(td)
        return self.traces(memory, torch.cat([memory[:, :0], *seen], 1))

    def update_normalizer(self, td: TensorDict, sum_over_processes) -> None:
        if self.normalizer is not None:
            self.normalizer.update(td[STATE], sum_over_processes)

    def _state(self, td: TensorDict) -> torch.Tensor:
        return td[STATE] if self.normalizer is None else self.normalizer(td[STATE])

    def _scaled(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 [B, 3, h, w] -> [B, 3, S, S] in [-1, 1]
        images, size = images.float(), (self.image_size, self.image_size)
        if images.shape[2:] != size:
            smaller = min(images.shape[2:]) > self.image_size
            images = F.interpolate(images, size, mode="bilinear", align_corners=False, antialias=smaller)
        return images / 127.5 - 1.0


def check_actions(config: NativeVLAConfig, sizes: Sizes, action_dim: int) -> None:
    if action_dim > sizes.max_action_dim:
        raise UserError(
            f"the env's actions have {action_dim} numbers, but the network gives policy.max_action_dim="
            f"{sizes.max_action_dim}; " + _raise_it(config, "max_action_dim", action_dim)
        )


def _raise_it(config: NativeVLAConfig, name: str, size: int) -> str:
    if config.model_path is None:
        return f"set policy.{name}={size}"
    return f"the weights in policy.model_path={config.model_path} are made for no more, take others or an env with less"
