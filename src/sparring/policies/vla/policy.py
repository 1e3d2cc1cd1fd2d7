"""Custom VLA models as policies: VLAPolicy for the documented interface, _VLAFlowPolicy for a flow head.

Letters: B decisions, C steps of a chunk, A action entries of a step; the model's action_dim is C * A."""

import contextlib
import inspect
import traceback
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.normalize import Normalizer
from sparring.policies.configs import CriticConfig, DenoisingConfig, VLAConfig
from sparring.policies.critic import Critic
from sparring.policies.encoders import STATE
from sparring.policies.flow.chain import FlowChain
from sparring.policies.lora import adapt
from sparring.policies.policy import Loss, Policy
from sparring.policies.vla.interface import VLAObservations
from sparring.policies.vla.load import DTYPES, import_model_class, load_vla_model, move_to_devices
from sparring.policies.weights import match_parameters
from sparring.processes.memory import oom_message

# settings that only one kind of model reads: with a flow head, or with the documented interface
_FLOW_SETTINGS = (*DenoisingConfig.model_fields, *CriticConfig.model_fields)
_DOCUMENTED_SETTINGS = ("draws", "critic_parts")
# exceptions of a model that does not fit its observations
_MODEL_ERRORS = (RuntimeError, KeyError, TypeError, ValueError, IndexError, AttributeError)
_SEED_NUMBERS, _SEED_BITS = 2, 24  # a seed consists of two uniform numbers of 24 bits step_dims
_TRIES = 8  # a model that returns the same action for this many seeds counts as deterministic


def make_vla_policy(config: VLAConfig, spec: EnvSpec, chunk: int) -> Policy:
    kind = _VLAFlowPolicy if _has_flow_head(import_model_class(config.model_class)) else VLAPolicy
    return kind(config, spec, chunk)


