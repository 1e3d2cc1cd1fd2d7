"""Somebody's VLA as a Policy."""

import contextlib
import inspect
import traceback
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import Normalizer, fit_all
from sparring.policies.configs import CriticConfig, DenoisingConfig
from sparring.policies.encoders import weights_meant
from sparring.policies.lora import adapt
from sparring.policies.policy import Policy, executed_mask
from sparring.policies.vla import interface as parts
from sparring.policies.vla.config import VLAConfig
from sparring.policies.vla.drawing import Drawing
from sparring.policies.vla.interface import check_interface, denoises
from sparring.policies.vla.load import class_of, load_vla_model
from sparring.policies.vla.observations import STATE, Observations
from sparring.processes.memory_errors import shortage

# ---- What both kinds of VLA policies share: the model as their config wants it, and what goes with it.


# settings that only one kind of model reads
_OF_FLOW = (*DenoisingConfig.model_fields, *CriticConfig.model_fields)
_OF_DOCUMENTED = ("draws", "critic_parts")


def model_class(config: VLAConfig) -> type:
    cls = class_of(config.model_class)
    check_interface(cls)
    return cls


def wrapped_model(config: VLAConfig, spec, chunk: int, observations: Observations) -> tuple[nn.Module, list[str]]:
    """Loaded, with adapters, frozen, in its dtypes and places; and the names of what learns of `critic_parts`."""
    cls = model_class(config)
    flow = denoises(cls)
    _check_settings(config, flow)
    # a flow head is told how long a chunk is, and its actions are those of one step
    steps = 1 if flow else chunk
    _check_action_dim(config.action_dim, "policy.action_dim", spec, steps)
    model = load_vla_model(
        config.model_path,
        cls,
        config.model_settings,
        strict=config.strict,
        usual=_sizes(spec, steps, observations),
    )
    # by the model's own names, which adapters change
    critic = set(map(id, weights_meant(model, config.critic_parts, "policy.critic_parts")))
    adapt(model, config, frozen=config.frozen, critic_parts=config.critic_parts)
    parts.cast(model, config.dtype)
    parts.place(model, config.device_map)
    own = getattr(model, "action_dim", None)
    if isinstance(own, int):
        _check_action_dim(own, f"{cls.__name__}.action_dim", spec, steps)
    critic_names = [name for name, p in model.named_parameters() if id(p) in critic and p.requires_grad]
    return model.eval(), critic_names


@contextlib.contextmanager
def called(model: nn.Module, config: VLAConfig):
    """Around calls of the model, acting and scoring alike: its precision."""
    with contextlib.ExitStack() as around:
        if config.precision == "bf16":
            # parts may be on several devices
            for kind in {p.device.type for p in model.parameters()}:
                around.enter_context(torch.autocast(kind, torch.bfloat16))
        yield


# what a model that is not made for what it is shown may raise
_FAILURES = (RuntimeError, KeyError, TypeError, ValueError, IndexError, AttributeError)


@contextlib.contextmanager
def first_call(model: nn.Module, seen: TensorDict):
    """Around the first call of a model: if it fails, in words, with what it was shown."""
    try:
        yield
    except _FAILURES as error:
        if isinstance(error, UserError) or shortage(error) is not None:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        # the last one in the model's own file
        own = [frame for frame in frames if frame.filename == inspect.getfile(type(model))] or frames
        shown = ", ".join(f"{key} {list(value.shape)}" for key, value in seen.items())
        raise UserError(
            f"{type(model).__name__} failed when it was shown {shown}: {type(error).__name__}: {error} "
            f"({Path(own[-1].filename).name}, line {own[-1].lineno}); env.cameras, env.image_size, "
            "policy.observation_keys and policy.tokenizer change what it is shown (docs/vla.md, 'What it is told')"
        ) from error


def expected_actions(spec, chunk: int) -> int:
    return chunk * (spec.action_dim - spec.action_padding)


def mismatch(given: int | list[int], what: str, spec, chunk: int) -> UserError:
    """An action of the wrong size, in words."""
    expected, each = expected_actions(spec, chunk), spec.action_dim - spec.action_padding
    of = f"{chunk} steps (rollout.action_steps) of the env's {each} action entries"
    fix = f"make the model for it, e.g. policy.model_config.action_dim={expected}"
    number = given if isinstance(given, int) else given[-1] if given else 0
    if number and number % each == 0:
        fix += f", or set rollout.action_steps={number // each}"
    return UserError(f"{what}={given}, but a decision takes {expected} numbers: {of}; {fix}")


