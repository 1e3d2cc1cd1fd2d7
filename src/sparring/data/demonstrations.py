"""Demonstrations: episodes of a LeRobotDataset v3.0 folder, under the keys of the data contract.

    demos = Demonstrations("outputs/demos/lift_d0", cameras=["head"], image_size=64)
    len(demos), demos.lengths             episodes, and the steps of each
    demos.episode(3)                      TensorDict [T]: observation/*, action [T, 1, A], next/*
    demos.instruction(3)                  what was asked for, in words
    demos.statistics["action"]["q99"]     mean, std, min, max, q01, ..., q99

What was asked for and is not there is refused when it is opened, with what was found and what was expected. Training
reads random windows: `cache=True` decodes every picture once, into memory-mapped files beside the folder.
"""

import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tensordict import TensorDict

from sparring.data import statistics, video
from sparring.data.lerobot import POINTS, Clip, DatasetError, check_videos, read_dataset, video_features
from sparring.data.sizes import check_whole
from sparring.errors import UserError

# feature of LeRobot -> our key
_VECTORS = {"observation.state": "state", "observation.privileged": "privileged"}


class Demonstrations:
    """E episodes, F steps in all. Cameras None: all there are; image_size None: as recorded, else scaled to a square.

    `state_dim`, `action_dim`, `fps` and `control_mode` are what the reader expects; None: whatever it is.
    `points`: so many of each cloud are read; None: all. They come in the order of farthest-point sampling, so the first
    ones are what env.points of that many shows.
    """

    def __init__(
        self,
        path: str | Path,
        cameras: Sequence[str] | None = None,
        image_size: int | None = None,
        *,
        state_dim: int | None = None,
        action_dim: int | None = None,
        fps: float | None = None,
        control_mode: str | None = None,
        points: int | None = None,
        cache: bool = False,
    ):
        if image_size is not None:
            check_whole("image_size", image_size)
        self.dataset = read_dataset(path)
        self.path = self.dataset.path
        self.fps = self.dataset.info["fps"]
        self.control_mode = self.dataset.extras.get("control_mode")
        self.instructions = self.dataset.instructions
        self.lengths = self.dataset.lengths
        # [E + 1]: where each episode begins among all steps
        self.starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._features = {_camera_name(key): key for key in video_features(self.dataset.info)}
        recorded = self.dataset.columns[POINTS].shape[1] if POINTS in self.dataset.columns else 0
        self._expect(cameras, state_dim, action_dim, fps, control_mode, points, recorded)
        self.points = recorded if points is None else points
        self.cameras = tuple(self._features if cameras is None else cameras)
        for camera in self.cameras:
            check_videos(self.dataset, self._features[camera])
        self.recorded_shapes = {camera: self._image_shape(camera, None) for camera in self.cameras}
        self.image_shapes = {camera: self._image_shape(camera, image_size) for camera in self.cameras}
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
        """0 where there is no state."""
        return self.numbers("observation.state").shape[1] if "observation.state" in self.dataset.columns else 0

    def numbers(self, feature: str) -> np.ndarray:
        """`[F, D]` of all steps (`[F]` of `next.reward` and the like, `[F, P, 6]` of points), by LeRobot's name."""
        values = self.dataset.columns[feature]
        if feature == POINTS:
            return values[:, : self.points]
        return values.reshape(self.steps, -1) if feature in ("action", *_VECTORS) else values

    def instruction(self, episode: int) -> str:
        return self.instructions[self.dataset.columns["task_index"][self._rows(episode).start]]

    def episode(self, episode: int) -> TensorDict:
        """Its steps in time order, `[T]`; an action is a chunk of one."""
        rows = self._rows(episode)
        columns, length = self.dataset.columns, rows.stop - rows.start
        observation = {"task": torch.from_numpy(columns["task_index"][rows].astype(np.int64))}
        for feature, name in _VECTORS.items():
            if feature in columns:
                observation[name] = _floats(self.numbers(feature)[rows])
        if self.points:
            observation["points"] = _floats(self.numbers(POINTS)[rows])
        if self.cameras:
            observation["image"] = {camera: torch.from_numpy(self.images(camera, episode)) for camera in self.cameras}
        is_first = torch.zeros(length, dtype=torch.bool)
        is_first[0] = True
        action = _floats(self.numbers("action")[rows])[:, None]
        # not every dataset has them
        after = {}
        if "next.reward" in columns:
            after["reward"] = _floats(columns["next.reward"][rows])[:, None]
        if "next.success" in columns:
            after["success"] = torch.from_numpy(columns["next.success"][rows].astype(bool))
        if "next.done" in columns:
            # whether it was over or out of time is not said in a dataset
            after["done"] = torch.from_numpy(columns["next.done"][rows].astype(bool))
        td = {"observation": observation, "action": action, "is_first": is_first}
        return TensorDict(td | ({"next": after} if after else {}), [length])

    def images(self, camera: str, episode: int) -> np.ndarray:
        """`[T, 3, H, W]` uint8 of an episode, decoded now or copied from the cache."""
        self._check_camera(camera)
        if camera in self._cache:
            return np.array(self._cache[camera][self._rows(episode)])
        return self._decode(camera, episode)

    def image_cache(self, camera: str) -> np.ndarray:
        """`[F, 3, H, W]` uint8 of all steps, memory-mapped; episode i is `starts[i]` to `starts[i + 1]`."""
        self._check_camera(camera)
        if camera not in self._cache:
            raise DatasetError(f"'{self.path}' was opened without cache=True; there is no cache of '{camera}'")
        return self._cache[camera]

    @cached_property
    def statistics(self) -> dict[str, dict[str, np.ndarray]]:
        """Of "observation/state", "observation/privileged" and "action": those of stats.json, the rest worked out."""
        found = {}
        for feature in (*_VECTORS, "action"):
            if feature in self.dataset.columns:
                told, size = self.dataset.statistics.get(feature, {}), self.numbers(feature).shape[1]
                wrong = [name for name, value in told.items() if name != "count" and value.size != size]
                if wrong:
                    seen = f"{wrong[0]} of {feature} has {told[wrong[0]].size} entries"
                    raise DatasetError(f"'{self.path}/meta/stats.json': {seen}, expected {size}")
                found[feature.replace(".", "/")] = statistics.of_numbers(self.numbers(feature)) | told
        return found

    def _check_camera(self, camera: str) -> None:
        if camera not in self.cameras:
            raise DatasetError(f"'{self.path}' was opened with cameras {list(self.cameras)}; there is no '{camera}'")

    def _rows(self, episode: int) -> slice:
        if not 0 <= episode < len(self):
            raise IndexError(f"episode {episode} of {len(self)}")
        return slice(int(self.starts[episode]), int(self.starts[episode + 1]))

    def _expect(self, cameras, state_dim, action_dim, fps, control_mode, points, recorded) -> None:
        """All that is not as expected, at once."""
        mistakes = []
        pictures = [key for key, feature in self.dataset.info["features"].items() if feature["dtype"] == "image"]
        missing = [camera for camera in cameras or () if camera not in self._features]
        if missing:
            there = ", ".join(self._features) or ("pictures in its parquet files only" if pictures else "none")
            mistakes.append(f"cameras: expected {', '.join(cameras)}, found {there}")
        for name, expected, found in (
            ("entries of observation.state", state_dim, self.state_dim),
            ("entries of an action", action_dim, self.action_dim),
            ("frames/s", fps, self.fps),
            ("control mode", control_mode, self.control_mode or "none said"),
        ):
            if expected is not None and expected != found:
                mistakes.append(f"{name}: expected {expected}, found {found}")
        if points and points > recorded:
            mistakes.append(f"points a step: expected {points}, found {recorded or 'none'}")
        if mistakes:
            advice = "give the config it was recorded with, or record another dataset"
            raise DatasetError("\n".join([f"'{self.path}' is not what is asked for; {advice}:", *mistakes]))

    def _image_shape(self, camera: str, image_size: int | None) -> tuple[int, int]:
        """(H, W) of what is read."""
        if image_size is not None:
            return image_size, image_size
        shape = self.dataset.info["features"][self._features[camera]]["shape"]
        # some write [3, H, W] instead of [H, W, 3]
        height, width = shape[1:] if shape[0] == 3 else shape[:2]
        return height, width

    def _clip(self, camera: str, episode: int) -> Clip:
        return self.dataset.clips[self._features[camera]][episode]

    def _decode(self, camera: str, episode: int) -> np.ndarray:
        clip = self._clip(camera, episode)
        length, shape = int(self.lengths[episode]), self.image_shapes[camera]
        try:
            frames = video.decode(clip.file, clip.start, length, self.fps, *shape)
        except UserError as error:
            raise DatasetError(f"{error} (episode {episode}, camera {camera})") from None
        # [T, H, W, 3] -> [T, 3, H, W]
        return np.ascontiguousarray(frames.transpose(0, 3, 1, 2))

    def _cached(self, camera: str) -> np.ndarray:
        """Decoded before, or now. The name tells which files it was made of, so an old one is never taken for new."""
        height, width = self.image_shapes[camera]
        files = sorted({self._clip(camera, episode).file for episode in range(len(self))})
        made_of = [(str(file.relative_to(self.path)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        mark = hashlib.sha256(repr((made_of, self.lengths.tolist())).encode()).hexdigest()[:12]
        folder = self.path.resolve()
        folder = folder.with_name(f"{folder.name}.cache")
        file = folder / f"{camera}-{height}x{width}-{mark}.npy"
        shape = (self.steps, 3, height, width)
        if (cache := _open_cache(file, shape)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{file.stem}.{os.getpid()}.partial"
            store = np.lib.format.open_memmap(partial, mode="w+", dtype=np.uint8, shape=shape)
            for episode in range(len(self)):
                store[self._rows(episode)] = self._decode(camera, episode)
            store.flush()
            os.replace(partial, file)
            cache = _open_cache(file, shape)
        return cache


def _open_cache(file: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """None where there is none yet, or a torn one."""
    try:
        cache = np.load(file, mmap_mode="r")
    except (FileNotFoundError, ValueError, EOFError):
        return None
    return cache if cache.shape == shape and cache.dtype == np.uint8 else None


def _camera_name(feature: str) -> str:
    """'observation.images.head' -> 'head'."""
    return feature.removeprefix("observation.").removeprefix("images.")


def _floats(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))
