"""The `env.kwargs` that several adapters have, their checks, and the spaces of cameras.

Checks raise a `UserError` with the key, the value and what was expected."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces

from sparring.errors import UserError

_SIZES = (8, 4096)  # side of an image, pixels


def choice(key: str, value: Any, known: Iterable[str]) -> Any:
    """`value`, which is one of `known`."""
    if value not in tuple(known):
        raise UserError(f"env.kwargs.{key}={value!r}; expected {' or '.join(known)}")
    return value


def camera_list(given: Iterable[str] | str, known: Iterable[str]) -> list[str]:
    """The names of cameras. A name stands for a list of one."""
    cameras = [given] if isinstance(given, str) else list(given)
    if wrong := [camera for camera in cameras if camera not in tuple(known)]:
        raise UserError(f"env.kwargs.cameras: '{wrong[0]}' is unknown; this env has {', '.join(known) or 'no cameras'}")
    return cameras


def check_size(size: Any) -> None:
    low, high = _SIZES
    if isinstance(size, bool) or not isinstance(size, int) or not low <= size <= high:
        raise UserError(f"env.kwargs.image_size={size!r}; expected a whole number of pixels, {low} to {high}")


def check_depth(depth: Any, cameras: Any) -> None:
    if not isinstance(depth, bool):
        raise UserError(f"env.kwargs.depth={depth!r}; expected true or false")
    if depth and not cameras:
        raise UserError("env.kwargs.depth=true needs env.kwargs.cameras; name at least one camera")


def camera_spaces(cameras: Iterable[str], size: int, depth: bool) -> dict[str, spaces.Space]:
    """An image of each camera and, if `depth`, its depth in metres."""
    square = (size, size)
    found: dict[str, spaces.Space] = {camera: spaces.Box(0, 255, (*square, 3), np.uint8) for camera in cameras}
    if depth:
        found |= {f"{camera}_depth": spaces.Box(0, np.inf, square, np.float32) for camera in cameras}
    return found
