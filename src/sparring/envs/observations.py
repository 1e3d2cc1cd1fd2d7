"""Maps the observation space of a gymnasium env to the observations of the contract. No torch.

Each entry of the space has a role: image/<name>, depth/<name>, points, state, instruction or ignore. Roles are inferred
from names, dtypes and shapes, or set by `env.roles`; an entry whose role is ambiguous is an error.
Letters: H, W image size, P points, T frames of a stack, S state dims."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sparring.config.text import shortened
from sparring.envs.backend import Arrays
from sparring.envs.configs import GymConfig
from sparring.errors import UserError

if TYPE_CHECKING:
    from sparring.envs.points import EnvCloud

ROLES = re.compile(r"(image|depth)/[A-Za-z0-9_.-]+|points|state|instruction|ignore")
INFO = "info"  # `info/<key>` names a text in the info of `reset`
_INFO_BYTES = 256  # maximum length of such a text in UTF-8
_MOST_CHOICES = 4096  # of a Discrete space, which becomes one number per choice
_SHOWN = 200  # characters of what an env returned
Convert = Callable[[Any], Any]
Path = tuple[str | int, ...]


@dataclass
class _Entry:
    """One leaf of the observation space, with the observations that are made of it."""

    path: Path
    space: spaces.Space | None  # None: a text in `info`
    role: str
    # (key of the contract, shape, dtype, conversion of a value); several for a stack of images
    parts: list[tuple[str, tuple[int, ...], str, Convert]]
    where: slice | None = None  # its place in "state"
    in_points: bool = False  # a depth that becomes points only

    @property
    def name(self) -> str:
        return "/".join(map(str, self.path)) or "observation"

    def value(self, observation: Any, info: dict) -> Any:
        if self.space is None:
            return info[self.path[1]]
        for key in self.path:
            observation = observation[key]
        return observation


class ObservationMap:
    def __init__(self, env: gymnasium.Env, config: GymConfig):
        self.env_name, roles = config.name, config.roles
        env_name = config.name
        self.stack = _stacked_frames(env)
        leaves = dict(_leaves(env.observation_space))
        paths = {"/".join(map(str, path)) or "observation": path for path in leaves}
        for key, role in roles.items():
            if key not in paths and not key.startswith(f"{INFO}/"):
                raise UserError(f"env.roles: {env_name} has no observation '{key}'; it has {', '.join(paths)}")
            if not ROLES.fullmatch(role):
                expected = "expected image/NAME, depth/NAME, points, state, instruction or ignore"
                raise UserError(f"env.roles={{{key}: {role}}}; {expected}")
        short = _short_names(list(leaves))
        self.entries: list[_Entry] = []
        for name, path in paths.items():
            role = roles.get(name) or self._infer(name, short[path], leaves[path])
            parts, in_points = self._parts(name, role, leaves[path]), bool(config.points) and name not in roles
            self.entries.append(_Entry(path, leaves[path], role, parts, in_points=in_points and "depth/" in role))
        for key in (key for key in roles if key.startswith(f"{INFO}/")):
            if roles[key] != "instruction":
                raise UserError(f"env.roles={{{key}: {roles[key]}}}; expected instruction, for a text in info")
            path = (INFO, key.removeprefix(f"{INFO}/"))
            part = ("instruction", (_INFO_BYTES,), "uint8", _utf8(_INFO_BYTES))
            self.entries.append(_Entry(path, None, "instruction", [part]))
        self.cloud: EnvCloud | None = None
        if config.points:
            from sparring.envs import points  # here, because it loads numba

            shapes = {key: shape for entry in self.entries for key, shape, *_ in entry.parts}
            self.cloud = points.EnvCloud(env.unwrapped, config, shapes, bool(self.stack))
        self.spec = self._spec()
        self.info_keys = [str(entry.path[1]) for entry in self.entries if entry.space is None]

    def write(self, observation: Any, info: dict, arrays: Arrays, row: int) -> None:
        """Write one observation into row `row` of the arrays of the contract."""
        for entry in self.entries:
            value = entry.value(observation, info) if entry.parts else None
            # an adapter's image is a function that draws it: only the observations of decisions are drawn
            value = value() if callable(value) else value
            for key, _, _, convert in entry.parts:
                if entry.in_points and self.cloud is not None:
                    self.cloud.depth[key][:] = convert(value)
                elif entry.where is None:
                    arrays[key][row] = convert(value)
                else:
                    arrays[key][row, entry.where] = convert(value)
        if self.cloud is not None:
            self.cloud.write(arrays, row)

    def check(self, observation: Any, info: dict) -> None:
        """Raise if the observation has other entries or shapes than the observation space."""
        for entry in self.entries:
            label = f"observation[{entry.name!r}]" if entry.path else "the observation"
            try:
                value = entry.value(observation, info)
            except (LookupError, TypeError):
                if entry.space is None:
                    got = f"reset() of {self.env_name} returned no info[{entry.path[1]!r}]"
                    raise UserError(f"{got}; return it at each reset, or remove it from env.roles") from None
                got = shortened(repr(observation), _SHOWN)
                expected = f"expected the key {entry.name!r}, as in its observation_space"
                raise UserError(f"the observation of {self.env_name} is {got}; {expected}") from None
            if entry.role == "instruction":
                if not isinstance(value, str):
                    raise UserError(f"{label} of {self.env_name} is {shortened(repr(value), _SHOWN)}; expected text")
            elif entry.space is not None and not callable(value) and np.shape(value) != entry.space.shape:
                raise UserError(
                    f"{label} of {self.env_name} has shape {np.shape(value)} but its observation_space has shape "
                    f"{entry.space.shape}; correct one of them in the env"
                )

    def describe(self) -> Iterator[tuple[str, str]]:
        """(entry of the env, what becomes of it)."""
        for entry in self.entries:
            if entry.space is None:
                given = "text"
            else:
                shape = "" if entry.space.shape is None else f" {list(entry.space.shape)}"
                given = f"{type(entry.space).__name__}{shape} {entry.space.dtype or ''}".rstrip()
            if entry.role == "state":
                made = f"state, {entry.parts[0][1][0]} numbers"
            else:
                made = ", ".join(key for key, *_ in entry.parts if not entry.in_points) or "ignored"
            if self.cloud is not None and "depth/" in entry.role:
                made = self.cloud.describe() if entry.in_points else f"{made}; {self.cloud.describe()}"
            yield entry.name, f"{given} -> {made}"

    @property
    def state_entries(self) -> tuple[tuple[str, int], ...]:
        return tuple((entry.name, entry.parts[0][1][0]) for entry in self.entries if entry.where is not None)

    def _spec(self) -> dict[str, tuple[tuple[int, ...], str]]:
        spec: dict[str, tuple[tuple[int, ...], str]] = {}
        size = 0
        for entry in self.entries:
            for key, shape, dtype, _ in entry.parts:
                if key == "state":
                    entry.where = slice(size, size + shape[0])
                    size += shape[0]
                elif key in spec:
                    both = " and ".join(f"'{e.name}'" for e in self.entries if key in [part[0] for part in e.parts])
                    advice = "give each another name by env.roles, or ignore one"
                    raise UserError(f"{both} of {self.env_name} have the same role {key}; {advice}")
                else:
                    spec[key] = shape, dtype
        for entry in (entry for entry in self.entries if entry.in_points):
            del spec[entry.role]
        if size:
            spec["state"] = (size,), "float32"
        if self.cloud is not None and "points" in spec:
            advice = "set env.points=0, or the role of its own points to ignore"
            raise UserError(f"env.points={self.cloud.count}: {self.env_name} has points of its own; {advice}")
        if self.cloud is not None:
            spec["points"] = self.cloud.shape, "float32"
        if not spec:
            raise UserError(f"no observation of {self.env_name} has a role other than ignore; change env.roles")
        return spec

    def _infer(self, name: str, short: str, space: spaces.Space) -> str:
        if isinstance(space, spaces.Text):
            return "instruction"
        if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
            return "state"
        if not isinstance(space, spaces.Box):
            raise UserError(
                f"observation '{name}' of {self.env_name} has the space {space}, which is not supported; expected Box, "
                f"Discrete, MultiDiscrete, MultiBinary or Text; set env.roles={{{name}: ignore}}, or wrap the env"
            )
        shape = space.shape[1:] if self.stack else space.shape
        words = name.lower()
        if len(shape) < 2:
            return "state"
        if space.dtype == np.uint8:
            is_image = len(shape) == 2 and min(shape) >= 8 or len(shape) in (3, 4) and _channels_last(shape) is not None
            if is_image and "depth" not in words:
                return f"image/{short}"
        elif "depth" in words and _depth_size(shape) is not None:
            return f"depth/{re.sub('^depth_|_depth$', '', short)}"  # the name of its camera
        elif len(shape) == 2 and shape[1] in (3, 6) and re.search(r"point|pcd|cloud", words):
            return "points"
        raise UserError(
            f"the role of observation '{name}' ({space.dtype} {list(space.shape)}) of {self.env_name} is ambiguous; "
            f"set env.roles={{{name}: ROLE}} to state (flattens it), image/{short}, depth/{short}, points or ignore"
        )

    def _parts(self, name: str, role: str, space: spaces.Space) -> list[tuple[str, tuple[int, ...], str, Convert]]:
        kind = role.partition("/")[0]
        if kind == "ignore":
            return []
        if kind == "instruction":
            if not isinstance(space, spaces.Text):
                raise self._unfit(name, role, space, "a Text space")
            length = 4 * space.max_length  # a character has at most four bytes
            return [(role, (length,), "uint8", _utf8(length))]
        if kind == "state":
            size, convert = self._vector(name, space)
            return [(role, (size,), "float32", convert)]
        if not isinstance(space, spaces.Box):
            raise self._unfit(name, role, space, "a Box")
        shape = space.shape[1:] if self.stack else space.shape
        frames = self.stack
        if kind == "image" and len(shape) == 4:
            if self.stack:
                raise self._unfit(name, role, space, "one stack of frames, not two")
            frames, shape = shape[0], shape[1:]
        if kind == "image":
            if (channels_last := _channels_last(shape)) is None:
                raise self._unfit(name, role, space, "uint8 [H, W], [H, W, 1 or 3] or [1 or 3, H, W]")
            pixels = shape[:2] if channels_last else shape[1:]
            convert, made = _image(space, len(shape), channels_last), ((3, *pixels), "uint8")
        elif kind == "depth":
            if (area := _depth_size(shape)) is None:
                raise self._unfit(name, role, space, "[H, W], [H, W, 1] or [1, H, W]")
            convert, made = (lambda value: np.reshape(value, (1, *area))), ((1, *area), "float32")
        else:
            if len(shape) != 2 or shape[1] not in (3, 6):
                raise self._unfit(name, role, space, "[P, 3 or 6]")
            convert, made = _unchanged, (shape, "float32")
        if not frames:
            return [(role, *made, convert)]
        if kind == "points":
            raise self._unfit(name, role, space, "one point cloud, not a stack of frames")

        def of_frame(index: int) -> Convert:
            return lambda value: convert(np.asarray(value[index]))

        return [(f"{role}_{index}", *made, of_frame(index)) for index in range(frames)]

    def _vector(self, name: str, space: spaces.Space) -> tuple[int, Convert]:
        if isinstance(space, spaces.Box | spaces.MultiBinary):
            return math.prod(space.shape), _unchanged if len(space.shape) == 1 else np.ravel
        if isinstance(space, spaces.Discrete):
            counts, starts = np.array([space.n]), np.array([space.start])
        elif isinstance(space, spaces.MultiDiscrete):
            counts, starts = space.nvec.ravel(), space.start.ravel()
        else:
            raise self._unfit(name, "state", space, "a Box, Discrete, MultiDiscrete or MultiBinary")
        if (total := int(counts.sum())) > _MOST_CHOICES:
            advice = f"wrap the env, or set env.roles={{{name}: ignore}}"
            raise UserError(
                f"observation '{name}' of {self.env_name} has {total} choices, at most {_MOST_CHOICES}; {advice}"
            )
        offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]) - starts

        def one_hot(value: Any) -> np.ndarray:
            vector = np.zeros(total, np.float32)
            vector[np.ravel(value) + offsets] = 1
            return vector

        return total, one_hot

    def _unfit(self, name: str, role: str, space: spaces.Space, expected: str) -> UserError:
        return UserError(f"env.roles={{{name}: {role}}}: {self.env_name} has {space} there; expected {expected}")


def _utf8(length: int) -> Convert:
    def convert(text: str) -> np.ndarray:
        row, encoded = np.zeros(length, np.uint8), text.encode()
        if len(encoded) > length:
            raise UserError(f"the instruction {text[:40]!r}... has {len(encoded)} bytes, at most {length}; shorten it")
        row[: len(encoded)] = np.frombuffer(encoded, np.uint8)
        return row

    return convert


def _unchanged(value: Any) -> Any:
    return value


def _image(space: spaces.Box, dims: int, channels_last: bool) -> Convert:
    # float images in 0..1 -> 0..255; then [H, W], [H, W, C] or [C, H, W] -> [3, H, W], where C = 1 is repeated
    is_float = np.issubdtype(space.dtype, np.floating)
    if is_float and not (space.low.min() >= 0 and space.high.max() <= 1):
        raise UserError(f"an image of {space.dtype} needs a Box with values of 0 to 1; got {space}")
    if not is_float and space.dtype != np.uint8:
        raise UserError(f"an image needs uint8, or floats of 0 to 1; got {space}")

    def convert(value: Any) -> np.ndarray:
        pixels = np.rint(np.asarray(value) * 255).astype(np.uint8) if is_float else value
        return np.moveaxis(pixels, -1, 0) if dims == 3 and channels_last else pixels

    return convert


def _channels_last(shape: tuple[int, ...]) -> bool | None:
    """Whether channels are the last axis of an image, or of the images of a stack [T, ...]; None: it is no image."""
    shape = shape[1:] if len(shape) == 4 else shape
    if len(shape) == 2 or len(shape) == 3 and shape[-1] in (1, 3):
        return True
    return False if len(shape) == 3 and shape[0] in (1, 3) else None


def _depth_size(shape: tuple[int, ...]) -> tuple[int, int] | None:
    if len(shape) == 3:
        shape = shape[:2] if shape[2] == 1 else shape[1:] if shape[0] == 1 else ()
    return (shape[0], shape[1]) if len(shape) == 2 else None


def _leaves(space: spaces.Space, path: Path = ()) -> Iterator[tuple[Path, spaces.Space]]:
    if isinstance(space, spaces.Dict):
        for key, inner in sorted(space.spaces.items()):
            yield from _leaves(inner, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, inner in enumerate(space.spaces):
            yield from _leaves(inner, (*path, index))
    else:
        yield path, space


def _short_names(paths: list[Path]) -> dict[Path, str]:
    """The last key of each path, or the whole path if another one has the same last key; "head" without a key."""
    last = [str(path[-1]) if path else "head" for path in paths]
    names = {}
    for path, name in zip(paths, last, strict=True):
        whole = name if last.count(name) == 1 else "_".join(map(str, path))
        names[path] = re.sub(r"[^A-Za-z0-9_.-]", "_", whole)
    return names


def _stacked_frames(env: gymnasium.Env) -> int:
    """T if a FrameStackObservation wrapper adds an axis of T frames, else 0."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.FrameStackObservation):
            return env.stack_size
        env = env.env
    return 0
