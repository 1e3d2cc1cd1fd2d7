"""HDF5 files of robomimic, which MimicGen, RoboCasa and LIBERO write as well. Torch-free. T steps of an episode.

data            attributes: env_args (JSON: the env and its settings), problem_info (LIBERO: JSON with the instruction)
data/demo_<i>   an episode; attribute ep_meta (RoboCasa: JSON with the instruction, `lang`)
  actions [T, A]   rewards [T]   dones [T]   states [T, ...] (of the simulator)
  obs/<key> [T, ...]: vectors, uint8 images [T, H, W, 3], point clouds [T, P, 3 or 6]
mask/<name>     names of episodes; train and valid: the split of robomimic's split_train_val.py
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparring.data.dataset import TASK, Dataset, DatasetError, Images, check_finite, numbered, scaled
from sparring.errors import UserError

ACTIONS = "actions"
# name in the file -> key of the dataset, with the meaning that it has in LeRobot's datasets
_RESULTS = {"rewards": "next.reward", "dones": "next.done"}
_PARTS = ("obs", ACTIONS, *_RESULTS)  # what is read of an episode
_POINT_SIZES = (3, 6)
_NO_OBSERVATIONS = "has no observations (obs); add them with dataset_states_to_obs.py of robomimic"


@dataclass(frozen=True)
class _FileImages:
    path: Path
    key: str  # obs/agentview_image
    demos: list[str]
    shape: tuple[int, int]

    def check(self) -> None:
        """The numbers were read from the same file."""

    def stamp(self) -> list[Any]:
        return [self.key, self.path.name, self.path.stat().st_size, self.path.stat().st_mtime_ns]

    def read(self, episode: int, height: int, width: int) -> np.ndarray:
        with _opened(self.path) as file:
            return scaled(file[f"data/{self.demos[episode]}/{self.key}"][:], height, width)


def read_robomimic(path: Path) -> Dataset:
    with _opened(path) as file:
        data = file.get("data")
        names = [name for name in data or () if re.fullmatch(r"demo_\d+", name)]
        if not names:
            raise DatasetError(f"'{path}' has no episodes data/demo_<i>; expected an HDF5 file of robomimic")
        demos = sorted(names, key=lambda name: int(name.removeprefix("demo_")))
        lengths = np.array([len(_part(path, data[name], ACTIONS)) for name in demos])
        if lengths.min() < 1:
            raise DatasetError(f"'{path}': {demos[int(lengths.argmin())]} has no steps; remove it")
        columns: dict[str, np.ndarray] = {}
        cameras: dict[str, Images] = {}
        unused = dict.fromkeys(set(data[demos[0]]) - set(_PARTS), "not an observation, action or reward")
        for name, part in _leaves(path, data[demos[0]]):
            shape, key = part.shape[1:], _RESULTS.get(name, name)
            if name.startswith("obs/") and len(shape) == 3 and shape[2] == 3 and part.dtype == np.uint8:
                cameras[key] = _FileImages(path, name, demos, shape[:2])
            elif part.dtype.kind in "biuf" and (len(shape) < 2 or len(shape) == 2 and shape[1] in _POINT_SIZES):
                columns[key] = _joined(path, data, demos, lengths, name, shape)
            else:
                unused[name] = f"{part.dtype} {list(part.shape)} is no vector, point cloud or uint8 image"
        for name in (image.key for image in cameras.values() if isinstance(image, _FileImages)):
            for demo, length in zip(demos, lengths, strict=True):
                _check_length(path, demo, name, _part(path, data[demo], name), length)
        info = _json(path, data.attrs, "env_args")
        whole = str(_json(path, data.attrs, "problem_info").get("language_instruction") or "")
        texts = [str(_json(path, data[demo].attrs, "ep_meta").get("lang") or whole) for demo in demos]
        masks = [name for name in ("train", "valid") if name in file.get("mask", ())]
        splits = {name: _split(path, file[f"mask/{name}"], name, demos) for name in masks}
    kwargs = info.get("env_kwargs")
    fps = kwargs.get("control_freq") if isinstance(kwargs, dict) else None
    rate = float(fps) if isinstance(fps, int | float) and fps > 0 else None
    instructions = {TASK: numbered(np.repeat(np.array(texts, object), lengths))}
    parts = (columns, lengths.astype(np.int64), cameras, instructions, info)
    dataset = Dataset(path, "robomimic HDF5", rate, *parts, unused=unused, splits=splits)
    check_finite(dataset)
    return dataset


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file; what h5py raises for damaged content becomes a DatasetError."""
    try:
        import h5py
    except ImportError:
        raise UserError('HDF5 files need h5py, which is not installed: pip install "sparring[demos]"') from None
    try:
        with h5py.File(path, "r") as file:
            yield file
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        why = " ".join(str(error).split())[:200]
        raise DatasetError(f"'{path}' is damaged or no HDF5 file of robomimic ({why}); copy it again") from None


def _leaves(path: Path, demo: Any) -> Iterator[tuple[str, Any]]:
    """(name, array) of an episode."""
    if not len(demo.get("obs", ())):
        raise DatasetError(f"'{path}' {_NO_OBSERVATIONS}")
    for name in sorted(demo["obs"]):
        yield f"obs/{name}", _part(path, demo, f"obs/{name}")
    for name in (ACTIONS, *_RESULTS):
        if name in demo:
            yield name, _part(path, demo, name)


def _part(path: Path, demo: Any, name: str) -> Any:
    part = demo.get(name)
    if getattr(part, "shape", ()) == ():
        raise DatasetError(f"'{path}': {demo.name.rpartition('/')[2]} has no array '{name}'; record it again")
    return part


def _joined(
    path: Path, data: Any, demos: list[str], lengths: np.ndarray, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    parts = []
    for demo, length in zip(demos, lengths, strict=True):
        part = _part(path, data[demo], name)
        _check_length(path, demo, name, part, length)
        if part.shape[1:] != shape:
            raise DatasetError(f"'{path}': {demo}/{name} has rows of {part.shape[1:]}, {demos[0]} of {shape}")
        parts.append(part[:])
    return np.concatenate(parts)


def _check_length(path: Path, demo: str, name: str, part: Any, length: int) -> None:
    if len(part) != length:
        raise DatasetError(f"'{path}': {demo}/{name} has {len(part)} rows, its actions have {length}; record it again")


def _json(path: Path, attributes: Any, name: str) -> dict[str, Any]:
    """A JSON attribute; {} if it is missing."""
    try:
        content = json.loads(attributes.get(name, "{}"))
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__}")
    except (ValueError, TypeError, RecursionError) as error:
        raise DatasetError(f"'{path}': the attribute {name} cannot be read ({error}); expected JSON") from None
    return content


def _split(path: Path, names: Any, split: str, demos: list[str]) -> np.ndarray:
    """The numbers of the episodes that a mask names."""
    number = {demo: index for index, demo in enumerate(demos)}
    listed = [name.decode() if isinstance(name, bytes) else str(name) for name in names[:]]
    unknown = [name for name in listed if name not in number]
    if unknown or not listed:
        raise DatasetError(f"'{path}': mask/{split} names {', '.join(unknown[:3]) or 'no episode'}; expected episodes")
    return np.array(sorted(number[name] for name in listed))
