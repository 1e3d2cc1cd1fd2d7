"""What both kinds of VLA policies share: the model as their config wants it, and what goes with it."""

import contextlib
import inspect
import traceback
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.out_of_memory import shortage
from sparring.policies.configs import CriticConfig, DenoisingConfig
from sparring.policies.lora import adapt
from sparring.policies.patterns import weights_meant
from sparring.policies.vla import parts
from sparring.policies.vla.interface import check_interface, denoises
from sparring.policies.vla.load import class_of, load_vla_model
from sparring.policies.vla.observations import Observations
from sparring.policies.vla_configs import VLAConfig

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
