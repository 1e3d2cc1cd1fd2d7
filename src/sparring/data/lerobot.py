"""Datasets in LeRobot's layout (LeRobotDataset v3.0): reads ours and LeRobot's own, and refuses inconsistent ones.

meta/info.json                        features, fps, templates of paths
meta/stats.json                       statistics of each feature
meta/tasks.parquet                    task_index -> the instruction
meta/episodes/chunk-*/file-*.parquet  one row per episode: its length, and its position in the other files
meta/sparring.json                    additional information (ours only)
manifest.json                         size and checksum of every file (ours only)
data/chunk-*/file-*.parquet           one row per frame: state, action, reward, ...
videos/<camera>/chunk-*/file-*.mp4    the images, many episodes per file

All numbers are loaded at once (hundreds of bytes per frame, a few kB with points); images stay in their files.
Torch-free. Files of a dataset with a manifest are verified before they are read; without one, any content may be wrong
and raises a DatasetError.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import UserError
from sparring.processes.manifest import MANIFEST, damage, read_manifest

# folder of episodes that are still being recorded; while it exists, the dataset is incomplete
RECORDING = "recording"
INFO = "meta/info.json"
# the only feature with two axes that is read: [P, 6] per frame
POINTS = "observation.points"
_BOOKKEEPING = ("timestamp", "frame_index", "episode_index", "index", "task_index")
# the fields that a template of paths may have, also with leading zeros
_FIELD = re.compile(r"{(video_key|chunk_index|file_index)(:0?\d?d)?}")
# required keys of meta/sparring.json, and their types
_EXTRAS: dict[str, Any] = {"control_mode": str | None, "env": dict, "seed": int, "noise": int | float}
_EXTRAS |= {"episodes_tried": int} | dict.fromkeys(("episode_seeds", "episode_tasks"), list)
_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


class DatasetError(UserError):
    """A dataset that cannot be read, or does not match the config."""


@dataclass(frozen=True)
class _Files:
    """The files of a dataset; each is verified before it is first read, if the dataset has a manifest."""

    path: Path
    manifest: dict[str, Any] | None
    verified: set[Path] = field(default_factory=set)

    def verify(self, files: Iterable[Path]) -> None:
        if self.manifest is None:
            return
        new = [file for file in dict.fromkeys(files) if file not in self.verified]
        if found := damage(self.path, self.manifest, [file.relative_to(self.path).as_posix() for file in new]):
            advice = f"copy it again, or, if it was changed on purpose, delete its {MANIFEST} to disable verification"
            more = f"; and {len(found) - 3} more" if len(found) > 3 else ""
            raise DatasetError(f"'{self.path}' is damaged: {'; '.join(found[:3])}{more}; {advice}")
        self.verified.update(new)

    def verify_numbers(self) -> None:
        """Verify all files except videos, including missing and added ones."""
        listed = self.manifest["files"] if self.manifest else {}
        numbers = {self.path / name for name in listed if not name.startswith("videos/")}
        self.verify(sorted(numbers | set(_episode_files(self.path))))


@dataclass(frozen=True)
class _Dataset:
    """A dataset without its images. E episodes, F frames in the order of episodes."""

    path: Path
    files: _Files
    info: dict[str, Any]
    # feature -> [F] or [F, D]; points [F, P, 6]
    columns: dict[str, np.ndarray]
    # [E]
    lengths: np.ndarray
    # video feature -> the file of each episode, and its start in that file in seconds
    clips: dict[str, list[tuple[Path, float]]]
    instructions: tuple[str, ...]
    # feature -> "mean", "std", ... -> values
    statistics: dict[str, dict[str, np.ndarray]]
    # meta/sparring.json; empty for datasets of other programs
    extras: dict[str, Any]

    def check_videos(self, feature: str) -> None:
        """Raise if a video is missing; damaged ones are detected by decoding."""
        for file in dict.fromkeys(file for file, _ in self.clips[feature]):
            if not file.is_file():
                raise DatasetError(f"'{file}' with images of {feature} is missing; copy the dataset again")


def parquet():
    """Import pyarrow.parquet, an optional dependency."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError('datasets need pyarrow, which is not installed: pip install "sparring[demos]"') from None
    return pyarrow.parquet


def read_dataset(path: str | Path) -> _Dataset:
    path = Path(path)
    if not path.is_dir():
        raise DatasetError(f"'{path}' is not a folder; give the folder of a dataset, which contains meta/info.json")
    try:
        files = _Files(path, read_manifest(path))
        _refuse_unfinished(files)
        files.verify_numbers()
        return _read(files)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        # tables and JSON of other programs may have any content
        why = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise DatasetError(f"'{path}' is damaged or not a LeRobotDataset v3.0 ({why}); copy it again") from error


