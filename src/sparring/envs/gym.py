"""One gymnasium env as a robot: actions in [-1, 1] or an index, observations of the contract. No torch.
Letters: C steps of an action chunk, A action dims, S state dims."""

import contextlib
import importlib
import inspect
import json
import math
import warnings
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.envs import registration

from sparring.config.resolve import resolve
from sparring.config.text import shortened
from sparring.contract import EnvSpec
from sparring.envs import SIMS
from sparring.envs.backend import Arrays, Picture
from sparring.envs.configs import GymConfig
from sparring.envs.observations import ObservationMap
from sparring.errors import UserError, describe_error

_INSTALL = 'pip install "sparring[gym]" installs what gymnasium\'s own envs need'
_SHOWN = 200  # characters of what an env returned
_MOST_ACTIONS = 4096  # combinations of several discrete actions
# env.name -> why MuJoCo cannot render in this process: a second attempt would end the process without an exception
_NO_OPENGL: dict[str, str] = {}


class ActionMap:
    """Maps actions [C, A] of the contract to actions of the env. `discrete`: number of choices, 0 if continuous."""

    def __init__(self, space: spaces.Space, env_name: str):
        self.space: Any = space
        self.env_name = env_name
        self.low: tuple[float, ...] = ()  # the env's own numbers for -1 and 1; (): discrete
        self.high: tuple[float, ...] = ()
        if isinstance(space, spaces.Discrete):
            self.dim, self.discrete = 1, int(space.n)
        elif isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
            # one index for each combination of choices
            self._counts = np.ravel(space.nvec) if isinstance(space, spaces.MultiDiscrete) else np.full(space.n, 2)
            self.dim, self.discrete = 1, math.prod(map(int, np.ravel(self._counts)))
            if self.discrete > _MOST_ACTIONS:
                has = f"action space {space} of {env_name} has {self.discrete} combinations, at most {_MOST_ACTIONS}"
                raise UserError(f"{has}; wrap the env to accept fewer (gymnasium.wrappers.TransformAction)")
        elif isinstance(space, spaces.Box):
            self.dim, self.discrete = int(np.prod(space.shape)), 0
            low, high = space.low.astype(np.float64), space.high.astype(np.float64)
            bounded = np.isfinite(low) & np.isfinite(high)
            low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)  # not scaled if unbounded
            self.low, self.high = tuple(low.ravel().tolist()), tuple(high.ravel().tolist())
            self._scale, self._center = (high - low) / 2, (high + low) / 2
        else:
            raise UserError(
                f"action space {space} of {env_name} is not supported; expected a Box, Discrete, MultiDiscrete or "
                "MultiBinary; wrap the env to accept one of them (gymnasium.wrappers.TransformAction)"
            )

    def decode(self, action: np.ndarray) -> list[list[Any]]:
        """Convert `[N, C, A]` floats to N lists of C actions of the env."""
        chunk = action.shape[1]
        # [N, C, A] -> [N*C, ...], converted to a list once: iterating over the rows of an array is slow
        flat = list((self._indices if self.discrete else self._box)(action.reshape(-1, self.dim)))
        return [flat[start : start + chunk] for start in range(0, len(flat), chunk)]

    def encode(self, action: np.ndarray) -> np.ndarray:
        """Convert a continuous action of the env to `[A]` in [-1, 1]."""
        return ((np.asarray(action, np.float64) - self._center) / np.where(self._scale, self._scale, 1)).ravel()

    def _indices(self, action: np.ndarray) -> np.ndarray:
        index = np.rint(action[:, 0])
        valid = (index >= 0) & (index < self.discrete)
        if np.count_nonzero(valid) != valid.size:
            wrong = action[~valid][0, 0]
            raise UserError(f"action {wrong} of {self.env_name} is not an index in 0..{self.discrete - 1}")
        if not isinstance(self.space, spaces.Discrete):
            # [B] -> [B, choices], the last choice varies fastest
            choices = np.stack(np.unravel_index(index.astype(np.int64), tuple(self._counts)), -1)
            choices = choices.reshape(-1, *self.space.shape).astype(self.space.dtype)
            return choices + getattr(self.space, "start", 0)
        index = index.astype(self.space.dtype)  # `Discrete.contains` is faster for this dtype
        return index + self.space.start if self.space.start else index

    def _box(self, action: np.ndarray) -> np.ndarray:
        if np.count_nonzero(np.isfinite(action)) != action.size:
            raise UserError(f"the action for {self.env_name} holds NaN or inf; the policy's weights have diverged")
        # [B, A] -> [B, *shape of the action space]; np.clip takes three times as long
        action = np.minimum(np.maximum(action, -1.0), 1.0).reshape(-1, *self.space.shape)
        action = np.minimum(np.maximum(self._center + self._scale * action, self.space.low), self.space.high)
        if np.issubdtype(self.space.dtype, np.integer):
            action = np.rint(action)
        return action.astype(self.space.dtype)


