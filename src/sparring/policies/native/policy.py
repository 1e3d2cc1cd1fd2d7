"""The native VLA as a policy."""

from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.policies.configs import DenoisingConfig
from sparring.policies.critic import Critic
from sparring.policies.encoded import EncodedPolicy
from sparring.policies.flow_chain import FlowChain
from sparring.policies.lora import adapt
from sparring.policies.native.checkpoint import TOKENIZER, Saved, is_own, load_into, read_model
from sparring.policies.native.fast import Fast
from sparring.policies.native.model import NativeModel, Prefix
from sparring.policies.native.observations import Observations, check_actions
from sparring.policies.native.presets import sizes_of, sizes_of_checkpoint
from sparring.policies.native.text import BYTES, make_tokenizer
from sparring.policies.native_configs import NativeVLAConfig


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