def _refuse_unfinished(files: _Files) -> None:
    path = files.path
    # our recorder writes the manifest last; earlier versions wrote none
    if (path / RECORDING).is_dir() and not (files.manifest and (path / INFO).exists()):
        raise DatasetError(f"'{path}' is an unfinished recording; run the command that records it again to finish it")
    if not files.manifest and not (path / INFO).exists():
        advice = "expected a LeRobotDataset; `sparring demos TASK --episodes N` records one"
        raise DatasetError(f"'{path}' has no {INFO}; {advice}")


def _read(files: _Files) -> _Dataset:
    path = files.path
    info = _read_info(path)
    episodes = _read_episodes(path, info)
    columns = _read_columns(path, info, episodes)
    lengths, clips = episodes["length"].astype(np.int64), _clips(path, info, episodes)
    instructions = _read_instructions(path)
    stats, extras = (read_json(path / f"meta/{name}.json", optional=True) for name in ("stats", "sparring"))
    stats = {feature: {name: np.array(value) for name, value in values.items()} for feature, values in stats.items()}
    invalid = [
        feature for feature, values in stats.items() if any(value.dtype.kind not in "biuf" for value in values.values())
    ]
    if invalid:
        raise DatasetError(f"'{path}/meta/stats.json': {', '.join(invalid)}: expected numbers; copy the dataset again")
    wrong = [key for key, kind in _EXTRAS.items() if extras and not isinstance(extras.get(key), kind)]
    if wrong:
        raise DatasetError(f"'{path}/meta/sparring.json': {', '.join(wrong)} missing or of a wrong type; copy it again")
    dataset = _Dataset(path, files, info, columns, lengths, clips, instructions, stats, extras)
    _check_frames(dataset)
    return dataset


def _video_features(info: dict[str, Any]) -> list[str]:
    return [name for name, feature in info["features"].items() if feature["dtype"] == "video"]


def _episode_files(path: Path) -> list[Path]:
    return sorted((path / "meta/episodes").glob("*/*.parquet"))


def _read_info(path: Path) -> dict[str, Any]:
    info = read_json(path / INFO)
    missing = [key for key in ("codebase_version", "fps", "features", "data_path", "total_frames") if key not in info]
    if missing:
        raise DatasetError(f"'{path}/{INFO}' has no {', '.join(missing)}; copy the dataset again")
    if not str(info["codebase_version"]).startswith("v3."):
        advice = "convert it with lerobot.datasets.v30.convert_dataset_v21_to_v30"
        raise DatasetError(f"'{path}' is a LeRobotDataset {info['codebase_version']}, expected v3.0; {advice}")
    fps, features = info["fps"], info["features"]
    if not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise DatasetError(f"'{path}/{INFO}' has fps {fps!r}, expected frames per second > 0")
    for name, feature in features.items():
        if {"/", "\0"} & set(name):
            raise DatasetError(f"'{path}/{INFO}' has a feature {name!r}; expected a name without a slash")
        shape = feature["shape"]
        if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**31 for size in shape):
            raise DatasetError(f"'{path}/{INFO}': {name} has shape {shape!r}, expected whole numbers above 0")
        if feature["dtype"] == "video" and len(shape) != 3:
            raise DatasetError(f"'{path}/{INFO}': {name} has shape {shape!r}, expected height, width and channels")
    for key in ("data_path", *(["video_path"] if _video_features(info) else [])):
        _check_template(path, key, info[key])
    return info


def _check_template(path: Path, key: str, template: str) -> None:
    """Raise for a path outside of the folder or with unknown fields."""
    bare = _FIELD.sub("0", template)
    if "{" in bare or "}" in bare or Path(bare).is_absolute() or ".." in Path(bare).parts:
        expected = "a path within the dataset with the fields {chunk_index}, {file_index} and {video_key} only"
        raise DatasetError(f"'{path}/{INFO}' has {key} {template!r}, expected {expected}")


def _read_episodes(path: Path, info: dict[str, Any]) -> dict[str, np.ndarray]:
    """Column -> its values in the order of episodes."""
    files = _episode_files(path)
    if not files:
        raise DatasetError(f"'{path}' has no meta/episodes/chunk-*/file-*.parquet")
    wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for feature in _video_features(info):
        wanted += [f"videos/{feature}/{what}" for what in ("chunk_index", "file_index", "from_timestamp")]
    columns = _read_sorted(files, {name: [] for name in wanted}, "episode_index")
    listed = columns["episode_index"]
    if not np.array_equal(listed, np.arange(len(listed))):
        raise DatasetError(f"'{path}/meta/episodes': expected each of the episodes 0 to {len(listed) - 1} once")
    if not len(listed) or columns["length"].min() < 1:
        raise DatasetError(f"'{path}/meta/episodes' lists no episode, or one without frames; record the dataset again")
    return columns