class GymRobot:
    """A gymnasium env with an `EnvSpec`. It does not reset itself: `GymBatch` holds the seeds."""

    def __init__(self, config: GymConfig, max_episode_steps: int | None = None):
        self.env, self._limit = _make_env(config, max_episode_steps)
        self._name = config.name
        self.observations = ObservationMap(self.env, config)
        self.actions = ActionMap(self.env.action_space, config.name)
        self.spec = EnvSpec(
            observation=self.observations.spec,
            action_dim=self.actions.dim,
            discrete_actions=self.actions.discrete,
            task_names=(config.name,),
            max_episode_steps=self._limit,
            reports_success=config.success_return is not None,
            control_hz=float(self.env.metadata.get("render_fps") or 30.0),
            has_control_hz=bool(self.env.metadata.get("render_fps")),
            action_low=self.actions.low,
            action_high=self.actions.high,
            state_entries=self.observations.state_entries,
        )
        # while recording, `frames` holds one [H, W, 3] frame per step of the latest chunk
        self.recording = False
        self.frames: list[Picture] = []
        # MuJoCo's window library logs many warnings if it is incomplete; `no_picture` has the reason
        warnings.filterwarnings("ignore", module="glfw")
        self.no_picture: str | None = None  # why the env cannot be drawn; None: no reason known so far
        if self.env.render_mode != "rgb_array":
            mode = f"{config.name} has render_mode={self.env.render_mode!r}, expected 'rgb_array'"
            needed = "the env must accept render_mode and list 'rgb_array' in metadata['render_modes']"
            self.no_picture = f"{mode}; {needed}"
        self._success_return = config.success_return
        self.reports_success = config.success_return is not None  # or as soon as an info contains it
        self._observation: Any = None  # the latest observation of the env; None before the first reset
        self._info: dict = {}  # of the latest reset
        self._return, self._elapsed = 0.0, 0

    def reset(self, seed: int) -> None:
        result = self.env.reset(seed=seed)
        try:
            self._observation, self._info = result
        except (TypeError, ValueError):
            raise self._unlike("reset", result, "a pair (observation, info)") from None
        self.observations.check(self._observation, self._info)
        self._return, self._elapsed = 0.0, 0

    def step(self, actions: list[Any], rewards: np.ndarray) -> tuple[int, bool, bool, bool]:
        """Execute actions of the env one after another until the episode ends. Fill `rewards` [C]; return executed,
        terminated, truncated, success."""
        if self.recording:
            self.frames = []
        for index, action in enumerate(actions):
            result = self.env.step(action)
            try:
                self._observation, reward, terminated, truncated, info = result
            except (TypeError, ValueError):
                raise self._unlike("step", result, "(observation, reward, terminated, truncated, info)") from None
            try:
                rewards[index] = reward
                self._return += reward  # type: ignore[operator]
            except (TypeError, ValueError):
                raise UserError(f"step() of {self._name} returned the reward {reward!r}; expected a number") from None
            self._elapsed += 1
            if self._elapsed == self._limit:
                truncated = True
            if self.recording and (picture := self.render()) is not None:
                self.frames.append(picture)
            if terminated or truncated:
                break
        threshold, ended = self._success_return, terminated or truncated
        success = ended and threshold is not None and self._return >= threshold
        for key in ("is_success", "success") if info else ():
            if key in info:
                self.reports_success, success = True, bool(info[key])
        return index + 1, terminated, truncated, success

    def write(self, arrays: Arrays, row: int) -> None:
        try:
            self.observations.write(self._observation, self._info, arrays, row)
        except (TypeError, ValueError, LookupError):
            self.observations.check(self._observation, self._info)
            raise

    def _unlike(self, method: str, result: Any, expected: str) -> UserError:
        return UserError(f"{method}() of {self._name} returned {shortened(repr(result), _SHOWN)}; expected {expected}")

    def render(self) -> np.ndarray | None:
        """Return a `[H, W, 3]` uint8 frame, or None and set `no_picture` to the reason."""
        self.no_picture = self.no_picture or _NO_OPENGL.get(self._name)
        if self.no_picture is not None or self._observation is None:
            return None
        try:
            picture = self.env.render()
            return None if picture is None else np.array(picture, np.uint8)  # the env may reuse its buffer
        except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
            self.no_picture = f"{error}; {_INSTALL}"
        except Exception as error:  # rendering is optional: no error in it may end a run
            self.no_picture = f"render() of {self._name} failed: {describe_error(error)}"
            if type(error).__module__ == "mujoco":
                advice = "install the GL library EGL or OSMesa, and set MUJOCO_GL=egl or MUJOCO_GL=osmesa"
                self.no_picture = _NO_OPENGL[self._name] = f"MuJoCo cannot draw {self._name} here ({error}); {advice}"
        return None

    def state(self) -> Arrays | None:
        """Return the state that determines the rest of the episode, or None if the env does not provide it."""
        if (inner := self._inner_state()) is None:
            return None
        generator = self.env.np_random.bit_generator.state
        counts = {"elapsed": self._elapsed, "return": float(self._return)}
        texts = {key: self._info[key] for key in self.observations.info_keys}
        return pack({"inner": inner, "np_random": generator, "info": texts, **counts})

    def set_state(self, state: Arrays) -> None:
        saved, env = unpack(state), self.env
        self._observation, _ = env.reset(seed=0)  # the first reset of an env may create what its step needs
        if hasattr(env, "set_state"):
            env.set_state(saved["inner"])
        else:
            for name, value in saved["inner"].items():
                setattr(env, name, value)
        env.np_random.bit_generator.state = saved["np_random"]
        self._return, self._elapsed, self._info = saved["return"], saved["elapsed"], saved["info"]

    def close(self) -> None:
        self.env.close()

    def _inner_state(self) -> Any:
        env = self.env
        if isinstance(env, gymnasium.Wrapper):
            return None  # a wrapper may have state of its own
        if hasattr(env, "get_state") and hasattr(env, "set_state"):
            return env.get_state()
        # the complete list of variables is known for these envs only
        if type(env).__module__.startswith("gymnasium.envs.classic_control"):
            names = ("state", "steps_beyond_terminated", "last_u")
            return {name: getattr(env, name) for name in names if hasattr(env, name)}
        return None


