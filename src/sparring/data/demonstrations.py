"""Demonstrations: episodes of a dataset under the keys of the data contract, and as action chunks.

Opening a dataset that lacks requested content raises an error with what was expected and found. Training reads frames
at random: `cache=True` decodes every frame once, into memory-mapped files next to the dataset.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from sparring.config.text import value_text
from sparring.contract import EnvSpec
from sparring.data.buffer import check_whole
from sparring.data.dataset import TASK, Dataset, DatasetError, check_finite, read_dataset
from sparring.data.image_cache import decoded, open_cache
from sparring.data.mapping import ACTION, INSTRUCTION, POINTS, PRIVILEGED, STATE, KeyMap
from sparring.data.statistics import number_statistics

# entries of an env's observation in a dataset, besides images and the task
NUMBERS = (STATE, PRIVILEGED, POINTS)
_ROLES = {"observation.state": STATE, "observation.privileged": PRIVILEGED, "action": ACTION}


class Demonstrations:
    """A dataset of E episodes with F steps in total. `cameras`: None for all. `image_size`: None for the recorded size,
    an int to scale to a square, or (height, width) per camera.

    `keys`: roles of some keys of the dataset (mapping.py); `spec`: of the env whose observations the keys become, and
    into whose units actions are converted; None: any, and as recorded.
    `state_dim`, `action_dim`, `fps` and `control_mode`: the expected values; None accepts any. `resample`: take the
    steps that were current at the times of `fps`, instead of expecting it.
    `points`: how many points of each cloud to read; None for all. They are in the order of farthest-point sampling, so
    the first ones equal the observation of an env with `env.points` set to that number.
    `object_state`, as in the env: with "state", object poses are part of `observation.state`, even if they were
    recorded separately, as `observation.privileged`.
    """

    def __init__(
        self,
        source: str | Path | Dataset,
        cameras: Sequence[str] | None = None,
        image_size: int | Mapping[str, tuple[int, int]] | None = None,
        *,
        keys: Mapping[str, str] | None = None,
        spec: EnvSpec | None = None,
        state_dim: int | None = None,
        action_dim: int | None = None,
        fps: float | None = None,
        resample: bool = False,
        control_mode: str | None = None,
        points: int | None = None,
        object_state: str | None = None,
        cache: bool = False,
    ):
        if image_size is not None and not isinstance(image_size, Mapping):
            check_whole("image_size", image_size)
        self.dataset = dataset = source if isinstance(source, Dataset) else read_dataset(source)
        self.path = dataset.path
        parts = ("observation.state", "observation.privileged")
        joined = object_state == "state" and all(name in dataset.columns for name in parts)
        # as the env does: [F, S] and [F, W] -> [F, S + W]
        self.mapping = KeyMap(dataset, (dict.fromkeys(parts, STATE) if joined else {}) | dict(keys or {}), spec)
        # those of other programs may contain anything that is not used
        used = dataset.columns if dataset.is_own else [key for key in self.mapping.roles if key in dataset.columns]
        check_finite(dataset, used)
        self.fps = dataset.fps
        self.control_mode = dataset.extras.get("control_mode")
        self.lengths = dataset.lengths
        # [F]: the recorded step of each step; [E]: the recorded episode of each episode
        self.frames, self.numbers_of_episodes = np.arange(dataset.steps), np.arange(len(self.lengths))
        self._is_selected = False  # whether these are not all recorded steps in their order
        # under the names of LeRobot: [F, D], [F] (e.g. next.reward) or [F, P, 3 or 6] (points)
        self._columns = {name: values for name, values in dataset.columns.items() if name.startswith("next.")}
        for name, role in _ROLES.items():
            vectors = [dataset.columns[key].reshape(dataset.steps, -1) for key in self.mapping.keys(role)]
            if vectors:
                self._columns[name] = vectors[0] if len(vectors) == 1 else np.concatenate(vectors, axis=1)
        clouds = [dataset.columns[key] for key in self.mapping.keys(POINTS)]
        recorded = clouds[0].shape[1] if clouds else 0
        texts = (self.mapping.keys(INSTRUCTION) or [TASK])[0]
        self._task, self.instructions = dataset.texts[texts]
        # a joined state is as requested
        requested = None if joined else object_state
        rate = None if resample else fps
        self._check_request(cameras, state_dim, action_dim, rate, control_mode, points, recorded, requested)
        self.points = recorded if points is None else points
        if clouds:
            self._columns["observation.points"] = clouds[0][:, : self.points]
        self._to_units_of(spec)
        if resample and fps is not None:
            self._resample(fps)
        self._keys = self.mapping.cameras
        self.cameras = tuple(self._keys if cameras is None else cameras)
        for camera in self.cameras:
            dataset.cameras[self._keys[camera]].check()
        self.recorded_shapes = {camera: dataset.cameras[self._keys[camera]].shape for camera in self.cameras}
        if isinstance(image_size, Mapping):
            self.image_shapes = self.recorded_shapes | dict(image_size)
        else:
            square = image_size and (image_size, image_size)
            self.image_shapes = {camera: square or shape for camera, shape in self.recorded_shapes.items()}
        self._cache: dict[str, np.ndarray] = {}
        for camera in self.cameras if cache else ():
            self._cache[camera] = open_cache(dataset, self._keys[camera], camera, *self.image_shapes[camera])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def steps(self) -> int:
        return len(self.frames)

    @property
    def starts(self) -> np.ndarray:
        """[E + 1]: the first step of each episode among all steps."""
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def action_dim(self) -> int:
        return self.shape("action")[1]

    @property
    def action_names(self) -> list[str]:
        """The names of the entries in the dataset, or []."""
        return self.mapping.names(ACTION)

    @property
    def state_dim(self) -> int:
        """0 without a state."""
        return self.shape("observation.state")[1] if self.has("observation.state") else 0

    def has(self, feature: str) -> bool:
        return feature in self._columns

    def shape(self, feature: str) -> tuple[int, ...]:
        """Of `numbers`."""
        return self.steps, *self._columns[feature].shape[1:]

    def numbers(self, feature: str) -> np.ndarray:
        """A feature (LeRobot's name) of all steps: `[F, D]`, `[F]` (e.g. `next.reward`) or `[F, P, 6]` (points)."""
        return self._columns[feature][self.frames] if self._is_selected else self._columns[feature]

    @property
    def task_index(self) -> np.ndarray:
        """[F]: index into `instructions`."""
        return self._task[self.frames]

    def instruction(self, episode: int) -> str:
        return self.instructions[self.task_index[self._rows(episode).start]]

    def episode(self, episode: int) -> TensorDict:
        """The steps of an episode in time order, `[T]`; each action is a chunk of length 1."""
        rows = self._rows(episode)
        recorded, length = self.frames[rows], rows.stop - rows.start
        observation: dict = {"task": torch.from_numpy(self._task[recorded].astype(np.int64))}
        for name in NUMBERS:
            if self.has(feature := f"observation.{name}") and (name != POINTS or self.points):
                observation[name] = _floats(self._columns[feature][recorded])
        if self.cameras:
            observation["image"] = {camera: torch.from_numpy(self.images(camera, episode)) for camera in self.cameras}
        # optional in datasets; none distinguishes terminated from truncated
        flags = [name for name in ("success", "done") if self.has(f"next.{name}")]
        after = {name: torch.from_numpy(self._columns[f"next.{name}"][recorded].astype(bool)) for name in flags}
        if self.has("next.reward"):
            after["reward"] = _floats(self._columns["next.reward"][recorded])[:, None]
        action = _floats(self._columns["action"][recorded])[:, None]
        td = {"observation": observation, "action": action, "is_first": torch.arange(length) == 0}
        return TensorDict(td | ({"next": after} if after else {}), [length])

    def images(self, camera: str, episode: int) -> np.ndarray:
        """`[T, 3, H, W]` uint8 of an episode, decoded or copied from the cache."""
        self._check_camera(camera)
        recorded = self.frames[self._rows(episode)]
        if camera in self._cache:
            return np.array(self._cache[camera][recorded])
        number = int(self.numbers_of_episodes[episode])
        whole = decoded(self.dataset, self._keys[camera], camera, number, *self.image_shapes[camera])
        return whole[recorded - self.dataset.starts[number]]

    def image_cache(self, camera: str) -> np.ndarray:
        """uint8 images of all recorded steps `[..., 3, H, W]`, memory-mapped; those of step i are at `frames[i]`."""
        self._check_camera(camera)
        if camera not in self._cache:
            raise DatasetError(f"'{self.path}' has no cache of '{camera}'; open it with cache=True")
        return self._cache[camera]

    def select(self, episodes: np.ndarray) -> "Demonstrations":
        """The demonstrations of these episodes only."""
        chosen, starts = copy.copy(self), self.starts
        chosen.__dict__.pop("statistics", None)
        chosen.frames = np.concatenate([self.frames[starts[e] : starts[e + 1]] for e in episodes])
        chosen.lengths = self.lengths[episodes]
        chosen.numbers_of_episodes, chosen._is_selected = self.numbers_of_episodes[episodes], True
        return chosen

    def split(self, share: float) -> tuple["Demonstrations", "Demonstrations"]:
        """For training, and held out: the split of the dataset if it has one, else `share` of the episodes, evenly
        spaced, so that they cover a dataset that is sorted by task."""
        everything, splits = np.arange(len(self)), self.dataset.splits
        if "valid" in splits:
            held_out = splits["valid"]
            train = splits.get("train", everything)
        else:
            count = max(1, round(share * len(self)))
            held_out = np.unique(((np.arange(count) + 0.5) * len(self) / count).astype(np.int64))
            train = everything
        train = np.setdiff1d(train, held_out)
        if not len(train):
            has = f"'{self.path}' has {len(self)} episode{'s'[: len(self) > 1]}, and {len(held_out)} would be held out"
            raise DatasetError(f"{has}; record more, or lower imitate.held_out")
        return self.select(train), self.select(held_out)

    @cached_property
    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """Statistics of "observation/state", "observation/privileged" and "action", from stats.json or computed."""
        found = {}
        for feature in filter(self.has, _ROLES):
            # those of the dataset are of whole keys and of all recorded steps
            is_recorded = not self._is_selected and self.mapping.keys(_ROLES[feature]) == [feature]
            given = self.dataset.statistics.get(feature, {}) if is_recorded and feature not in self._converted else {}
            values = self.numbers(feature)
            for name, value in given.items():
                if name != "count" and value.size != values.shape[1]:
                    wrong = f"{name} of {feature} has {value.size} entries, expected {values.shape[1]}"
                    raise DatasetError(f"'{self.path}/meta/stats.json': {wrong}; copy the dataset again")
            found[feature.replace(".", "/")] = number_statistics(values) | given
        return found

    def recorded_with(self, key: str, requested: Any = None) -> str:
        """The setting of the recorded env, for an error message; "" if it equals `requested` or is unknown."""
        recorded = self.dataset.extras.get("env", {}).get(key, requested)
        return "" if recorded == requested else f"; it was recorded with env.{key}={value_text(recorded)}"

    def report(self) -> Iterator[str]:
        """What becomes of each key, of the images and of the rate, line by line; see also `warnings`."""
        rate = f"{self.dataset.fps:g} steps/s" if self.dataset.fps else "steps/s unknown"
        sizes = f"{len(self.dataset.lengths):,} episodes, {self.dataset.steps:,} steps"
        yield f"{self.path}: {self.dataset.kind}, {sizes}, {rate}"
        yield from (f"  {key}: {use}" for key, use in self.mapping.describe())
        for camera, before in self.recorded_shapes.items():
            if (now := self.image_shapes[camera]) != before:
                stretch = abs(now[0] * before[1] / (now[1] * before[0]) - 1)
                changed = f", which changes the aspect ratio by {stretch:.0%}" if stretch > 0.01 else ""
                yield f"  image/{camera} is scaled from {before[0]} x {before[1]} to {now[0]} x {now[1]}{changed}"
        if self.fps != self.dataset.fps:
            yield f"  steps are resampled from {self.dataset.fps:g} to {self.fps:g} per second: {self.steps} steps"

    def _to_units_of(self, spec: EnvSpec | None) -> None:
        """Convert actions of another program to those of the contract, in which -1 and 1 are the env's bounds."""
        # actions that the env cannot execute
        self.warnings: list[str] = []
        self._converted: set[str] = set()
        actions = self._columns["action"]
        if spec is None or self.dataset.is_own:
            return
        if spec.discrete_actions:
            if not (np.isin(actions, range(spec.discrete_actions))).all():
                least, most = actions.min(), actions.max()
                expected = f"the env has the choices 0 to {spec.discrete_actions - 1}"
                raise DatasetError(f"'{self.path}': actions are numbers of {least:g} to {most:g}, {expected}")
            return
        low, high = np.full(actions.shape[1], -1.0), np.full(actions.shape[1], 1.0)
        if spec.action_low:
            low, high = np.array(spec.action_low), np.array(spec.action_high)
            scale = np.where(high > low, (high - low) / 2, 1)
            self._columns["action"] = ((actions - (low + high) / 2) / scale).astype(np.float32)
            self._converted.add("action")
        # a thousandth of the range, for rounding
        beyond = (np.abs(self._columns["action"]) > 1.001).mean(axis=0)
        for entry in np.flatnonzero(beyond):
            found = f"{actions[:, entry].min():.3g} to {actions[:, entry].max():.3g}"
            bounds = f"the env accepts {low[entry]:.3g} to {high[entry]:.3g}"
            clipped = f"it clips {beyond[entry]:.1%} of the steps"
            self.warnings.append(f"{self.path}: action[{entry}] is {found}, {bounds}: {clipped}")

    def _resample(self, fps: float) -> None:
        """At each time of the new rate, take the step that was current: the newest one that had begun."""
        if self.dataset.fps is None:
            fix = f"its steps cannot be resampled to {fps:g} per second; set imitate.fps=ignore"
            raise DatasetError(f"'{self.path}' states no rate: {fix}")
        if self.dataset.fps == fps:
            return
        ratio, starts, taken = self.dataset.fps / fps, self.dataset.starts, []
        for start, length in zip(starts, self.lengths, strict=False):
            count = max(1, math.ceil(length / ratio - 1e-9))
            taken.append(start + np.minimum((np.arange(count) * ratio + 1e-9).astype(np.int64), length - 1))
        self.frames, self.fps, self._is_selected = np.concatenate(taken), fps, True
        self.lengths = np.array([len(rows) for rows in taken])

    def _check_camera(self, camera: str) -> None:
        if camera not in self.cameras:
            raise DatasetError(f"'{self.path}' was opened with cameras {list(self.cameras)}, without '{camera}'")

    def _rows(self, episode: int) -> slice:
        if not 0 <= episode < len(self):
            raise IndexError(f"episode {episode} of {len(self)}; expected 0 to {len(self) - 1}")
        starts = self.starts
        return slice(int(starts[episode]), int(starts[episode + 1]))

    def _check_request(self, cameras, state_dim, action_dim, fps, control_mode, points, recorded, object_state) -> None:
        """Raise one error for all differences from the expected content."""
        mistakes = []
        is_own, present = self.dataset.is_own, self.mapping.cameras
        # if object_state is as requested, a different number of entries means a different task
        about = (object_state and self.recorded_with("object_state", object_state)) or self.recorded_with("task")
        about = about if is_own or state_dim is None else self.mapping.state_advice()
        controlled = self.recorded_with("control_mode", control_mode)
        if missing := [camera for camera in cameras or () if camera not in present]:
            shown = ", ".join(present if is_own or present else map(str, self.dataset.cameras)) or "none"
            fix = f"use env.cameras=[{','.join(present)}]" if is_own else self.mapping.camera_advice(missing)
            mistakes.append(f"cameras: expected {', '.join(cameras)}, found {shown}; {fix}")
        advice = "; set imitate.fps=resample (for absolute actions) or imitate.fps=ignore"
        for name, expected, found, fix in (
            ("entries of observation.state", state_dim, self.state_dim, about),
            ("entries of an action", action_dim, self.action_dim, controlled),
            ("frames/s", fps if self.fps else None, self.fps, advice),
            ("control mode", control_mode, self.control_mode or "none", controlled),
        ):
            if expected is not None and expected != found:
                mistakes.append(f"{name}: expected {expected}, found {found}{fix}")
        if points and points > recorded:
            mistakes.append(f"points per step: expected {points}, found {recorded or 'none'}")
        if mistakes:
            advice = "use the settings it was recorded with, or record another dataset"
            advice = advice if is_own else "change these settings, or use another dataset"
            raise DatasetError("\n".join([f"'{self.path}' does not match the config; {advice}:", *mistakes]))


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
