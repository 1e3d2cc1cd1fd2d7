"""Demonstrations: episodes of a LeRobotDataset v3.0 folder under the keys of the data contract, and as action chunks.

Opening a dataset that lacks requested content raises an error with what was expected and found. Training reads frames
at random: `cache=True` decodes every frame once, into memory-mapped files next to the folder.
"""

import hashlib
import logging
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from sparring.config.text import value_text
from sparring.contract import EnvSpec
from sparring.data import lerobot, video
from sparring.data.buffer import check_whole
from sparring.data.lerobot import POINTS, DatasetError, read_dataset
from sparring.errors import UserError
from sparring.processes.child import usable_cores

log = logging.getLogger(__name__)

# entries of an env's observation in a dataset, besides images and the task
_NUMBERS = ("state", "privileged", "points")
_VECTORS = ("observation.state", "observation.privileged", "action")


class Demonstrations:
    """A dataset of E episodes with F steps in total. `cameras`: None for all. `image_size`: None for the recorded size,
    an int to scale to a square, or (height, width) per camera.

    `state_dim`, `action_dim`, `fps` and `control_mode`: the expected values; None accepts any.
    `points`: how many points of each cloud to read; None for all. They are in the order of farthest-point sampling, so
    the first ones equal the observation of an env with `env.points` set to that number.
    `object_state`, as in the env: with "state", object poses are part of `observation.state`, even if they were
    recorded separately, as `observation.privileged`.
    """

    def __init__(
        self,
        path: str | Path,
        cameras: Sequence[str] | None = None,
        image_size: int | Mapping[str, tuple[int, int]] | None = None,
        *,
        state_dim: int | None = None,
        action_dim: int | None = None,
        fps: float | None = None,
        control_mode: str | None = None,
        points: int | None = None,
        object_state: str | None = None,
        cache: bool = False,
    ):
        if image_size is not None and not isinstance(image_size, Mapping):
            check_whole("image_size", image_size)
        self.dataset = read_dataset(path)
        self.path = self.dataset.path
        columns, names = self.dataset.columns, _VECTORS[:2]
        if joined := object_state == "state" and all(name in columns for name in names):
            # as the env does: [F, S] and [F, W] -> [F, S + W]
            parts = [columns.pop(name).reshape(len(columns["index"]), -1) for name in names]
            columns["observation.state"] = np.concatenate(parts, axis=1)
            # these were statistics of the parts; they are computed again on demand
            self.dataset.statistics.update(dict.fromkeys(names, {}))
        self.fps = self.dataset.info["fps"]
        self.control_mode = self.dataset.extras.get("control_mode")
        self.instructions = self.dataset.instructions
        self.lengths = self.dataset.lengths
        # [E + 1]: the first step of each episode among all steps
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        # "head" -> "observation.images.head"
        self._features = {key.removeprefix("observation.").removeprefix("images."): key for key in self.dataset.clips}
        recorded = self.dataset.columns[POINTS].shape[1] if POINTS in self.dataset.columns else 0
        # a joined state is as requested
        requested = None if joined else object_state
        self._check_request(cameras, state_dim, action_dim, fps, control_mode, points, recorded, requested)
        self.points = recorded if points is None else points
        self.cameras = tuple(self._features if cameras is None else cameras)
        for camera in self.cameras:
            self.dataset.check_videos(self._features[camera])
        self.recorded_shapes = {camera: self._recorded_shape(camera) for camera in self.cameras}
        if isinstance(image_size, Mapping):
            self.image_shapes = self.recorded_shapes | dict(image_size)
        else:
            square = image_size and (image_size, image_size)
            self.image_shapes = {camera: square or shape for camera, shape in self.recorded_shapes.items()}
        self._cache = {camera: self._cached(camera) for camera in self.cameras} if cache else {}

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def steps(self) -> int:
        return int(self.starts[-1])

    @property
    def action_dim(self) -> int:
        return self.numbers("action").shape[1]

    @property
    def state_dim(self) -> int:
        """0 without a state."""
        return self.numbers("observation.state").shape[1] if "observation.state" in self.dataset.columns else 0

    def numbers(self, feature: str) -> np.ndarray:
        """A feature (LeRobot's name) of all steps: `[F, D]`, `[F]` (e.g. `next.reward`) or `[F, P, 6]` (points)."""
        values = self.dataset.columns[feature]
        if feature == POINTS:
            return values[:, : self.points]
        return values.reshape(self.steps, -1) if feature in _VECTORS else values

    def instruction(self, episode: int) -> str:
        return self.instructions[self.dataset.columns["task_index"][self._rows(episode).start]]

    def episode(self, episode: int) -> TensorDict:
        """The steps of an episode in time order, `[T]`; each action is a chunk of length 1."""
        rows = self._rows(episode)
        columns, length = self.dataset.columns, rows.stop - rows.start
        observation: dict = {"task": torch.from_numpy(columns["task_index"][rows].astype(np.int64))}
        for name in _NUMBERS:
            if (feature := f"observation.{name}") in columns and (name != "points" or self.points):
                observation[name] = _floats(self.numbers(feature)[rows])
        if self.cameras:
            observation["image"] = {camera: torch.from_numpy(self.images(camera, episode)) for camera in self.cameras}
        # optional in datasets; none distinguishes terminated from truncated
        flags = [name for name in ("success", "done") if f"next.{name}" in columns]
        after = {name: torch.from_numpy(columns[f"next.{name}"][rows].astype(bool)) for name in flags}
        if "next.reward" in columns:
            after["reward"] = _floats(columns["next.reward"][rows])[:, None]
        action = _floats(self.numbers("action")[rows])[:, None]
        td = {"observation": observation, "action": action, "is_first": torch.arange(length) == 0}
        return TensorDict(td | ({"next": after} if after else {}), [length])

    def images(self, camera: str, episode: int) -> np.ndarray:
        """`[T, 3, H, W]` uint8 of an episode, decoded or copied from the cache."""
        self._check_camera(camera)
        if camera in self._cache:
            return np.array(self._cache[camera][self._rows(episode)])
        return self._decode(camera, episode)

    def image_cache(self, camera: str) -> np.ndarray:
        """`[F, 3, H, W]` uint8 of all steps, memory-mapped; episode i spans `starts[i]` to `starts[i + 1]`."""
        self._check_camera(camera)
        if camera not in self._cache:
            raise DatasetError(f"'{self.path}' has no cache of '{camera}'; open it with cache=True")
        return self._cache[camera]

    @cached_property
    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """Statistics of "observation/state", "observation/privileged" and "action", from stats.json or computed."""
        found = {}
        for feature in _VECTORS:
            if feature not in self.dataset.columns:
                continue
            given, values = self.dataset.statistics.get(feature, {}), self.numbers(feature)
            for name, value in given.items():
                if name != "count" and value.size != values.shape[1]:
                    wrong = f"{name} of {feature} has {value.size} entries, expected {values.shape[1]}"
                    raise DatasetError(f"'{self.path}/meta/stats.json': {wrong}; copy the dataset again")
            found[feature.replace(".", "/")] = lerobot.number_statistics(values) | given
        return found

    def recorded_with(self, key: str, requested: Any = None) -> str:
        """The setting of the recorded env, for an error message; "" if it equals `requested` or is unknown."""
        recorded = self.dataset.extras.get("env", {}).get(key, requested)
        return "" if recorded == requested else f"; it was recorded with env.{key}={value_text(recorded)}"

    def _check_camera(self, camera: str) -> None:
        if camera not in self.cameras:
            raise DatasetError(f"'{self.path}' was opened with cameras {list(self.cameras)}, without '{camera}'")

    def _rows(self, episode: int) -> slice:
        if not 0 <= episode < len(self):
            raise IndexError(f"episode {episode} of {len(self)}; expected 0 to {len(self) - 1}")
        return slice(int(self.starts[episode]), int(self.starts[episode + 1]))

    def _check_request(self, cameras, state_dim, action_dim, fps, control_mode, points, recorded, object_state) -> None:
        """Raise one error for all differences from the expected content."""
        mistakes = []
        # if object_state is as requested, a different number of entries means a different task
        about = (object_state and self.recorded_with("object_state", object_state)) or self.recorded_with("task")
        controlled = self.recorded_with("control_mode", control_mode)
        embedded = [key for key, feature in self.dataset.info["features"].items() if feature["dtype"] == "image"]
        missing = [camera for camera in cameras or () if camera not in self._features]
        if missing:
            present = ", ".join(self._features) or ("only images in its parquet files" if embedded else "none")
            fix = f"env.cameras=[{','.join(self._features)}]"
            mistakes.append(f"cameras: expected {', '.join(cameras)}, found {present}; use {fix}")
        for name, expected, found, fix in (
            ("entries of observation.state", state_dim, self.state_dim, about),
            ("entries of an action", action_dim, self.action_dim, controlled),
            ("frames/s", fps, self.fps, ""),
            ("control mode", control_mode, self.control_mode or "none", controlled),
        ):
            if expected is not None and expected != found:
                mistakes.append(f"{name}: expected {expected}, found {found}{fix}")
        if points and points > recorded:
            mistakes.append(f"points per step: expected {points}, found {recorded or 'none'}")
        if mistakes:
            advice = "use the settings it was recorded with, or record another dataset"
            raise DatasetError("\n".join([f"'{self.path}' does not match the config; {advice}:", *mistakes]))

    def _recorded_shape(self, camera: str) -> tuple[int, int]:
        shape = self.dataset.info["features"][self._features[camera]]["shape"]
        # [H, W, 3], or [3, H, W] from some writers
        return tuple(shape[1:] if shape[0] == 3 else shape[:2])

    def _decode(self, camera: str, episode: int) -> np.ndarray:
        file, start = self.dataset.clips[self._features[camera]][episode]
        self.dataset.files.verify([file])
        try:
            frames = video.decode(file, start, int(self.lengths[episode]), self.fps, *self.image_shapes[camera])
        except UserError as error:
            raise DatasetError(f"{error} (episode {episode}, camera {camera})") from None
        # [T, H, W, 3] -> [T, 3, H, W]
        return np.ascontiguousarray(frames.transpose(0, 3, 1, 2))

    def _cached(self, camera: str) -> np.ndarray:
        """The cache of a camera, created if missing. Its name contains a hash of the source files."""
        height, width = self.image_shapes[camera]
        files = sorted({file for file, _ in self.dataset.clips[self._features[camera]]})
        sources = [(str(file.relative_to(self.path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        mark = hashlib.sha256(repr((sources, self.lengths.tolist())).encode()).hexdigest()[:12]
        folder = self.path.resolve().with_name(f"{self.path.resolve().name}.cache")
        file = folder / f"{camera}-{height}x{width}-{mark}.npy"
        shape = (self.steps, 3, height, width)
        if (cache := self._open_cache(file, shape)) is None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / f"{file.stem}.{os.getpid()}.partial"
                self._write_cache(partial, camera, shape, _first_sum(file))
                os.replace(partial, file)
            except OSError as error:
                why = error.strerror or error
                raise DatasetError(f"'{file}': cannot store decoded images ({why}); make room") from None
            cache = np.load(file, mmap_mode="r")
        return cache

    def _write_cache(self, file: Path, camera: str, shape: tuple[int, ...], first_sum: int) -> None:
        """Write an array in numpy's format, followed by one checksum per episode."""
        sums = []
        # not through a memory map: on a full disk that would kill the process
        with file.open("wb") as opened:
            np.lib.format.write_array_header_1_0(opened, {"descr": "|u1", "fortran_order": False, "shape": shape})
            for episode in range(len(self)):
                frames = self._decode(camera, episode)
                sums.append(zlib.crc32(frames.data, first_sum))
                opened.write(frames.data)
            opened.write(np.array(sums, np.uint32).tobytes())

    def _open_cache(self, file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
        """The cache, or None if it is missing or damaged; reads all of it to compare checksums."""
        if not os.path.lexists(file):
            return None
        try:
            if not file.is_file():
                raise ValueError("not a regular file")
            cache = np.load(file, mmap_mode="r")
            with file.open("rb") as opened:
                opened.seek(-4 * len(self), os.SEEK_END)
                written = np.frombuffer(opened.read(), np.uint32)
            size = cache.offset + cache.nbytes + 4 * len(self)
            is_complete = cache.shape == shape and cache.dtype == np.uint8 and file.stat().st_size == size
        except (OSError, ValueError, EOFError, AttributeError):
            is_complete = False
        if is_complete:
            episodes, first_sum = (cache[self._rows(i)] for i in range(len(self))), _first_sum(file)
            with ThreadPoolExecutor(usable_cores()) as pool:
                found = pool.map(lambda frames: zlib.crc32(np.ascontiguousarray(frames).data, first_sum), episodes)
                if np.array_equal(list(found), written):
                    return cache
        log.warning("'%s' is damaged or from an earlier version; its frames are decoded again", file)
        return None


def _first_sum(file: Path) -> int:
    """The initial checksum: with it, the file of another camera under this name does not verify."""
    return zlib.crc32(file.name.encode())


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


class ActionChunks:
    """`sample(B)`: observations of uniformly drawn steps, and the `horizon` actions from each of them on.

    Observations match an env with `spec`: other entries are omitted, vectors are padded to its sizes, and
    `observation/task` indexes its instructions. Images are of the cameras that the datasets were opened with, which
    needs cache=True. Uses the first `episodes` of each dataset (None: all). B drawn steps, H steps of a chunk, A action
    dims, F steps.
    """

    def __init__(
        self, demonstrations: Sequence[Demonstrations], horizon: int, spec: EnvSpec, episodes: int | None = None
    ):
        self.demonstrations, self.horizon = list(demonstrations), horizon
        self.lengths = [demos.lengths[:episodes] for demos in self.demonstrations]
        # first step of each dataset among the F steps, and the end of the last dataset
        self._starts = np.cumsum([0] + [int(lengths.sum()) for lengths in self.lengths])
        # [E]: length and first step of each episode; [F]: the end of the episode of each step
        self.episode_lengths = torch.from_numpy(np.concatenate(self.lengths).astype(np.int64))
        self.first_steps = self.episode_lengths.cumsum(0) - self.episode_lengths
        self._ends = self.episode_lengths.cumsum(0).repeat_interleave(self.episode_lengths)
        self._cameras = [camera for camera in demonstrations[0].cameras if f"image/{camera}" in spec.observation]
        shown = {name: spec.observation[name][0] for name in _NUMBERS if name in spec.observation}
        self._refuse_missing_entries(spec, shown)
        self._observation = {name: self._joined(f"observation.{name}", shape) for name, shape in shown.items()}
        # which instruction each step has [F]; free text [I, L], or None where the env lists its instructions
        self._texts: torch.Tensor | None = None
        if "instruction" in spec.observation:
            self._texts, self._task = self._text_of_each_step(spec)
        else:
            self._task = self._task_of_each_step(spec)
        self._action = self._joined("action", (spec.action_dim,))
        self._action_padding = spec.action_padding

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def episodes(self) -> int:
        return sum(len(lengths) for lengths in self.lengths)

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        """`[B]`: `observation/*`, `action [B, H, A]`, `valid [B, H]` (false after the end), and `step` in 0..F-1."""
        step = torch.randint(len(self), (batch_size,), generator=generator)
        valid = step[:, None] + torch.arange(self.horizon) < self._ends[step, None]
        drawn = {"observation": self.observation(step), "action": self.actions(step), "valid": valid, "step": step}
        return TensorDict(drawn, [batch_size])

    def observation(self, step: torch.Tensor) -> dict:
        """The observation at the steps [B]."""
        found: dict = {name: values[step] for name, values in self._observation.items()}
        if self._texts is None:
            found["task"] = self._task[step]
        else:
            found["instruction"] = self._texts[self._task[step]]
        if self._cameras:
            found["image"] = {camera: self._images(camera, step.numpy()) for camera in self._cameras}
        return found

    def actions(self, step: torch.Tensor) -> torch.Tensor:
        """`[B, H, A]` from the steps [B] on; after the end of an episode, its last action is repeated."""
        following, ends = step[:, None] + torch.arange(self.horizon), self._ends[step, None]
        return self._action[following.clamp(max=ends - 1)]

    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """Statistics of used steps: "observation/state", "observation/privileged" and "action" (without padding)."""
        vectors = {name: values for name, values in self._observation.items() if values.ndim == 2}
        found = {f"observation/{name}": lerobot.number_statistics(values.numpy()) for name, values in vectors.items()}
        scored = self._action[:, : self._action.shape[1] - self._action_padding]
        return found | {"action": lerobot.number_statistics(scored.numpy())}

    def _joined(self, feature: str, shape: tuple[int, ...]) -> torch.Tensor:
        """`[F, *shape]` float32 of all datasets, with vectors padded by zeros."""
        parts = []
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            values = np.asarray(demos.numbers(feature)[:steps], np.float32).reshape(steps, -1)
            parts.append(np.pad(values, ((0, 0), (0, math.prod(shape) - values.shape[1]))))
        return torch.from_numpy(np.concatenate(parts).reshape(-1, *shape))

    def _images(self, camera: str, step: np.ndarray) -> torch.Tensor:
        """`[B, 3, H, W]` uint8."""
        dataset = np.searchsorted(self._starts, step, side="right") - 1
        caches = [demos.image_cache(camera) for demos in self.demonstrations]
        images = np.empty((len(step), *caches[0].shape[1:]), np.uint8)
        for number, cache in enumerate(caches):
            here = dataset == number
            images[here] = cache[step[here] - self._starts[number]]
        return torch.from_numpy(images)

    def _text_of_each_step(self, spec: EnvSpec) -> tuple[torch.Tensor, torch.Tensor]:
        """The instructions `[I, L]` of all datasets as UTF-8, and the index of each step `[F]`."""
        rows: list[np.ndarray] = []
        indices, (length,) = [], spec.observation["instruction"][0]
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            indices.append(len(rows) + demos.dataset.columns["task_index"][:steps])
            for text in map(str.encode, demos.instructions):
                if len(text) > length:
                    has = f"the instruction {text.decode()[:40]!r}... has {len(text)} bytes"
                    raise DatasetError(f"'{demos.path}': {has}, the env's observation/instruction holds {length}")
                rows.append(np.frombuffer(text.ljust(length, b"\0"), np.uint8))
        return torch.from_numpy(np.stack(rows)), torch.from_numpy(np.concatenate(indices).astype(np.int64))

    def _task_of_each_step(self, spec: EnvSpec) -> torch.Tensor:
        """`[F]`: indices into spec.instructions, matched by text, because each dataset has its own numbering."""
        parts = []
        for demos, steps in zip(self.demonstrations, np.diff(self._starts), strict=True):
            index = demos.dataset.columns["task_index"][:steps]
            used = [demos.instructions[i] for i in np.unique(index)]
            unknown = [text for text in used if text not in spec.instructions]
            if unknown:
                raise DatasetError(
                    f"'{demos.path}' demonstrates {', '.join(map(repr, unknown))}; the instructions of the env are "
                    f"{', '.join(map(repr, dict.fromkeys(spec.instructions)))}: set env.task to the recorded task"
                )
            known = [spec.instructions.index(text) if text in spec.instructions else -1 for text in demos.instructions]
            parts.append(np.array(known)[index])
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    def _refuse_missing_entries(self, spec: EnvSpec, shown: dict[str, tuple[int, ...]]) -> None:
        for demos in self.demonstrations:
            mistakes = []
            for name, shape in shown.items():
                recorded = f"observation.{name}" in demos.dataset.columns
                found = demos.numbers(f"observation.{name}").reshape(demos.steps, -1).shape[1] if recorded else 0
                # a state may be padded
                if not found or found > math.prod(shape) or (name != "state" and found < math.prod(shape)):
                    mistake = f"observation.{name}: expected {math.prod(shape)} entries, found {found or 'none'}"
                    # a different number of entries means a different task
                    key = {"privileged": "object_state", "points": "points"}.get(name, "task") if not found else "task"
                    mistakes.append(mistake + demos.recorded_with(key))
            for name in spec.observation:
                if (kind := name.partition("/")[0]) in ("depth", "segmentation"):
                    fix = f"set env.{kind}=false"
                    mistakes.append(f"observation/{name}: part of the env's observation, but never recorded; {fix}")
            if mistakes:
                raise DatasetError("\n".join([f"'{demos.path}' does not match the env's observation:", *mistakes]))