def _make_env(config: GymConfig, max_episode_steps: int | None) -> tuple[gymnasium.Env, int]:
    """Create the env `config.name`, with rendering if supported. Returns the env and its time limit (0: none)."""
    source, _, name = config.name.partition(":")
    if not name:
        others = ", ".join(f"{prefix}:<task>" for prefix in SIMS)
        raise UserError(f"env.name={config.name!r}; expected gym:<gymnasium id>, {others} or your.module:Class")
    try:
        if source == "gym":
            limit = {} if max_episode_steps is None else {"max_episode_steps": max_episode_steps}
            env = gymnasium.make(name, **{**_render_kwargs(_creator(name)), **config.kwargs, **limit})
        elif source in SIMS:
            env = resolve(SIMS[source], {}, "env")(name, **config.kwargs)
        else:
            creator = resolve(config.name, {}, "env")
            env = creator(**{**_render_kwargs(creator), **config.kwargs})
    except (gymnasium.error.Error, ImportError, AttributeError, TypeError) as error:
        is_missing = isinstance(error, ImportError | gymnasium.error.DependencyNotInstalled)
        hint = f"; {_INSTALL}" if is_missing else ""
        raise UserError(f"{cannot_be_created(config, error)}{hint}") from error
    if not isinstance(env, gymnasium.Env):
        what = f"env.name={config.name} created a {type(env).__name__}, expected a gymnasium.Env"
        raise UserError(f"{what}; return the env")
    if env.render_mode is None and "rgb_array" in (env.metadata.get("render_modes") or ()):
        # a function created it without render_mode; most envs read the mode only when they render
        with contextlib.suppress(AttributeError):
            env.unwrapped.render_mode = "rgb_array"
    own_limit = env.spec.max_episode_steps if env.spec else getattr(env, "max_episode_steps", None)
    # GymRobot counts steps itself: without these wrappers a step is faster and the state is complete
    while env.spec and type(env) in (wrappers.TimeLimit, wrappers.OrderEnforcing, wrappers.PassiveEnvChecker):
        env = env.env  # type: ignore[attr-defined]
    return env, max_episode_steps or own_limit or 0


