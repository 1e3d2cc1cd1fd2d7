"""Checks of a gymnasium env itself: roles, declared spaces, and the orientation of MuJoCo cameras."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from gymnasium import spaces

from sparring.check.findings import ERROR, NOTE, WARNING, Finding
from sparring.config.text import shortened
from sparring.envs.gym import GymRobot
from sparring.envs.sims.mujoco import Cameras

_STEPS, _SECONDS = 60, 5.0  # both limit the steps whose observations are compared
_ROUNDING = 1e-4  # observations may exceed their bounds by this, relative to the bound
# images of a camera may be turned or mirrored by the env -> (the same change of a picture [H, W, 3], factor of "up")
_TURNS = {
    "as drawn": (lambda picture: picture, 1),
    "with its rows in reverse, as OpenGL stores them": (lambda picture: picture[::-1], -1),
    "with its columns in reverse": (lambda picture: picture[:, ::-1], 1),
    "turned by 180 degrees": (lambda picture: picture[::-1, ::-1], -1),
}


def gymnasium_findings(robot: GymRobot) -> Iterator[Finding]:
    for name, use in robot.observations.describe():
        yield Finding(f"role of '{name}'", use)
    yield from _unused_texts(robot)
    yield from _action_space(robot)
    yield from _declared(robot)
    yield from _cameras(robot)


def _unused_texts(robot: GymRobot) -> Iterator[Finding]:
    _, info = robot.env.reset(seed=0)
    if any(entry.role == "instruction" for entry in robot.observations.entries):
        return
    for key in (key for key, value in info.items() if isinstance(value, str)):
        fix = f"to give it to the policy, set env.roles={{info/{key}: instruction}}"
        yield Finding(f"info['{key}']", f"text, not used ({shortened(repr(info[key]), 60)})", NOTE, fix)


def _action_space(robot: GymRobot) -> Iterator[Finding]:
    space = robot.env.action_space
    if not isinstance(space, spaces.Box):
        return
    low, high = space.low.ravel(), space.high.ravel()
    if unbounded := np.flatnonzero(~(np.isfinite(low) & np.isfinite(high))).tolist():
        fix = "give action_space the bounds of useful actions"
        found = f"entries {shortened(str(unbounded), 40)} have no bounds, and are limited to [-1, 1]"
        yield Finding("action space", found, WARNING, fix)
    if without := np.flatnonzero(low == high).tolist():
        found = f"entries {shortened(str(without), 40)} have equal bounds, so they do nothing"
        yield Finding("action space", found, WARNING, "leave them out of action_space")


def _declared(robot: GymRobot) -> Iterator[Finding]:
    """Compare observations with the declared spaces. Training checks shapes at resets only, and numpy would broadcast
    a wrong shape."""
    found: dict[str, Finding] = {}
    robot.reset(seed=0)
    robot.env.action_space.seed(0)
    observation, info = robot.env.reset(seed=0)
    deadline = time.monotonic() + _SECONDS
    for _ in range(_STEPS):
        for entry in robot.observations.entries:
            if entry.space is None or not entry.parts:
                continue
            value = entry.value(observation, info)
            wrong = _outside(entry.space, value() if callable(value) else value)
            if wrong is not None and entry.name not in found:
                shown, is_lost, fix = wrong
                found[entry.name] = Finding(f"space of '{entry.name}'", shown, ERROR if is_lost else WARNING, fix)
        observation, _, terminated, truncated, _ = robot.env.step(robot.env.action_space.sample())
        robot.observations.check(observation, info)
        if terminated or truncated:
            observation, info = robot.env.reset()
        if time.monotonic() > deadline:
            break
    yield from found.values()


def _outside(space: spaces.Space, value: Any) -> tuple[str, bool, str] | None:
    """(what is outside of the space, whether the conversion loses it, how to correct it)."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        fits = space.contains(np.asarray(value, space.dtype) if np.shape(value) else space.dtype.type(value))
        return None if fits else (f"{value} is not in {space}", True, "return a choice that the space has")
    if not isinstance(space, spaces.Box):
        return None
    value = np.asarray(value)
    whole = np.issubdtype(space.dtype, np.integer)
    if whole and np.issubdtype(value.dtype, np.floating) and (value != np.rint(value)).any():
        shown = f"{value.dtype} values such as {value.flat[int(np.argmax(value != np.rint(value)))]:.3g}"
        return f"{shown}, but the space is {space.dtype}", True, "return whole numbers, or declare a float space"
    low, high = (np.asarray(bound, np.float64) for bound in (space.low, space.high))
    over = np.maximum(low - value, value - high) - _ROUNDING * np.maximum(1, np.abs(np.where(value < low, low, high)))
    over = np.where(np.isnan(over), -np.inf, over)
    if not (over > 0).any():
        return None
    at = np.unravel_index(int(over.argmax()), over.shape)
    bounds = f"the space has {low[at]:.4g} to {high[at]:.4g}"
    where = f"entry {list(map(int, at))}" if at else "it"
    # images are stored as uint8, where a value beyond the bounds appears as another one
    is_image = whole or (value.ndim > 1 and low[at] == 0 and high[at] == 1)
    return (
        f"{where} is {value[at]:.4g}, {bounds}",
        is_image,
        "correct the bounds of observation_space, or the observation",
    )


def _cameras(robot: GymRobot) -> Iterator[Finding]:
    """Compare images with the pictures of the same cameras of the MuJoCo model, whose orientation is known.

    Only cameras fixed in the world: upside down means little for one that the robot carries.
    """
    model, data = (getattr(robot.env.unwrapped, name, None) for name in ("model", "data"))
    if type(model).__name__ != "MjModel" or data is None:
        return
    fixed = {model.camera(index).name: index for index in range(model.ncam) if model.cam_bodyid[index] == 0}
    observation, info = robot.env.reset(seed=0)
    for entry in robot.observations.entries:
        name = str(entry.path[-1]) if entry.path else ""
        if not entry.role.startswith("image/") or name not in fixed or len(entry.parts) != 1:
            continue
        value = entry.value(observation, info)
        key, shape, _, convert = entry.parts[0]
        image = np.broadcast_to(convert(value() if callable(value) else value), shape).transpose(1, 2, 0).astype(float)
        cameras = Cameras(model, *image.shape[:2])
        drawn = cameras.draw(data, name)[0].astype(float)
        cameras.close()
        distances = {turn: float(np.abs(change(drawn) - image).mean()) for turn, (change, _) in _TURNS.items()}
        turn, second = sorted(distances, key=distances.__getitem__)[:2]
        if distances[turn] > 0.5 * distances[second]:
            continue  # the env draws another picture than the model's: its orientation is not known
        up = _TURNS[turn][1] * float(data.cam_xmat[fixed[name]].reshape(3, 3)[2, 1])
        seen = f"it is the picture of the model's camera {turn}"
        mirrored = "in reverse" in turn
        if up < -0.2:
            fix = "reverse the rows: image[::-1]" if mirrored else "turn it by 180 degrees: image[::-1, ::-1]"
            yield Finding(key, f"upside down: {seen}, and its up points down ({up:.2f})", WARNING, fix)
        elif mirrored:
            fix = (
                "reverse the rows: image[::-1]"
                if up < 0.2 and "rows" in turn
                else "reverse the columns: image[:, ::-1]"
            )
            yield Finding(key, f"mirrored: {seen}", WARNING, fix)
        else:
            yield Finding(key, f"{seen}; up is {up:.2f}" if up > 0.2 else f"{seen}, which looks up or down")
