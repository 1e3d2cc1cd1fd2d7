"""Gymnasium's spaces in our terms: observations as "state" and "image/...", actions in [-1, 1] or as an index.

Letters: C steps of an action chunk, A action dims, S state dims.
"""

from typing import Any

import numpy as np
from gymnasium import spaces

from sparring.envs.backend import Arrays
from sparring.errors import UserError


class ObservationMap:
    """A gymnasium observation space -> "state" float32 [S] and "image/<name>" uint8 [3, H, W]."""

    def __init__(self, space: spaces.Space, env_name: str):
        self.env_name = env_name
        # (key in a Dict observation or None, its space, our key, where in "state" or None: all of it, conversion)
        self.parts = []
        self.spec: dict[str, tuple[tuple[int, ...], str]] = {}
        entries = sorted(space.spaces.items()) if isinstance(space, spaces.Dict) else [(None, space)]
        size = 0
        for key, entry in entries:
            if _is_image(entry):
                name = f"image/{key or 'head'}"
                shape, convert = self._image(entry)
                self.spec[name] = (shape, "uint8")
                self.parts.append((key, entry, name, None, convert))
            else:
                length, convert = self._vector(entry)
                where = None if key is None else slice(size, size + length)
                self.parts.append((key, entry, "state", where, convert))
                size += length
        if size:
            self.spec["state"] = ((size,), "float32")

    def write(self, observation: Any, arrays: Arrays, row: int) -> None:
        for key, _, name, where, convert in self.parts:
            value = observation if key is None else observation[key]
            if convert is not None:
                value = convert(value)
            # a gray picture [1, H, W] is repeated into [3, H, W] by broadcasting
            if where is None:
                arrays[name][row] = value
            else:
                arrays[name][row, where] = value

    def check(self, observation: Any) -> None:
        """A wrong shape would otherwise be broadcast silently."""
        for key, space, *_ in self.parts:
            value = observation if key is None else observation[key]
            if np.shape(value) != space.shape:
                label = "the observation" if key is None else f"observation[{key!r}]"
                raise UserError(
                    f"{label} of {self.env_name} has shape {np.shape(value)} but its observation_space says "
                    f"{space.shape}; make the two agree"
                )

    def _vector(self, space: spaces.Space):
        if isinstance(space, spaces.Discrete):
            one_hot, start = np.eye(int(space.n), dtype=np.float32), int(space.start)
            return int(space.n), lambda value: one_hot[int(value) - start]
        if isinstance(space, spaces.Box) and not (space.dtype == np.uint8 and len(space.shape) > 1):
            return int(np.prod(space.shape)), None if len(space.shape) == 1 else np.ravel
        raise self._unsupported(space)

    def _image(self, space: spaces.Box):
        # [H, W, 1 or 3] or [1 or 3, H, W] -> [3, H, W]
        if space.shape[-1] in (1, 3):
            return (3, *space.shape[:2]), lambda value: np.moveaxis(value, -1, 0)
        if space.shape[0] in (1, 3):
            return (3, *space.shape[1:]), None
        raise self._unsupported(space)

    def _unsupported(self, space: spaces.Space) -> UserError:
        return UserError(
            f"observation space {space} of {self.env_name} is not supported; expected a Box of numbers, a uint8 Box "
            "[H, W, 1 or 3] or [1 or 3, H, W] (an image), a Discrete, or a flat Dict of these; wrap the env so that "
            "it shows one of them (gymnasium.wrappers.FlattenObservation, TransformObservation)"
        )


class ActionMap:
    """Our actions [C, A] -> the env's own. `discrete` is its number of choices, 0 for continuous actions."""

    def __init__(self, space: spaces.Space, env_name: str):
        self.space, self.env_name = space, env_name
        if isinstance(space, spaces.Discrete):
            self.dim, self.discrete = 1, int(space.n)
        elif isinstance(space, spaces.Box):
            self.dim, self.discrete = int(np.prod(space.shape)), 0
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            bounded = np.isfinite(low) & np.isfinite(high)
            # where a side is open there is nothing to scale to: the action stays as it is
            low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
            self._scale, self._center = (high - low) / 2, (high + low) / 2
        else:
            raise UserError(
                f"action space {space} of {env_name} is not supported; expected a Box or a Discrete; wrap the env "
                "so that it takes one of them (gymnasium.wrappers.TransformAction)"
            )

    def decode(self, action: np.ndarray) -> list[list[Any]]:
        """`[N, C, A]` floats -> N lists of C actions of the env."""
        chunk = action.shape[1]
        # [N, C, A] -> [N*C, ...], listed once because walking through an array row by row is slow
        flat = list((self._indices if self.discrete else self._box)(action.reshape(-1, self.dim)))
        return [flat[start : start + chunk] for start in range(0, len(flat), chunk)]

    def _indices(self, action: np.ndarray) -> np.ndarray:
        # [B, 1] -> [B]
        index = np.rint(action[:, 0])
        # written so that NaN is wrong too
        valid = (index >= 0) & (index < self.discrete)
        # `all` of a small array takes five times as long
        if np.count_nonzero(valid) != valid.size:
            raise UserError(
                f"action {action[~valid][0, 0]} of {self.env_name} is not an index in 0..{self.discrete - 1}"
            )
        # numpy integers, which `Discrete.contains` checks three times faster than Python's
        index = index.astype(self.space.dtype)
        return index + self.space.start if self.space.start else index

    def _box(self, action: np.ndarray) -> np.ndarray:
        if np.count_nonzero(np.isfinite(action)) != action.size:
            raise UserError(f"the action for {self.env_name} holds NaN or inf; the policy's weights have diverged")
        # [B, A] -> [B, *the env's own shape]; np.clip would take three times as long
        action = np.minimum(np.maximum(action, -1.0), 1.0).reshape(-1, *self.space.shape)
        action = np.minimum(np.maximum(self._center + self._scale * action, self.space.low), self.space.high)
        if np.issubdtype(self.space.dtype, np.integer):
            action = np.rint(action)
        return action.astype(self.space.dtype)


def _is_image(space: spaces.Space) -> bool:
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3
