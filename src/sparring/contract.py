"""The data contract: components exchange TensorDicts with these keys.

Batch `[N]` for a decision, `[T, N]` for a rollout, `[B]` for a minibatch. Scalars have no trailing 1. Each key has one
writer. Letters: N robots, T decisions, B minibatch, C steps of an action chunk, A action dims, S state dims.

    observation/image/<camera>   uint8 [3, H, W]      Env
    observation/state            float32 [S]          Env
    observation/privileged       float32 [P]          Env, on request; for critics only
    observation/depth/<camera>   float32 [1, H, W]    Env, on request; metres along the optical axis, 0: no hit
    observation/segmentation/<camera>  uint8 [1, H, W]  Env, on request
    observation/points           float32 [P, 6]       Env, on request; xyz in metres, rgb in 0..1
    observation/task             int64                Env; indexes env.tasks
    observation/instruction      uint8 [L]            Env, instead of task if texts are not listed in advance; UTF-8,
                                                      padded with zeros
    is_first                     bool                 Env
    memory/policy                float32 [M]          Collector, for policies with memory: before the decision;
                                                      zeros if is_first, else the output of Policy.remember
    noise                        float32 [Z] in (0,1) Collector; the policy's randomness; absent: act greedily
    action                       float32 [C, A]       Policy; in [-1, 1] nominally, as sampled (discrete: A=1, an index)
    log_prob, value              float32              Policy (log_prob: of the executed part, see Collector; or [S], one
                                                      per scored denoising step; float64 preferred)
    trace/*                      inputs of re-scoring and the parity gate: log_prob [C], mean [C, ...], z2 [C], dims [C]
    version                      int64                Collector; the version of the weights that acted
    next/observation/*           the true next one, before any auto-reset (Env)
    next/reward                  float32 [C]          Env; one per executed step, 0 after the episode's end. Reward
                                                      terms, if any, are added on the last executed step
    next/executed                int64                Env; steps of the chunk that were executed
    next/terminated, next/truncated, next/success  bool  Env
    next/value                   float32              Collector; V of the true next observation
    advantage, return            float32              PPO (GAE or V-trace), GRPO (advantage only)
    age                          int64                OffPolicy, for a stale rollout: its staleness in versions;
                                                      proximal_log_prob, proximal_value: under the current weights
    valid                        bool                 Collector, by episodes: false after a robot's last episode, not
                                                      learned from; absent: all are valid
    episode, group               int64                Collector, by episodes: the episode in the rollout; episodes with
                                                      the same group number have the same start state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparring.errors import UserError

# env workers import this module and must not import torch
if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

_SCORES = ("float32", "float64")  # a ratio is the exponential of a small difference of large log-probs
POLICY_MEMORY = ("memory", "policy")  # the key of a policy's memory before the decision
STEP_KEYS: dict[str | tuple[str, str], str] = {("next", "reward"): "float32", ("next", "executed"): "int64"}
STEP_KEYS |= {("next", name): "bool" for name in ("terminated", "truncated", "success")} | {"is_first": "bool"}


@dataclass(frozen=True)
class EnvSpec:
    """The observations and actions of an env."""

    __pydantic_config__ = {"extra": "forbid"}  # of spec.json
    # "state", "image/head", ... -> (shape without N, numpy dtype name)
    observation: dict[str, tuple[tuple[int, ...], str]]
    action_dim: int
    discrete_actions: int = 0  # 0: continuous actions in [-1, 1]; n: `action[..., 0]` is an index in 0..n-1
    # the env ignores this number of trailing action entries, and a policy must not score them
    action_padding: int = 0
    # `observation/task` indexes both; a task with several wordings appears once for each
    task_names: tuple[str, ...] = ("",)
    instructions: tuple[str, ...] = ("",)
    max_episode_steps: int = 0
    reports_success: bool = True  # False: the env has no notion of success; evaluations show rewards only
    control_hz: float = 30.0  # control steps per simulated second; the pace of its videos
    has_control_hz: bool = True  # False: the env states no rate, and control_hz only paces videos
    # the env's own numbers for actions of -1 and 1, one for each entry; (): unknown, or -1 and 1 themselves
    action_low: tuple[float, ...] = ()
    action_high: tuple[float, ...] = ()
    # name and size of each part of `observation/state`, in order; (): its parts have no names
    state_entries: tuple[tuple[str, int], ...] = ()
    # cameras whose frames are shown side by side in videos, all equally wide, separated by a line (SEAM);
    # (): a video frame is one image
    video_cameras: tuple[str, ...] = ()
    # entries of `observation/state` that are x, y, z of a hand, hand after hand, in metres times `hand_scale`
    hand_entries: tuple[int, ...] = ()
    hand_scale: float = 1.0
    object_entries: tuple[int, ...] = ()  # the same of `observation/privileged` and the objects, in the same unit


class ContractError(UserError):
    """A TensorDict that violates the data contract."""


def check_observation(td: TensorDict, spec: EnvSpec, where: str) -> None:
    """Check that `td/observation/*` has the entries, shapes and dtypes of an EnvSpec, and no NaN."""
    observation = td.get("observation", None)
    if observation is None:
        raise ContractError(f"{where}: has no 'observation'; got {list(td.keys())}")
    for name, (shape, dtype) in spec.observation.items():
        value = observation.get(tuple(name.split("/")), None)
        if value is None:
            raise ContractError(f"{where}: observation/{name} is missing; got {_names(observation)}")
        _check_tensor(value, (*td.batch_size, *shape), dtype, f"{where}: observation/{name}")


def images_of(td: TensorDict, spec: EnvSpec, cameras: list[str]) -> list[torch.Tensor]:
    """The images of decisions [B] from these cameras ("image/head", ...): uint8 `[B, 3, H, W]`.

    It runs in every forward pass, so it checks dtypes and shapes, not values.
    """
    pictures = []
    for name in cameras:
        picture, shape = td.get(("observation", *name.split("/")), None), spec.observation[name][0]
        if picture is None:
            raise ContractError(f"observation/{name} is missing; expected uint8 [B, {str(list(shape))[1:]}")
        if picture.shape[1:] != shape or _dtype(picture) != "uint8":
            raise ContractError(_image_mistake(picture, shape, f"observation/{name}"))
        pictures.append(picture)
    return pictures


def entry_of(td: TensorDict, spec: EnvSpec, name: str) -> torch.Tensor:
    """`observation/<name>` of decisions ("state", "task", "depth/head"). Checks dtype and shape; checks values only
    outside training and collection, because a Collector checks the actions itself."""
    import torch

    value, (shape, dtype) = td.get(("observation", *name.split("/")), None), spec.observation[name]
    # integers may have any width
    fits = value is not None and (_dtype(value) == dtype or (dtype == "int64" and not value.is_floating_point()))
    given = () if value is None else value.shape[value.ndim - len(shape) :]
    if not fits or given != shape:
        raise ContractError(_entry_mistake(value, given, shape, dtype, name))
    acts = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
    if acts and value.is_floating_point() and not value.isfinite().all():
        advice = "replace them before the policy acts"
        raise ContractError(f"observation/{name} holds NaN or infinity, expected finite {dtype} numbers; {advice}")
    return value


def text_of(row: Any) -> str:
    """The text of a numpy row of `observation/instruction`."""
    return bytes(row).rstrip(b"\0").decode(errors="replace")


def _entry_mistake(value: Any, given: tuple[int, ...], shape: tuple[int, ...], dtype: str, name: str) -> str:
    expected = f"expected {dtype} [{', '.join(['B', *map(str, shape)])}]"
    if value is None:
        return f"observation/{name} is missing; {expected}"
    advice = ["give the shape that the policy was built for"] if given != shape else []
    advice += [f"convert it: {name.partition('/')[0]}.to(torch.{dtype})"] if _dtype(value) != dtype else []
    return f"observation/{name} is {_dtype(value)} {list(value.shape)}, {expected}; {', and '.join(advice)}"


def _image_mistake(picture: torch.Tensor, shape: tuple[int, ...], name: str) -> str:
    given, kind = tuple(picture.shape[1:]), _dtype(picture)
    range_ = ""
    if picture.is_floating_point() and picture.numel():
        range_ = f" with values of {float(picture.min()):.3g} to {float(picture.max()):.3g}"
    advice = []
    if given == (*shape[1:], shape[0]):
        advice.append("put the channels first: image.movedim(-1, -3)")
    elif len(given) != len(shape):
        advice.append("give a batch of images, even for a single one")
    elif given[0] != shape[0]:
        advice.append(f"give {shape[0]} channels, it has {given[0]}" + (": image[:, :3]" if given[0] == 4 else ""))
    if len(given) == len(shape) and given[1:] != shape[1:] and given != (*shape[1:], shape[0]):
        advice.append("resize it to the size that the policy was built for")
    if kind != "uint8":
        scaled = picture.is_floating_point() and float(picture.max() if picture.numel() else 0) <= 1
        whole = "image.round().byte()" if picture.is_floating_point() else "image.byte()"
        advice.append(f"convert it: {'(image * 255).round().byte()' if scaled else whole}")
    expected = f"expected uint8 [B, {', '.join(map(str, shape))}] with values of 0 to 255"
    return f"{name} is {kind} {list(picture.shape)}{range_}, {expected}; {', and '.join(advice)}"


def check_step(td: TensorDict, spec: EnvSpec, chunk: int, where: str) -> None:
    """Check the result of `Env.step`: the root observation, and `next/*` with one reward per step of the chunk."""
    check_observation(td, spec, where)
    check_observation(td["next"], spec, f"{where}: next")
    for key, dtype in STEP_KEYS.items():
        name = key if isinstance(key, str) else "/".join(key)
        value = td.get(key, None)
        if value is None:
            raise ContractError(f"{where}: {name} is missing")
        shape = (*td.batch_size, chunk) if name == "next/reward" else tuple(td.batch_size)
        _check_tensor(value, shape, dtype, f"{where}: {name}")
    executed = td["next", "executed"]
    if ((executed < 1) | (executed > chunk)).any():
        raise ContractError(f"{where}: next/executed must be in 1..{chunk}, got {executed.tolist()}")


def check_decision(td: TensorDict, chunk: int, action_dim: int, where: str) -> None:
    _check_written(td, "action", (chunk, action_dim), where)


def check_memory(memory: torch.Tensor, robots: int, size: int, where: str) -> None:
    _check_tensor(memory, (robots, size), "float32", where)


def check_completed(rollout: TensorDict, step_weights: torch.Tensor | None, where: str) -> None:
    """Check a rollout [T, N] after `Policy.complete`: scores, and the inputs of the parity gate."""
    chunk = rollout["action"].shape[-2]
    scores = () if step_weights is None else tuple(step_weights.shape)
    _check_written(rollout, "log_prob", scores, where, _SCORES)
    _check_written(rollout, "value", (), where)
    _check_written(rollout, ("trace", "log_prob"), (chunk,), where, _SCORES)
    for key in ("z2", "dims"):
        _check_written(rollout, ("trace", key), (chunk,), where)
    if rollout.get(("trace", "mean"), None) is None:
        raise ContractError(f"{where}: 'trace/mean' is missing, which the parity gate compares")


def _check_written(
    td: TensorDict, key: str | tuple[str, ...], shape: tuple[int, ...], where: str, dtypes=("float32",)
) -> None:
    name = key if isinstance(key, str) else "/".join(key)
    value = td.get(key, None)
    if value is None:
        raise ContractError(f"{where}: did not write '{name}'")
    dtype = _dtype(value) if _dtype(value) in dtypes else dtypes[0]
    _check_tensor(value, (*td.batch_size, *shape), dtype, f"{where}: {name}")


def _dtype(value: torch.Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _check_tensor(value: torch.Tensor, shape: tuple[int, ...], dtype: str, where: str) -> None:
    if tuple(value.shape) != shape:
        raise ContractError(f"{where} has shape {list(value.shape)}, expected {list(shape)}")
    if _dtype(value) != dtype:
        raise ContractError(f"{where} is {value.dtype}, expected torch.{dtype}")
    if value.is_floating_point() and not value.isfinite().all():
        raise ContractError(f"{where} holds NaN or infinity")


def _names(observation: TensorDict) -> list[str]:
    return ["/".join(k) if isinstance(k, tuple) else k for k in observation.keys(True, True)]
