"""Compatibility of a saved run with this one: compares settings, env specs and weights, and reports differences."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from sparring.config.inherit import FREE_TO_DIFFER, LIMITS
from sparring.config.schema import Config
from sparring.config.section import ConfigError, Section
from sparring.config.text import flatten, saved_settings, value_text
from sparring.contract import EnvSpec
from sparring.envs.env import Env
from sparring.errors import Diverged, UserError, describe_error
from sparring.policies.flow.maniflow import is_maniflow, load_maniflow
from sparring.policies.weights import WeightsFit
from sparring.runs.checkpoint import (
    CheckpointError,
    checkpoint_folder,
    checkpoints,
    damage_of,
    find_checkpoint,
    load_spec,
    load_training_state,
    not_finite,
    read_weights,
    weights_file,
)

# sections that a phase does not read
_NOT_READ = {
    "teacher": ("policy.", "ppo.", "grpo.", "algorithm", "imitate.", "student.", "adversarial.", "rewards.", "buffer.")
}
# env settings that change the meaning of an action but no shape
_SAME_MEANING = ("control_mode", "action_scale")
# setting whose entries have an order: that of the entries of the state and the action
_ORDERED = "imitate.keys"
# section of a config -> what it builds, and the phases that train it
_TRAINED_BY = {
    "world_model": ("world models", ("teacher", "adversarial")),
    "policy": ("explorers", ("student", "adversarial")),
}
# dtypes of frozen weights; each is converted to the other if needed
_CAST = {torch.float32, torch.bfloat16}
# keys of a training state, at any depth, whose values are counts
_COUNTERS = {"updates", "env_steps", "episodes", "decision", "gradient_steps", "fits", "warmups"}
_COUNTERS |= {"metrics_rows", "timeline_rows", "evaluations_rows"}
_MOST = 1 << 62
# part of the names of LoRA weights
_ADAPTER = ".lora_"


def diverged(config: Config, updates: int, unfit: str) -> Diverged:
    """The error of a run whose weights or state are invalid: it names them and how to continue from a checkpoint."""
    rates = [f"{config.phase}.learning_rate"] if config.phase in ("teacher", "adversarial", "imitate") else []
    if config.phase not in ("teacher", "imitate"):
        section = "algorithm_config" if ":" in config.algorithm else config.algorithm
        rates += [f"{section}.{n}" for n in ("policy_lr", "critic_lr") if n in dict(config.algorithm_section)]
    lower = f"lower {', '.join(rates)}"
    kept = [path for path in checkpoints(config.run_folder) if not damage_of(path)]
    advice = f"there is no earlier checkpoint; {lower}"
    if kept:
        advice = f"{kept[-1].name} is kept; {lower}, and start from it: --output DIR pretrained={kept[-1]}"
    return Diverged(f"update {updates} is not saved: NaN, infinite or impossible numbers in {unfit}; {advice}")


def refuse_other_config(folder: Path, saved: dict[str, Any], config: Config) -> None:
    """Refuse to resume with other settings than the saved ones; only limits and harmless settings may differ.

    A setting that was not saved must have its default."""
    saved, now = (_with_order(values) for values in (saved, flatten(config.dump())))
    free = (*FREE_TO_DIFFER, *LIMITS, *_NOT_READ.get(config.phase, ()))
    shown = {
        key: [value_text(values[key]) if key in values else "not set" for values in (saved, now)]
        for key in sorted(saved.keys() | now.keys())
        if not key.startswith(free) and (key in saved or not _is_default(config, key))
    }
    changed = [f"  {key}: {then} in the folder, {today} now" for key, (then, today) in shown.items() if then != today]
    if saved and changed:
        advice = (
            "give another folder (--output DIR), start from scratch here (--resume never moves the old run aside), "
            f"or start a new run from its weights (--output DIR pretrained={folder})"
        )
        raise ConfigError([f"'{folder}' holds a run with another config:", *changed, advice])


def _with_order(values: dict[str, Any]) -> dict[str, Any]:
    """The entries of the ordered setting as one list: two dicts would be equal in any order."""
    entries = {key: value for key, value in values.items() if key.startswith(f"{_ORDERED}.")}
    listed = [f"{key.removeprefix(f'{_ORDERED}.')}: {value}" for key, value in entries.items()]
    others = {key: value for key, value in values.items() if key not in entries}
    return others | ({_ORDERED: listed} if entries else {})


def schedules_of(config: Config) -> list[str]:
    """Names of the settings whose values follow a schedule over the length of the run."""
    names = []
    if config.phase in ("teacher", "adversarial"):
        names.append(f"{config.phase}.learning_rate")
    if config.phase == "imitate":
        names += ["imitate.lr_schedule"] if config.imitate.lr_schedule != "constant" else []
    elif config.phase != "teacher":
        section = "algorithm_config" if ":" in config.algorithm else config.algorithm
        schedules = [name for name, _ in config.algorithm_section if name.endswith("_schedule")]
        changing = [name for name in schedules if getattr(config.algorithm_section, name) != "constant"]
        names += [f"{section}.{name}" for name in changing]
    return names


def _is_default(config: Config, key: str) -> bool:
    section, _, leaf = key.partition(".")
    holder, name = (getattr(config, section), leaf) if leaf else (config, section)
    field = type(holder).model_fields.get(name)
    # None: a key inside a setting. A section counts as default, because its keys are checked one by one
    if field is None or isinstance(value := getattr(holder, name), Section):
        return field is not None
    return value == field.get_default(call_default_factory=True)


def other_origin(section: str, phase: str | None) -> str | None:
    """A message if a run of `phase` does not train what `section` of a config builds; None if it does."""
    what, phases = _TRAINED_BY[section]
    if phase in phases:
        return None
    return f"it was made by `sparring train {phase}`; `sparring train {phases[0]}` makes {what}"


def spec_differences(trained: EnvSpec, now: EnvSpec) -> list[str]:
    """The differences between the observations and actions of two envs, a clause each."""

    def shape(spec: EnvSpec, name: str) -> str:
        size, dtype = spec.observation.get(name, ((), ""))
        return f"{list(size)} {dtype}" if dtype else "absent"

    both, names = (trained, now), sorted(trained.observation.keys() | now.observation.keys())
    values: dict[str, list] = {f"observation/{name}": [shape(spec, name) for spec in both] for name in names}
    action_fields = ("action_dim", "discrete_actions", "action_padding")
    values |= {name: [getattr(spec, name) for spec in both] for name in action_fields}
    # other names may be those of another program
    if len({tuple(sorted(name for name, _ in spec.state_entries)) for spec in both}) == 1:
        values["the state"] = [", ".join(f"{name} [{size}]" for name, size in spec.state_entries) for spec in both]
    for name in ("action_low", "action_high"):
        before, after = (list(getattr(spec, name)) for spec in both)
        # [] is unknown; a millionth, because bounds may be typed with fewer digits
        if before and after and not (len(before) == len(after) and np.allclose(before, after, rtol=1e-6)):
            values[name] = [before, after]
    return [f"{name} was {then} and is {today}" for name, (then, today) in values.items() if then != today]


def load_part(model: nn.Module, section: str, path: str, key: str, config: Config, env: Env) -> None:
    """Load the weights of the part of an earlier run that `section` of its config built.

    Raises a UserError if the settings or specs of the two runs differ. `key`: the setting that gave `path`."""
    folder = checkpoint_folder(path)
    trained = saved_settings(folder)
    if other := other_origin(section, trained["phase"]):
        differences = [other]
    else:
        now = {f"{section}.{k}": v for k, v in flatten(getattr(config, section).model_dump(mode="json")).items()}
        now["rollout.action_steps"] = config.rollout.action_steps
        now |= {f"env.{k}": getattr(env.config, k) for k in _SAME_MEANING if hasattr(env.config, k)}
        differences = [f"{k} was {trained.get(k)} and is {v}" for k, v in now.items() if trained.get(k) != v]
        differences += spec_differences(_predicted(load_spec(folder)), _predicted(env.spec))
    if differences:
        advice = "leave out these settings (they are taken from that run), or train a new one with them"
        raise UserError("\n".join([f"{key}={path}: does not fit this run:", *differences, advice]))
    # an adversarial run saves both parts, under these prefixes
    load_weights(model, folder, f"{section}." if trained["phase"] == "adversarial" else "")


def _predicted(spec: EnvSpec) -> EnvSpec:
    """The spec with only the observations that a world model reads."""
    read = {name: kind for name, kind in spec.observation.items() if name.partition("/")[0] in ("image", "state")}
    return replace(spec, observation=read)


def load_pretrained(model: nn.Module, path: str | Path, env: Env) -> str:
    """Load the weights of another run, whose env must have the same spec. Returns a description for the log."""
    found = find_checkpoint(path)
    folder = found.parent if found.is_file() else found
    has_spec = (folder / "spec.json").is_file()
    differences = spec_differences(load_spec(folder), env.spec) if has_spec else []
    trained = saved_settings(folder)
    # padded states with different contents have the same shape, so these settings are compared too
    for key in [f"env.{name}" for name in (*_SAME_MEANING, "object_state")]:
        now = getattr(env.config, key.removeprefix("env."), None)
        if trained.get(key, now) != now:
            differences.append(f"{key} was {trained[key]} and is {now}")
    if differences:
        what = f"pretrained={path}: was trained in another env; leave out these settings, or train a new run with them:"
        raise CheckpointError("\n".join([what, *differences]))
    return load_weights(model, path, may_be_new=getattr(model, "may_be_new", ()), may_lack_adapters=True)


def load_weights(
    model: nn.Module,
    path: str | Path,
    prefix: str = "",
    may_be_new: tuple[str, ...] = (),
    may_lack_adapters: bool = False,
) -> str:
    """Load weights strictly: all keys and shapes must match; otherwise nothing changes and all differences are listed.

    `prefix` selects one of several models in a checkpoint by the start of its keys. A part of the model whose name
    (with a dot) is in `may_be_new` keeps its initial weights if the file has none of them. `may_lack_adapters`: if the
    file has no LoRA weights, the adapters keep their initial weights. Returns a description for the log."""
    file = cast(Path, weights_file(find_checkpoint(path)))
    expected = model.state_dict()
    given = {key.removeprefix(prefix): w for key, w in read_weights(file).items() if key.startswith(prefix)}
    if is_maniflow(given):
        _refuse_unfit(model, given, file)
        return load_maniflow(model, given, str(file))
    if may_lack_adapters and not any(_ADAPTER in key for key in given):
        # a network with adapters has other names for the same weights
        plain = {key.replace(".base_layer.", "."): key for key in expected}
        given = {plain.get(key, key): weight for key, weight in given.items()}
        may_be_new += tuple(key for key in expected if _ADAPTER in key)
    absent = tuple(part for part in may_be_new if not any(key.startswith(part) for key in given))
    fit = WeightsFit.of(expected, given, absent)
    if not fit.exact:
        advice = "Use the config it was trained with (config.yaml in its folder)"
        raise CheckpointError(f"'{file}' does not fit this model: {fit.sentence}. {advice}")
    dtypes = [(n, w.dtype, expected[n].dtype) for n, w in given.items() if w.dtype != expected[n].dtype]
    differing = [f"{n} {has} instead of {wanted}" for n, has, wanted in dtypes if not {has, wanted} <= _CAST]
    if differing:
        shown = f"{len(differing)} tensors of another dtype: {WeightsFit.some(differing)}".replace("torch.", "")
        raise CheckpointError(f"'{file}' does not fit this model: {shown}. Convert it")
    _refuse_unfit(model, given, file)
    model.load_state_dict(given, strict=False)
    new = [key for key in expected if absent and key.startswith(absent)]
    return f"all {len(given)} tensors" + (f"; new: {WeightsFit.some(new)}" if new else "")


def _refuse_unfit(model: nn.Module, weights: dict[str, torch.Tensor], file: Path) -> None:
    if unfit := not_finite(model, weights):
        raise CheckpointError(
            f"'{file}' cannot be used: NaN, infinite or impossible numbers in {unfit}; use another checkpoint"
        )


def read_state(checkpoint: Path, processes: int) -> dict[str, Any]:
    """The training state of a checkpoint; everything that does not depend on the phase is verified."""
    file, state = checkpoint / "training_state.pt", load_training_state(checkpoint)
    kinds = {"phase": dict, "processes": list, "pending": dict, "recorder": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(state.get(name), kind)]
    if wrong or state.keys() != kinds.keys() or not all(isinstance(own, dict) for own in state["processes"]):
        has, wanted = ", ".join(map(str, state)) or "nothing", ", ".join(kinds)
        raise CheckpointError(f"'{file}' cannot be used: it holds {has}; expected {wanted} as a run writes them")
    if len(state["processes"]) != processes:
        raise CheckpointError(
            f"'{checkpoint}' was written by {len(state['processes'])} process(es) and {processes} run now; "
            f"use --gpus {len(state['processes'])}, or start a new run with --output DIR pretrained={checkpoint}"
        )
    found = [*_impossible(state)]
    if unfit := not_finite(nn.Module(), {}, {"phase": state["phase"]}):
        found.append(f"NaN or infinite numbers in {unfit}")
    if found:
        raise CheckpointError(f"'{file}' cannot be used: {'; '.join(found[:3])}")
    return state


@contextmanager
def misfits(checkpoint: Path) -> Iterator[None]:
    """Turn errors while a state is restored into a CheckpointError: the saved state does not fit."""
    errors = (KeyError, TypeError, IndexError, AttributeError, RuntimeError, OverflowError, ValueError)
    file = checkpoint / "training_state.pt"
    try:
        yield
    except errors as error:
        # subclasses of UserError already explain themselves; so do failures of an env or a process
        if isinstance(error, UserError) and type(error) is not UserError:
            raise
        why = error if isinstance(error, UserError) else describe_error(error)
        raise CheckpointError(f"'{file}' does not fit this run: {why}") from error


def _impossible(value: Any, path: str = "") -> Iterator[str]:
    """Counters with impossible values, a clause each."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        place = f"{path}.{key}".lstrip(".")
        is_plain = inner is None or isinstance(inner, int | float | str)
        if key in _COUNTERS and is_plain and not (type(inner) is int and 0 <= inner < _MOST):
            yield f"{place} is {inner!r}, expected a count"
        yield from _impossible(inner, place)