def _read_columns(path: Path, info: dict[str, Any], episodes: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    features = {
        name: feature["shape"]
        for name, feature in info["features"].items()
        if feature["dtype"] not in ("video", "image", "string") and len(feature["shape"]) == 1 + (name == POINTS)
    }
    missing = [name for name in ("action", *_BOOKKEEPING) if name not in features]
    if missing:
        raise DatasetError(f"'{path}' has no feature {', '.join(missing)}; found {', '.join(info['features'])}")
    # [E, 2] -> each file once
    places = np.unique(np.stack([episodes["data/chunk_index"], episodes["data/file_index"]], axis=1), axis=0)
    files = [path / info["data_path"].format(chunk_index=int(c), file_index=int(f)) for c, f in places]
    return _read_sorted(files, features, "index")


def _clips(path: Path, info: dict[str, Any], episodes: dict[str, np.ndarray]) -> dict[str, list[tuple[Path, float]]]:
    clips, template = {}, info["video_path"]
    for feature in _video_features(info):
        where = (episodes[f"videos/{feature}/{what}"] for what in ("chunk_index", "file_index", "from_timestamp"))
        clips[feature] = [
            (path / template.format(video_key=feature, chunk_index=int(chunk), file_index=int(file)), float(at))
            for chunk, file, at in zip(*where, strict=True)
        ]
    return clips


def _read_instructions(path: Path) -> tuple[str, ...]:
    """Instructions in the order of task_index."""
    table = _read_table(path / "meta/tasks.parquet", None)
    # pandas stores the instructions as the index, whose name differs between versions
    texts = [name for name in table.column_names if str(table.schema.field(name).type) in ("string", "large_string")]
    if "task_index" not in table.column_names or not texts:
        found = table.column_names
        raise DatasetError(f"'{path}/meta/tasks.parquet' has columns {found}, expected task_index and a text column")
    pairs = sorted(zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True))
    indices = [index for index, _ in pairs]
    if indices != list(range(len(pairs))):
        raise DatasetError(f"'{path}/meta/tasks.parquet' has task_index {indices}, expected 0 to {len(pairs) - 1}")
    return tuple(text for _, text in pairs)


def _check_frames(dataset: _Dataset) -> None:
    """Raise if rows and episodes do not match, rows are not in time order, or values are not finite."""
    path, columns, frames = dataset.path, dataset.columns, int(dataset.lengths.sum())
    found, total, why = len(columns["index"]), dataset.info["total_frames"], "files are missing or of another recording"
    if not found == frames == total:
        but = f"its episodes have {frames} frames and meta/info.json has total_frames {total}"
        raise DatasetError(f"'{path}' has {found} rows of data, but {but}; {why}")
    if (total := dataset.info.get("total_episodes", len(dataset.lengths))) != len(dataset.lengths):
        listed = f"{len(dataset.lengths)} episodes in meta/episodes"
        raise DatasetError(f"'{path}' lists {listed}, but meta/info.json has total_episodes {total}; {why}")
    episode = np.repeat(np.arange(len(dataset.lengths)), dataset.lengths)
    within = np.arange(frames) - np.repeat(np.cumsum(dataset.lengths) - dataset.lengths, dataset.lengths)
    if not (np.array_equal(columns["episode_index"], episode) and np.array_equal(columns["frame_index"], within)):
        raise DatasetError(f"'{path}': the rows are not the frames of the episodes in time order; copy it again")
    for name, values in columns.items():
        bad = np.flatnonzero(~np.isfinite(values.reshape(frames, -1)).all(axis=1))
        if len(bad):
            first = f"first in episode {episode[bad[0]]}, frame {within[bad[0]]}; record these episodes again"
            raise DatasetError(f"'{path}': {name} contains NaN or infinity in {len(bad)} of {frames} frames, {first}")
    fps, tasks = dataset.info["fps"], columns["task_index"]
    late = np.abs(columns["timestamp"] - within / fps).max() if frames else 0
    if late > 0.5 / fps:
        raise DatasetError(f"'{path}': timestamps differ by up to {late:.3f} s from {fps} frames/s (meta/info.json)")
    if frames and tasks.min() < 0:
        raise DatasetError(f"'{path}': task_index {tasks.min()} is negative, expected >= 0")
    if tasks.max() >= (known := len(dataset.instructions)):
        raise DatasetError(f"'{path}': task_index {tasks.max()} is too large: meta/tasks.parquet has {known} tasks")