class VLAPolicy(Policy):
    """Acts with the model's `forward` or `sample`, scores with `evaluate_actions`, and values with `get_value`."""

    model: Any  # a VLAModelInterface

    def __init__(self, config: VLAConfig, spec: EnvSpec, chunk: int):
        super().__init__()
        if _has_flow_head(import_model_class(config.model_class)):
            raise UserError(f"policy.model_class '{config.model_class}' has a flow head; use make_policy instead")
        self.config, self.spec, self.chunk, self.horizon = config, spec, chunk, chunk
        self.padding, self.step_dims = spec.action_padding, spec.action_dim - spec.action_padding
        self.observations = VLAObservations(config, spec)
        # by name, not by requires_grad: an algorithm may freeze the critic's weights for a while
        self.model, self.critic_names = _load_model(config, spec, chunk, self.observations)
        self.actions = Normalizer(self.step_dims) if config.normalize_actions else None
        self.sampler = _Sampler(self.model, chunk * self.step_dims, config.draws == "rows", bool(spec.discrete_actions))
        self.noise_size = self.sampler.noise_size
        self._is_checked = False
        self.in_keys = self.observations.in_keys

    @property
    def normalized_keys(self) -> list[tuple[str, ...]]:  # type: ignore[override]
        return [STATE] if self.observations.normalizer is not None else []

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        """Add actions that are not clipped (the env clips them) and carry no autograd graph."""
        with _precision(self.model, self.config):
            inputs, noise = self._checked_inputs(td), td.get("noise", None)
            if noise is None:
                return td.set("action", self._action_of(self.sampler.mode(self.model, inputs), len(td)))
            actions, log_prob = self.sampler.draw(self.model, inputs, noise)
            td.set("action", self._action_of(actions, len(td)))
            if log_prob is None:
                log_prob, _ = self._evaluate(inputs, td["action"])
            td.set("value", self._value(inputs))
        return td.set("trace", self._trace(log_prob, td.batch_size))

    def evaluate(self, td: TensorDict) -> TensorDict:
        with _precision(self.model, self.config):
            inputs = self.observations(td)
            log_prob, entropy = self._evaluate(inputs, td["action"])
            value = self._value(inputs)
        scored = {"log_prob": self._executed_sum(self._per_position(log_prob, "log_prob"), td), "value": value}
        scored["entropy"] = self._executed_sum(self._per_position(entropy, "entropy"), td).float()
        if td.get("trace", None) is not None:
            scored["trace"] = self._trace(log_prob, td.batch_size)
        return TensorDict(scored, td.batch_size)

    def value(self, td: TensorDict) -> torch.Tensor:
        with _precision(self.model, self.config):
            return self._value(self.observations(td))

    def imitation_loss(self, td: TensorDict, generator: torch.Generator) -> Loss:
        valid = td["valid"].float()
        with _precision(self.model, self.config):
            inputs = self._checked_inputs(td)
            if hasattr(self.model, "imitation_loss"):
                loss = self.model.imitation_loss(inputs, self._scored(td["action"]), td["valid"])
                return loss, {"imitation": loss.detach()}
            log_prob, _ = self._evaluate(inputs, td["action"])
        # a score [B] of whole chunks cannot be masked per step: only chunks within the episode count
        counted = valid if log_prob.shape == valid.shape else valid.amin(-1)
        loss = -(log_prob.view_as(counted) * counted).sum() / counted.sum().clamp_min(1)
        return loss, {"negative_log_prob": loss.detach()}

    def critic_parameters(self) -> list[nn.Parameter]:
        named = dict(self.model.named_parameters())
        return [named[name] for name in self.critic_names]

    def train(self, mode: bool = True) -> "VLAPolicy":
        super().train(mode)
        _eval_frozen(self.model)
        return self

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return {"observation/state": self.observations.normalizer, "action": self.actions}

    def _checked_inputs(self, td: TensorDict) -> TensorDict:
        inputs = self.observations(td)
        if not self._is_checked:
            training = self.training
            self.eval()  # no dropout: this check must not consume random numbers
            with torch.no_grad(), _explained_failure(self.model, inputs):
                self._action_of(self.sampler.mode(self.model, inputs), len(td))
            self.train(training)
            self._is_checked = True
        return inputs

    def _action_of(self, actions: torch.Tensor, batch: int) -> torch.Tensor:
        shape = list(actions.shape)  # [B, C * A] -> [B, C, A with padding]
        if shape != [batch, self.chunk * self.step_dims]:
            raise _size_error(shape, f"{type(self.model).__name__}: shape of the actions", self.spec, self.chunk)
        actions = actions.float().view(batch, self.chunk, self.step_dims)
        actions = actions if self.actions is None else self.actions.inverse(actions)
        return nn.functional.pad(actions, (0, self.padding)) if self.padding else actions

    def _scored(self, action: torch.Tensor) -> torch.Tensor:
        action = action[..., : self.step_dims]  # [B, C, A with padding] -> [B, C * A]
        return (action if self.actions is None else self.actions(action)).flatten(1)

    def _value(self, inputs: TensorDict) -> torch.Tensor:
        value = self.model.get_value(inputs)  # [B, 1] -> [B]
        if value.numel() != len(inputs):
            raise self._shape_error("get_value", value, f"[{len(inputs)}, 1]")
        return value.float().view(-1)

    def _evaluate(self, inputs: TensorDict, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scored = self.model.evaluate_actions(inputs, self._scored(action))
        if not isinstance(scored, tuple) or len(scored) != 2:
            given, expected = type(scored).__name__, "expected two tensors (log_prob [B], entropy [B])"
            raise UserError(f"{type(self.model).__name__}.evaluate_actions returned a {given}; {expected}")
        return scored

    def _per_position(self, score: torch.Tensor, name: str) -> torch.Tensor:
        """[B] or [B, C] -> float64 [B, C]. The score of a whole chunk goes to its first step, always executed."""
        if score.ndim == 2 and score.shape[1] == self.chunk:
            return score.double()
        if score.ndim != 1:
            raise self._shape_error(name, score, f"[B], or [B, {self.chunk}] for scores per step")
        return nn.functional.pad(score.double()[:, None], (0, self.chunk - 1))

    def _trace(self, log_prob: torch.Tensor, batch_size) -> TensorDict:
        """The trace holds the log-prob per scored number as `mean`, since the model's distribution is unknown."""
        per_position = self._per_position(log_prob, "log_prob")
        zeros = torch.zeros_like(per_position, dtype=torch.float32)
        dims = torch.full_like(zeros, self.step_dims)
        if log_prob.ndim == 1:
            dims = zeros.clone()
            dims[:, 0] = self.chunk * self.step_dims
        mean = (per_position / dims.clamp_min(1)).float()[..., None]
        trace = {"log_prob": per_position, "mean": mean, "std": torch.ones_like(mean), "z2": zeros, "dims": dims}
        return TensorDict(trace, batch_size)

    def _shape_error(self, name: str, given: torch.Tensor, expected: str) -> UserError:
        return UserError(f"{type(self.model).__name__}: {name} has shape {list(given.shape)}, expected {expected}")


class _VLAFlowPolicy(FlowChain):
    """Runs the model's `encode` once per decision and its `denoise` at every step; adds a critic on its features."""

    config: VLAConfig
    model: Any  # with the methods of a flow head

    def __init__(self, config: VLAConfig, spec: EnvSpec, chunk: int):
        observations = VLAObservations(config, spec)
        model, _ = _load_model(config, spec, chunk, observations)
        step_dims = spec.action_dim - spec.action_padding
        features = _check_flow_head(model, config, observations, config.horizon or chunk, step_dims)
        super().__init__(config, spec, chunk, features, config.normalize_actions)
        self.observations, self.model = observations, model
        self.critic = Critic(config, spec, features, normalize=True)
        self.in_keys = [*observations.in_keys, *self.critic.in_keys, *self.trace_keys]

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, TensorDict]:
        with _precision(self.model, self.config):
            features, prefix = self.model.encode(self.observations(td))
        features = features.float()
        return features, TensorDict({"features": features, "prefix": prefix}, td.batch_size, device=features.device)

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: TensorDict) -> torch.Tensor:
        with _precision(self.model, self.config):
            return self.model.denoise(x, t, prefix["prefix"]).float()

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return super()._normalizers() | {"observation/state": self.observations.normalizer}

    def train(self, mode: bool = True) -> "_VLAFlowPolicy":
        super().train(mode)
        _eval_frozen(self.model)
        return self