def _check_action_dim(given: int | None, what: str, spec, steps: int) -> None:
    if given is not None and given != expected_actions(spec, steps):
        raise mismatch(given, what, spec, steps)


def _sizes(spec, steps: int, observations: Observations) -> dict[str, int]:
    """What the env knows and constructors ask for."""
    sizes = {"action_dim": expected_actions(spec, steps), "proprio_dim": observations.size_of("proprio")}
    return {name: size for name, size in sizes.items() if size is not None}


def _check_settings(config: VLAConfig, flow: bool) -> None:
    for name in _OF_DOCUMENTED if flow else _OF_FLOW:
        value, default = getattr(config, name), VLAConfig.model_fields[name].default
        if value != default:
            why = "one with encode and denoise does not" if flow else "only one with encode and denoise does"
            raise UserError(f"policy.{name}={value}: not every model reads it, {why}; leave it out")
    if config.dtype == "bf16" and config.precision == "fp32":
        raise UserError(
            "policy.dtype=bf16 keeps frozen weights in bf16, to be computed with in bf16; set policy.precision=bf16 too"
        )


# ---- VLAPolicy: a model of anybody's, with the documented interface, as a Policy.
#
# Letters: B decisions, C steps of a chunk, A action entries of a step; the model's action_dim is C * A.