def read_json(path: Path, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        # reading a pipe would block
        if path.exists() and not path.is_file():
            raise ValueError("not a regular file")
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__}, expected keys with values")
    except (OSError, ValueError, RecursionError) as error:
        raise DatasetError(f"'{path}' cannot be read ({error}); copy the dataset again") from None
    return content


def _read_table(path: Path, columns: list[str] | None):
    reader = parquet()
    from pyarrow.lib import ArrowException

    try:
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        # opened as a single file, so that names of folders do not become columns
        with reader.ParquetFile(path) as file:
            missing = [name for name in columns or () if name not in file.schema_arrow.names]
            if missing:
                names = ", ".join(file.schema_arrow.names)
                raise DatasetError(f"'{path}' has no column {', '.join(missing)}; found {names}")
            return file.read(columns)
    except (OSError, ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise DatasetError(f"'{path}' cannot be read ({reason}); it is missing or incomplete: copy it again") from None


def _read_sorted(files: list[Path], shapes: dict[str, list[int]], by: str) -> dict[str, np.ndarray]:
    """The concatenated columns of all files, sorted by one of them."""
    parts = [_read_table(file, list(shapes)) for file in files]
    columns = {
        name: np.concatenate([_rows(part[name], shape, file) for part, file in zip(parts, files, strict=True)])
        for name, shape in shapes.items()
    }
    order = np.argsort(columns[by], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _rows(column, shape: list[int], path: Path) -> np.ndarray:
    """`[F]` if an entry is a single number, otherwise `[F, *shape]`."""
    from pyarrow.compute import list_value_length

    entries = flat = column.combine_chunks()
    is_list = str(entries.type).startswith(("list", "fixed_size_list", "large_list"))
    # check each row at each level: a short and a long row could cancel out in the total, with all between them shifted
    for size in shape if is_list else ():
        lengths = list_value_length(flat).to_numpy(zero_copy_only=False)
        if (lengths != size).any():
            row = int(np.argmax(lengths != size))
            raise DatasetError(f"'{path}': row {row} of {len(flat)} has {lengths[row]} numbers, expected {size} each")
        flat = flat.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    if values.dtype == object:
        raise DatasetError(f"'{path}' has a column of type {column.type}, expected numbers")
    return values.reshape(len(entries), *shape) if is_list else values


def number_statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of rows `[F, D]`, each `[D]`, or of numbers `[F]`, each `[1]`; `count` is `[1]`."""
    values = values.reshape(len(values), -1).astype(np.float64)
    quantiles = np.quantile(values, list(_QUANTILES.values()), axis=0)
    found = {name: getattr(values, name)(axis=0) for name in ("min", "max", "mean", "std")}
    return found | {"count": np.array([len(values)])} | dict(zip(_QUANTILES, quantiles, strict=True))


def point_statistics(clouds: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of clouds `[F, P, D]` over points and frames, each `[D]`, independent of the size of a cloud.

    All except min, max and count use at most 1000 evenly spread frames: a dataset has hundreds of millions of points.
    """
    few = clouds[:: max(len(clouds) // 1000, 1)]
    found = number_statistics(few.reshape(-1, clouds.shape[-1]))
    exact = {"min": clouds.min(axis=(0, 1)), "max": clouds.max(axis=(0, 1)), "count": np.array([len(clouds)])}
    return found | {name: value.astype(found[name].dtype) for name, value in exact.items()}


def pixel_counts(frames: np.ndarray) -> np.ndarray:
    """`[3, 256]`: the number of pixels with each value in each channel of `[T, H, W, 3]` uint8."""
    return np.stack([np.bincount(frames[..., channel].ravel(), minlength=256) for channel in range(3)])


def image_statistics(counts: np.ndarray, frames: int) -> dict[str, np.ndarray]:
    """Statistics of pixels in 0..1, each `[3, 1, 1]`, from the `pixel_counts` of this number of frames."""
    levels = np.arange(256) / 255
    below = np.cumsum(counts, axis=1)
    total = below[:, -1:]
    mean = counts @ levels / total[:, 0]
    square = counts @ levels**2 / total[:, 0]
    least, most = levels[np.argmax(counts > 0, axis=1)], levels[255 - np.argmax(counts[:, ::-1] > 0, axis=1)]
    values = {"min": least, "max": most, "mean": mean, "std": np.sqrt(np.maximum(square - mean**2, 0))}
    values |= {name: levels[np.argmax(below >= part * total, axis=1)] for name, part in _QUANTILES.items()}
    return {"count": np.array([frames])} | {name: value.reshape(3, 1, 1) for name, value in values.items()}
