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

from sparring.data.dataset import TASK, Dataset, DatasetError, Images, is_vector_or_cloud, numbered, scaled
from sparring.errors import UserError

ACTIONS = "actions"
# name in the file -> key of the dataset, with the meaning that it has in LeRobot's datasets
_RESULTS = {"rewards": "next.reward", "dones": "next.done"}
_PARTS = ("obs", ACTIONS, *_RESULTS)  # what is read of an episode
_MOST_HZ = 1e6
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
            return scaled(_part(self.path, file, f"data/{self.demos[episode]}/{self.key}")[:], height, width)


def read_robomimic(path: Path) -> Dataset:
    with _opened(path) as file:
        data = _child(path, file, "data")
        names = [name for name in data or () if re.fullmatch(r"demo_\d+", name)]
        if not names:
            raise DatasetError(f"'{path}' has no episodes data/demo_<i>; expected an HDF5 file of robomimic")
        demos = sorted(names, key=lambda name: int(name.removeprefix("demo_")))
        lengths = np.array([len(_part(path, data, f"{name}/{ACTIONS}")) for name in demos])
        if lengths.min() < 1:
            raise DatasetError(f"'{path}': {demos[int(lengths.argmin())]} has no steps; remove it")
        columns: dict[str, np.ndarray] = {}
        cameras: dict[str, Images] = {}
        unused = dict.fromkeys(set(data[demos[0]]) - set(_PARTS), "not an observation, action or reward")
        for name, part in _leaves(path, data[demos[0]]):
            if getattr(part, "shape", ()) == ():
                unused[name] = "not an array of steps"
                continue
            shape, key, is_seen = part.shape[1:], _RESULTS.get(name, name), name.startswith("obs/")
            if is_seen and len(shape) == 3 and shape[2] == 3 and part.dtype == np.uint8:
                cameras[key] = _FileImages(path, name, demos, shape[:2])
            elif part.dtype.kind in "biuf" and is_vector_or_cloud(shape, is_seen):
                columns[key] = _joined(path, data, demos, lengths, name, shape)
            else:
                unused[name] = f"{part.dtype} {list(part.shape)} is no vector, point cloud or uint8 image"
        for name in (image.key for image in cameras.values() if isinstance(image, _FileImages)):
            for demo, length in zip(demos, lengths, strict=True):
                _check_length(path, demo, name, _part(path, data, f"{demo}/{name}"), length)
        settings = _json(path, data.attrs, "env_args").get("env_kwargs")
        whole = str(_json(path, data.attrs, "problem_info").get("language_instruction") or "")
        texts = [str(_json(path, data[demo].attrs, "ep_meta").get("lang") or whole) for demo in demos]
        masks = [name for name in ("train", "valid") if name in list(_child(path, file, "mask") or ())]
        splits = {name: _split(path, _part(path, file, f"mask/{name}"), name, demos) for name in masks}
    rate = settings.get("control_freq") if isinstance(settings, dict) else None
    if rate is not None and not (isinstance(rate, int | float) and 0 < rate <= _MOST_HZ):
        raise DatasetError(f"'{path}': env_args has control_freq {rate!r}, expected steps per second > 0; correct it")
    instructions = {TASK: numbered(np.repeat(np.array(texts, object), lengths))}
    parts = (columns, lengths.astype(np.int64), cameras, instructions)
    return Dataset(path, "robomimic HDF5", rate and float(rate), *parts, info={}, unused=unused, splits=splits)


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
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        why = " ".join(str(error).split())[:200]
        raise DatasetError(f"'{path}' is damaged or no HDF5 file of robomimic ({why}); copy it again") from None


def _leaves(path: Path, demo: Any) -> Iterator[tuple[str, Any]]:
    """(name, array) of an episode."""
    observations = _child(path, demo, "obs")
    if not len(observations or ()):
        raise DatasetError(f"'{path}' {_NO_OBSERVATIONS}")
    for name in sorted(observations):
        yield f"obs/{name}", _child(path, observations, name)
    for name in (ACTIONS, *_RESULTS):
        if (part := _child(path, demo, name)) is not None:
            yield name, part


def _part(path: Path, group: Any, name: str) -> Any:
    """The array at a path below `group`."""
    part = group
    for piece in name.split("/"):
        part = _child(path, part, piece) if hasattr(part, "keys") else None
    if getattr(part, "shape", ()) == ():
        holder, _, short = name.removeprefix("data/").partition("/")
        raise DatasetError(f"'{path}': {holder} has no array '{short}'; record it again")
    return part


def _child(path: Path, group: Any, name: str) -> Any:
    """None if there is none. Content of other files is refused: a dataset must not choose what is read."""
    import h5py

    if isinstance(group.get(name, getlink=True), h5py.ExternalLink | h5py.SoftLink):
        what = "is a link"
    else:
        child = group.get(name)
        if not isinstance(child, h5py.Dataset) or not (child.external or child.is_virtual):
            return child
        what = "is stored in other files"
    place = f"{group.name.rstrip('/')}/{name}"
    raise DatasetError(f"'{path}': {place} {what}; copy its content into the file")


def _joined(
    path: Path, data: Any, demos: list[str], lengths: np.ndarray, name: str, shape: tuple[int, ...]
) -> np.ndarray:
    parts = []
    for demo, length in zip(demos, lengths, strict=True):
        part = _part(path, data, f"{demo}/{name}")
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
    return np.unique([number[name] for name in listed])