@torch.no_grad()
def _check_flow_head(model: Any, config: VLAConfig, observations: VLAObservations, horizon: int, step_dims: int) -> int:
    """Run the model once: check the shapes of `encode` and `denoise`, and return the number of features."""
    name, x = type(model).__name__, torch.zeros(1, horizon, step_dims)
    with _precision(model, config):
        encoded = model.encode(observations(observations.blank(1)))
        if not (isinstance(encoded, tuple) and len(encoded) == 2 and encoded[0].ndim == 2):
            given = list(encoded.shape) if isinstance(encoded, torch.Tensor) else f"a {type(encoded).__name__}"
            raise UserError(f"{name}.encode: expected (features [B, F], prefix), got {given}")
        features, prefix = encoded
        try:
            velocity = model.denoise(x, torch.ones(1), prefix)
        except RuntimeError as error:
            if oom_message(error):
                raise
            fix = f"support {horizon} steps (policy.horizon or rollout.action_steps) of {step_dims} action entries"
            why = f"fails for chunks [1, {horizon}, {step_dims}] ({str(error).splitlines()[0]})"
            raise UserError(f"{name}.denoise {why}; {fix}") from error
    if velocity.shape != x.shape:
        given = list(velocity.shape)
        raise UserError(f"{name}.denoise returned {given} for a chunk {list(x.shape)}; expected the same shape")
    return features.shape[1]


def _load_model(
    config: VLAConfig, spec: EnvSpec, chunk: int, observations: VLAObservations
) -> tuple[nn.Module, list[str]]:
    """The model with adapters, frozen parts, dtypes and devices; and the names of the critic's learning weights."""
    cls = import_model_class(config.model_class)
    is_flow = _has_flow_head(cls)
    _check_settings(config, is_flow)
    # a flow head's action_dim is the size of one step; it reads the length of a chunk from its input
    steps = 1 if is_flow else chunk
    numbers = steps * (spec.action_dim - spec.action_padding)
    if config.action_dim not in (None, numbers):
        raise _size_error(config.action_dim, "policy.action_dim", spec, steps)
    # constructor arguments that follow from the env
    sizes = {"action_dim": numbers, "proprio_dim": observations.size_of("proprio")}
    defaults = {name: size for name, size in sizes.items() if size is not None}
    model = load_vla_model(config.model_path, cls, config.model_settings, strict=config.strict, defaults=defaults)
    # matched before adapters change the names
    critic = set(map(id, match_parameters(model, config.critic_parts, "policy.critic_parts")))
    adapt(model, config, frozen=config.frozen, critic_parts=config.critic_parts)
    _cast_frozen(model, config.dtype)
    move_to_devices(model, config.device_map)
    own = getattr(model, "action_dim", None)
    if isinstance(own, int) and own != numbers:
        raise _size_error(own, f"{cls.__name__}.action_dim", spec, steps)
    critic_names = [name for name, p in model.named_parameters() if id(p) in critic and p.requires_grad]
    return model.eval(), critic_names


def _has_flow_head(model_class: type) -> bool:
    return all(getattr(model_class, name, None) is not None for name in ("encode", "denoise"))


