"""Recorded demonstrations: the interface of all formats that can be read. Torch-free.

`read_dataset(path)` reads a LeRobotDataset (lerobot.py) or a robomimic file (robomimic.py). Numbers are loaded at once
(hundreds of bytes per step, a few kB with points); images stay in their files. Keys are those of the format:
`observation.state`, `obs/robot0_eef_pos`; what each is for is decided in mapping.py.
Letters: E episodes, T steps of one, F steps of all episodes in order, D entries, P points.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparring.errors import UserError

TASK = "task"  # the key of the instruction of each step
# where a step is in a LeRobotDataset
POSITION = ("timestamp", "frame_index", "episode_index", "index", "task_index")
_HDF5 = b"\x89HDF\r\n\x1a\n"  # first bytes of such a file


class DatasetError(UserError):
    """A dataset that cannot be read, or does not match the config."""


class Images(Protocol):
    """The images of one camera."""

    @property
    def shape(self) -> tuple[int, int]:
        """Recorded height and width."""

    def check(self) -> None:
        """Raise if a file is missing; damaged ones are detected by `read`."""

    def stamp(self) -> list[Any]:
        """What the images are read from: a cache of them is valid while this stays the same."""

    def read(self, episode: int, height: int, width: int) -> np.ndarray:
        """`[T, height, width, 3]` uint8, scaled to this size without regard to the aspect ratio."""


@dataclass(frozen=True)
class Dataset:
    path: Path
    kind: str  # the format and its version
    fps: float | None  # steps per second; None: unknown
    columns: dict[str, np.ndarray]  # key -> numbers [F], [F, D] or [F, P, D]
    lengths: np.ndarray  # [E]
    cameras: dict[str, Images]  # key -> images
    texts: dict[str, tuple[np.ndarray, tuple[str, ...]]]  # key -> index of each step [F], texts
    info: dict[str, Any]  # meta/info.json; {} in other formats
    statistics: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)  # key -> "mean", "std", ... -> values
    extras: dict[str, Any] = field(default_factory=dict)  # meta/sparring.json; empty if another program recorded it
    unused: dict[str, str] = field(default_factory=dict)  # key that is not read -> why
    splits: dict[str, np.ndarray] = field(default_factory=dict)  # "train", "valid" -> numbers of episodes
    names: dict[str, list[str]] = field(default_factory=dict)  # key -> names of its entries, if they are known

    def __post_init__(self):
        for key, (_, texts) in self.texts.items():
            for text in texts:
                # half a surrogate pair is no Unicode
                if not isinstance(text, str) or not text.isascii() and re.search("[\ud800-\udfff]", text):
                    raise DatasetError(f"'{self.path}': {key} contains {text!r}, expected text; correct the dataset")

    @property
    def is_own(self) -> bool:
        """Recorded by us: names, entries and units are those of our envs."""
        return bool(self.extras)

    @property
    def keys(self) -> list[str]:
        return [*self.cameras, *self.columns, *self.texts, *self.unused]

    @property
    def steps(self) -> int:
        return int(self.lengths.sum())

    @property
    def starts(self) -> np.ndarray:
        """[E + 1]: the first step of each episode, and F."""
        return np.concatenate([[0], np.cumsum(self.lengths)])


def read_dataset(path: str | Path) -> Dataset:
    path = Path(path)
    if is_hdf5(path):
        from sparring.data.robomimic import read_robomimic

        return read_robomimic(path)
    if path.is_file():
        expected = "expected the folder of a LeRobotDataset, or an HDF5 file of robomimic"
        raise DatasetError(f"'{path}' is no dataset; {expected}")
    from sparring.data.lerobot import read_lerobot

    return read_lerobot(path)


def is_hdf5(path: Path) -> bool:
    """Whether it is an HDF5 file by its name or content; reading a pipe would block."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix in (".hdf5", ".h5") or file.read(len(_HDF5)) == _HDF5


def is_vector_or_cloud(shape: Sequence[int], may_be_cloud: bool = True) -> bool:
    """`shape`: of one step; the points of a cloud have x, y, z, or also r, g, b."""
    return len(shape) < 2 or may_be_cloud and len(shape) == 2 and shape[1] in (3, 6)


def check_finite(dataset: Dataset, keys: Iterable[str]) -> None:
    starts = dataset.starts
    for name in keys:
        values = dataset.columns[name]
        bad = np.flatnonzero(~np.isfinite(values.reshape(dataset.steps, -1)).all(axis=1))
        if len(bad):
            episode = int(np.searchsorted(starts, bad[0], side="right")) - 1
            first = f"first in episode {episode}, frame {bad[0] - starts[episode]}; record these episodes again"
            has = f"{name} contains NaN or infinity in {len(bad)} of {dataset.steps} frames, {first}"
            raise DatasetError(f"'{dataset.path}': {has}")


def numbered(texts: Iterable[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The texts of steps as an index [F] into distinct texts, in the order in which they appear first."""
    number: dict[str, int] = {}
    index = np.array([number.setdefault(text, len(number)) for text in texts], np.int64)
    return index, tuple(number)


def scaled(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    """`[T, H, W, 3]` uint8 -> `[T, height, width, 3]`."""
    from PIL import Image

    if frames.shape[1:3] == (height, width):
        return frames
    resized = [Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in frames]
    return np.stack([np.asarray(image) for image in resized])