class VLAPolicy(Policy):
    """Acts by the model's `forward` or `sample`, scores by its `evaluate_actions`, judges by its `get_value`."""

    def __init__(self, config: VLAConfig, spec, chunk: int):
        super().__init__()
        if denoises(model_class(config)):
            raise UserError(f"policy.model_class '{config.model_class}' has a flow head; make_policy gives it a policy")
        self.config, self.spec, self.chunk, self.horizon = config, spec, chunk, chunk
        self.padding, self.each = spec.action_padding, spec.action_dim - spec.action_padding
        self.observations = Observations(config, spec)
        # names: an algorithm may let the critic's weights rest, and they are the critic's still
        self.model, self.critic_names = wrapped_model(config, spec, chunk, self.observations)
        self.actions = Normalizer(self.each) if config.normalize_actions else None
        self.drawing = Drawing(
            self.model, expected_actions(spec, chunk), config.draws == "rows", bool(spec.discrete_actions)
        )
        self.noise_size = self.drawing.noise_size
        self._is_tried = False
        self.in_keys = self.observations.in_keys

    # ---- Policy

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:
        return [("observation", STATE)] if self.observations.normalizer is not None else []

    def act(self, td: TensorDict) -> TensorDict:
        with called(self.model, self.config):
            seen, noise = self._seen(td), td.get("noise", None)
            if noise is None:
                return td.set("action", self._emitted(self.drawing.mode(self.model, seen), len(td)))
            actions, log_prob = self.drawing.draw(self.model, seen, noise)
            td.set("action", self._emitted(actions, len(td)))
            if log_prob is None:
                log_prob, _ = self._evaluated(seen, td["action"])
            td.set("value", self._judged(seen))
        return td.set("trace", self._trace(log_prob, td.batch_size))

    def complete(self, td: TensorDict) -> TensorDict:
        return TensorDict({"log_prob": self._executed_sum(td["trace", "log_prob"], td)}, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        with called(self.model, self.config):
            seen = self.observations(td)
            log_prob, entropy = self._evaluated(seen, td["action"])
            value = self._judged(seen)
        found = {
            "log_prob": self._executed_sum(self._by_position(log_prob, "log_prob"), td),
            "entropy": self._executed_sum(self._by_position(entropy, "entropy"), td).float(),
            "value": value,
        }
        if td.get("trace", None) is not None:
            found["trace"] = self._trace(log_prob, td.batch_size)
        return TensorDict(found, td.batch_size)

    def value(self, td: TensorDict) -> torch.Tensor:
        with called(self.model, self.config):
            return self._judged(self.observations(td))

    def imitation_loss(
        self, td: TensorDict, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        valid = td["valid"].float()
        with called(self.model, self.config):
            seen = self._seen(td)
            if hasattr(self.model, "imitation_loss"):
                loss = self.model.imitation_loss(seen, self._scored(td["action"]), td["valid"])
                return loss, {"imitation": loss.detach()}
            log_prob, _ = self._evaluated(seen, td["action"])
        # a score of whole chunks cannot leave steps out: only chunks within the episode count
        counted = valid if log_prob.shape == valid.shape else valid.amin(-1)
        loss = -(log_prob.view_as(counted) * counted).sum() / counted.sum().clamp_min(1)
        return loss, {"negative_log_prob": loss.detach()}

    def fit_normalizers(self, statistics: Mapping[str, Mapping[str, np.ndarray]], state: str, action: str) -> None:
        normalizers = (self.observations.normalizer, None, self.actions)
        fit_all(statistics, *(None if getattr(n, "fitted", False) else n for n in normalizers), state, action)

    def update_normalizers(self, td: TensorDict, sum_over_processes) -> None:
        if self.observations.normalizer is not None:
            self.observations.normalizer.update(td["observation", STATE], sum_over_processes)

    def critic_parameters(self) -> list[nn.Parameter]:
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.critic_names]

    def train(self, mode: bool = True) -> "VLAPolicy":
        super().train(mode)
        parts.rest(self.model)
        return self

    # ---- between the model's shapes and ours

    def _seen(self, td: TensorDict) -> TensorDict:
        """What the model is shown; at first it is tried on it."""
        seen = self.observations(td)
        if not self._is_tried:
            # in evaluation mode: a try must not use up random numbers
            training = self.training
            self.eval()
            with torch.no_grad(), first_call(self.model, seen):
                self._emitted(self.drawing.mode(self.model, seen), len(td))
            self.train(training)
            self._is_tried = True
        return seen

    def _emitted(self, actions: torch.Tensor, batch: int) -> torch.Tensor:
        # [B, C * A] -> [B, C, A with padding]
        shape = list(actions.shape)
        if shape != [batch, self.chunk * self.each]:
            raise mismatch(shape, f"{type(self.model).__name__} gave actions of shape", self.spec, self.chunk)
        actions = actions.float().view(batch, self.chunk, self.each)
        actions = actions if self.actions is None else self.actions.inverse(actions)
        return nn.functional.pad(actions, (0, self.padding)) if self.padding else actions

    def _scored(self, action: torch.Tensor) -> torch.Tensor:
        # [B, C, A with padding] -> [B, C * A]
        action = action[..., : self.each]
        return (action if self.actions is None else self.actions(action)).flatten(1)

    def _judged(self, seen: TensorDict) -> torch.Tensor:
        # [B, 1] -> [B]
        value = self.model.get_value(seen)
        if value.numel() != len(seen):
            raise self._shape_error("get_value", value, f"[{len(seen)}, 1]")
        return value.float().view(-1)

    def _evaluated(self, seen: TensorDict, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob and entropy, [B] or [B, C] each."""
        scored = self.model.evaluate_actions(seen, self._scored(action))
        if not isinstance(scored, tuple) or len(scored) != 2:
            raise UserError(
                f"{type(self.model).__name__}.evaluate_actions gave a {type(scored).__name__}; expected two tensors "
                "(log_prob [B], entropy [B])"
            )
        return scored

    def _by_position(self, score: torch.Tensor, what: str) -> torch.Tensor:
        """[B] or [B, C] -> float64 [B, C]. That of a whole chunk stands at its first step, which is always executed."""
        if score.ndim == 2 and score.shape[1] == self.chunk:
            return score.double()
        if score.ndim != 1:
            raise self._shape_error(what, score, f"[B], or [B, {self.chunk}] step by step")
        return nn.functional.pad(score.double()[:, None], (0, self.chunk - 1))

    def _executed_sum(self, per_position: torch.Tensor, td: TensorDict) -> torch.Tensor:
        return per_position[:, 0] if self.chunk == 1 else (per_position * executed_mask(td, self.chunk)).sum(-1)

    def _trace(self, log_prob: torch.Tensor, batch_size) -> TensorDict:
        """All that is known of the distribution is the score itself: the gate compares it, per number scored."""
        by_position = self._by_position(log_prob, "log_prob")
        none = torch.zeros_like(by_position, dtype=torch.float32)
        dims = torch.full_like(none, self.each)
        if log_prob.ndim == 1:
            dims = none.clone()
            dims[:, 0] = self.chunk * self.each
        mean = (by_position / dims.clamp_min(1)).float()[..., None]
        trace = {"log_prob": by_position, "mean": mean, "std": torch.ones_like(mean), "z2": none, "dims": dims}
        return TensorDict(trace, batch_size)

    def _shape_error(self, what: str, given: torch.Tensor, expected: str) -> UserError:
        return UserError(f"{type(self.model).__name__}: {what} has shape {list(given.shape)}, expected {expected}")