def _cast_frozen(model: nn.Module, dtype: str) -> None:
    """Cast frozen weights to `dtype`; weights that learn stay in float32, so that small steps are not rounded away."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else DTYPES[dtype])


def _eval_frozen(model: nn.Module) -> None:
    """Keep entirely frozen modules in evaluation mode: no dropout, no update of running statistics."""
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters):
            module.eval()


def _check_settings(config: VLAConfig, is_flow: bool) -> None:
    for name in _DOCUMENTED_SETTINGS if is_flow else _FLOW_SETTINGS:
        value, default = getattr(config, name), VLAConfig.model_fields[name].default
        if value != default:
            readers = "models without encode and denoise" if is_flow else "models with encode and denoise"
            raise UserError(f"policy.{name}={value}: only {readers} read it; remove the setting")
    if config.dtype == "bf16" and config.precision == "fp32":
        advice = "set policy.precision=bf16 too"
        raise UserError(f"policy.dtype=bf16 keeps frozen weights in bf16, which cannot compute in fp32; {advice}")


def _size_error(given: int | list[int], name: str, spec: EnvSpec, steps: int) -> UserError:
    step_dims = spec.action_dim - spec.action_padding
    fix = f"use a model of that size, e.g. policy.model_config.action_dim={steps * step_dims}"
    number = given if isinstance(given, int) else given[-1] if given else 0
    if number and number % step_dims == 0:
        fix += f", or set rollout.action_steps={number // step_dims}"
    why = f"{steps} steps (rollout.action_steps) of the env's {step_dims} action entries; {fix}"
    return UserError(f"{name}={given}, but a decision takes {steps * step_dims} numbers: {why}")


@contextlib.contextmanager
def _precision(model: nn.Module, config: VLAConfig):
    with contextlib.ExitStack() as stack:
        if config.precision == "bf16":
            for kind in {p.device.type for p in model.parameters()}:  # parts may be on several devices
                stack.enter_context(torch.autocast(kind, torch.bfloat16))
        yield


@contextlib.contextmanager
def _explained_failure(model: nn.Module, inputs: TensorDict):
    try:
        yield
    except _MODEL_ERRORS as error:
        if isinstance(error, UserError) or oom_message(error) is not None:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        # the last frame in the model's own file
        own = [frame for frame in frames if frame.filename == inspect.getfile(type(model))] or frames
        shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in inputs.items())
        where = f"{type(error).__name__}: {error} ({Path(own[-1].filename).name}, line {own[-1].lineno})"
        change = "policy.observation_keys, policy.tokenizer, env.cameras and env.image_size change these observations"
        message = f"{type(model).__name__} failed with the observations {shapes}: {where}; {change}"
        raise UserError(f"{message} (docs/vla.md, 'Observations')") from error


class _Sampler:
    """Samples actions from a model so that the same noise gives the same action.
    A model without `sample` uses torch's generator, seeded from the noise: with `by_rows` once per decision, else once
    per batch, which is faster, but repeatable only for the same batch."""

    def __init__(self, model: nn.Module, size: int, by_rows: bool, discrete: bool):
        self.samples = hasattr(model, "sample")
        self.takes_deterministic = "deterministic" in inspect.signature(model.forward).parameters
        self.by_rows = by_rows
        self.noise_size = int(getattr(model, "noise_size", size)) if self.samples else _SEED_NUMBERS
        self.is_checked = self.samples or discrete  # few discrete choices: a repeated one does not mean deterministic

    def mode(self, model: nn.Module, inputs: TensorDict) -> torch.Tensor:
        if self.takes_deterministic:
            return model(inputs, deterministic=True)
        # a model without that keyword may sample too
        return model(inputs) if self.samples else _seeded(model, 0, lambda: model(inputs))

    def draw(self, model: Any, inputs: TensorDict, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.samples:
            drawn = model.sample(inputs, noise)
            return drawn if isinstance(drawn, tuple) else (drawn, None)
        # [B, 2] in (0, 1) -> 48 bits step_dims
        numbers = (noise[:, :_SEED_NUMBERS].double() * 2**_SEED_BITS).long().tolist()
        seeds = [(first << _SEED_BITS) | second for first, second in numbers]
        if not self.is_checked:
            self.is_checked = True
            self._check_randomness(model, inputs[:1])
        if not self.by_rows:
            seed = 0
            for row_seed in seeds:
                seed = (seed * 1_000_003 ^ row_seed) & (2**63 - 1)
            return self._forward(model, inputs, seed), None
        return torch.cat([self._forward(model, inputs[row : row + 1], seed) for row, seed in enumerate(seeds)]), None

    def _forward(self, model: nn.Module, inputs: TensorDict, seed: int) -> torch.Tensor:
        keywords = {"deterministic": False} if self.takes_deterministic else {}
        return _seeded(model, seed, lambda: model(inputs, **keywords))

    def _check_randomness(self, model: nn.Module, inputs: TensorDict) -> None:
        first, *others = (self._forward(model, inputs, seed) for seed in range(_TRIES))
        if all(torch.equal(first, other) for other in others):
            why = f"{type(model).__name__}.forward returns the same action for every torch seed, so it cannot explore"
            advice = "sample from the distribution that it scores, or add sample(observations, noise)"
            raise UserError(f"{why}; {advice}")


def _seeded(model: nn.Module, seed: int, call) -> torch.Tensor:
    # torch keeps a generator for step_dims device
    with torch.random.fork_rng(devices={p.device for p in model.parameters() if p.device.type == "cuda"}):
        torch.manual_seed(seed)
        return call()
