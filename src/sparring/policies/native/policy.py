"""The native VLA as a Policy."""

import math
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn
from torch.nn import functional as F

from sparring.contract import POLICY_MEMORY
from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.actor_critic import EncodedPolicy
from sparring.policies.configs import DenoisingConfig
from sparring.policies.critic import Critic
from sparring.policies.encoders import STATE
from sparring.policies.flow.chain import FlowChain
from sparring.policies.lora import adapt
from sparring.policies.native.checkpoint import TOKENIZER, Saved, is_own, load_into, read_model
from sparring.policies.native.config import NativeVLAConfig, Sizes, sizes_of, sizes_of_checkpoint
from sparring.policies.native.hopper.graphs import Fast
from sparring.policies.native.model import Inputs, NativeModel, Prefix
from sparring.policies.native.text import BYTES, Tokenizer, make_tokenizer, token_table
from sparring.policies.pi0.checkpoint import ImagePreparation
from sparring.policies.policy import Traces

# ---- From what an env shows to what the network reads.


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


# ---- The native VLA as a policy.


class NativeVLA(FlowChain, EncodedPolicy):
    """The network is `model`; the critic reads what became of images and words, and the memory, and shapes neither."""

    def __init__(self, config: NativeVLAConfig, spec, chunk: int):
        saved = None if config.model_path is None else read_model(config.model_path)
        sizes = sizes_of(config) if saved is None else sizes_of_checkpoint(config, saved.sizes)
        config = _completed(config, saved)
        super().__init__(config, spec, chunk, sizes.width, config.normalize_actions)
        check_actions(config, sizes, self.action_dim)
        self.encoder = Observations(config, spec, sizes, make_tokenizer(*_tokenizer(config)))
        self.model = NativeModel(sizes)
        if saved is not None:
            load_into(self.model, saved.weights, config.model_path)
        adapt(self.model, config, frozen=config.frozen)
        # no loss reads them: weight decay alone would move them, and the features that the critic is told with them
        unread = _unread(sizes.layers - 1, bool(self.encoder.cameras), self.kernel.learns_noise)
        for name, weight in self.model.named_parameters():
            if name.startswith(unread):
                weight.requires_grad_(False)
        if config.precision == "bf16":
            _store_frozen_in_bf16(self.model)
        self.memory_size = sizes.memory_size
        self.critic = Critic(config, spec, sizes.width + self.memory_size, config.normalize_observations)
        self.in_keys = [*self.encoder.in_keys, *self.critic.in_keys, *self.trace_keys]
        # graphs of acting, those of the decision that is being made, and whether the weights learned since
        self._fast: Fast | None = None
        self._acting: Fast | None = None
        self._learned = False

    def act(self, td: TensorDict) -> TensorDict:
        fast = self._graphs(td)
        if fast is None:
            return super().act(td)
        if td.get("noise", None) is None:
            return td.set("action", self._emitted(fast.sample(self.encoder(td), self._start(td))))
        self._acting = fast
        try:
            return super().act(td)
        finally:
            self._acting = None

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        inputs = self.encoder(td)
        if self._acting is not None:
            prefix = self._acting.prefix(inputs)
        else:
            # what follows a gradient may be an update
            self._learned |= torch.is_grad_enabled()
            with self._precision():
                prefix = self.model.prefix(inputs)
        return prefix.features, TensorDict(prefix._asdict(), td.batch_size, device=prefix.mask.device)

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: TensorDict) -> torch.Tensor:
        if self._acting is not None:
            return self._acting.velocity(x, t)
        with self._precision():
            return self.model.velocity(x, t, _cache(prefix))

    def judge(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        told = features.detach()
        return self.critic(torch.cat([told, self.encoder.memory(td)], -1) if self.memory_size else told, td)

    def noise_condition(self, prefix: TensorDict) -> torch.Tensor:
        return prefix["features"]

    def remember(self, td: TensorDict) -> torch.Tensor:
        return self.encoder.remember(td)

    def value(self, td: TensorDict) -> torch.Tensor:
        # the critic does not shape the network
        with torch.no_grad(), self._precision():
            features = self.model.features(self.encoder(td))
        return self.judge(features, td)

    def fit_normalizers(self, statistics, state: str, action: str) -> None:
        self._fit(statistics, self.actions, state, action)

    def _graphs(self, td: TensorDict) -> Fast | None:
        """What acts fast, where it may and can: with the weights of now, and for a number of robots it knows."""
        device, half = self.encoder.tokens.device, self.config.precision == "bf16"
        wanted = half and device.type == "cuda" if self.config.fast is None else self.config.fast
        if self.training or not wanted:
            return None
        if device.type != "cuda":
            raise UserError(f"policy.fast=true needs a GPU, but the policy is on {device}; leave it out")
        if self._fast is None or not self._fast.fits():
            # a step's tokens: a chunk's, state and memory
            room = self.horizon + 2
            self._fast, self._learned = Fast(self.model, self.grid.steps, half, kernels=half, room=room), False
        if not self._fast.admits(len(td)):
            return None
        self._fast.refresh(self._learned)
        self._learned = False
        return self._fast

    def _start(self, td: TensorDict) -> torch.Tensor:
        """The noise [B, H, A] that a greedy decision starts from."""
        start = td.get("start", None)
        if start is None:
            start = torch.full((len(td), self.start_size), 0.5, device=self.encoder.tokens.device)
        return torch.special.ndtri(start).view(-1, self.horizon, self.action_dim)


def _completed(config: NativeVLAConfig, saved: Saved | None) -> NativeVLAConfig:
    """With the checkpoint's numbers where none are given, and the usual ones where it has none either."""
    horizon, steps = (None, None) if saved is None else (saved.horizon, saved.sampling_steps)
    usual = DenoisingConfig.model_fields["sampling_steps"].default
    plan = {"horizon": config.horizon or horizon, "sampling_steps": config.sampling_steps or steps or usual}
    return config.model_copy(update=plan)


def _cache(prefix: TensorDict) -> Prefix:
    return Prefix(*(prefix[name] for name in Prefix._fields))


def _unread(last: int, sees: bool, features_learn: bool) -> tuple[str, ...]:
    """Parts that no action depends on: of the trunk's last layer only keys and values are read, beside the features."""
    parts = () if sees else ("vision.", "projector.")
    if features_learn:
        return parts
    return (*parts, "trunk_norm.", *(f"trunk.{last}.{part}." for part in ("out", "mlp_norm", "gate_up", "down")))


def _tokenizer(config: NativeVLAConfig) -> tuple[str | None, str | None]:
    """A checkpoint of ours without a tokenizer of its own reads bytes."""
    if config.tokenizer is None and config.model_path is not None and is_own(config.model_path):
        has_one = (Path(config.model_path).expanduser() / TOKENIZER).is_file()
        return (None if has_one else BYTES), config.model_path
    return config.tokenizer, config.model_path


def _store_frozen_in_bf16(model: nn.Module) -> None:
    """They are computed with in it anyway; what learns needs finer steps."""
    for weight in model.parameters():
        weight.data = weight.data.to(torch.float32 if weight.requires_grad else torch.bfloat16)