def cannot_be_created(config: GymConfig, error: Exception) -> str:
    return f"env.name={config.name} cannot be created with env.kwargs={config.kwargs}: {error}"


def _creator(env_id: str) -> Any:
    """The class or function of a gymnasium id ("CartPole-v1", "module:Id-v0"); None if only `make` can find it."""
    module, _, name = env_id.rpartition(":")
    if module:
        importlib.import_module(module)
    entry = registration.registry.get(name)
    if entry is None or not isinstance(entry.entry_point, str):
        return entry and entry.entry_point
    return registration.load_env_creator(entry.entry_point)


def _render_kwargs(creator: Any) -> dict:
    """Arguments that enable rendering: gymnasium fixes the render mode when an env is created."""
    if inspect.isfunction(creator):  # the render modes of its env are not known before the call
        return {"render_mode": "rgb_array"} if "render_mode" in inspect.signature(creator).parameters else {}
    metadata = getattr(creator, "metadata", None)
    if not isinstance(metadata, dict) or "rgb_array" not in metadata.get("render_modes", ()):
        return {}
    parameters = inspect.signature(creator).parameters.values()
    takes_it = any(p.name == "render_mode" or p.kind == p.VAR_KEYWORD for p in parameters)
    return {"render_mode": "rgb_array"} if takes_it else {}


def pack(value: Any) -> Arrays:
    """Convert nested dicts, lists, tuples, numbers, text and arrays to plain arrays; their structure is JSON text."""
    arrays: Arrays = {}

    def outline(node: Any) -> Any:
        if isinstance(node, np.ndarray | np.generic):
            arrays[str(len(arrays))] = np.array(node)
            return {"scalar" if isinstance(node, np.generic) else "array": str(len(arrays) - 1)}
        if isinstance(node, dict):
            return {"dict": [[key, outline(item)] for key, item in node.items()]}
        if isinstance(node, list | tuple):
            return {type(node).__name__: [outline(item) for item in node]}
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise TypeError(f"an env state holds a {type(node).__name__}; expected arrays, numbers, text, dicts or lists")

    text = json.dumps(outline(value))
    return {**arrays, "outline": np.frombuffer(text.encode(), np.uint8).copy()}


def unpack(arrays: Arrays) -> Any:
    """The inverse of `pack`."""

    def build(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        ((kind, content),) = node.items()
        if kind == "array":
            return np.array(arrays[content])
        if kind == "scalar":
            return arrays[content][()]
        if kind == "dict":
            return {key: build(item) for key, item in content}
        return (tuple if kind == "tuple" else list)(build(item) for item in content)

    return build(json.loads(arrays["outline"].tobytes()))
