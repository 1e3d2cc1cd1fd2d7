"""Datasets in LeRobot's layouts v3.0 and v2.x: reads ours and LeRobot's own, and refuses inconsistent ones.

meta/info.json                        features, fps, templates of paths
meta/stats.json                       statistics of each feature
meta/tasks.parquet                    task_index -> the instruction
meta/episodes/chunk-*/file-*.parquet  one row per episode: its length, and its position in the other files
meta/sparring.json                    additional information (ours only)
manifest.json                         size and checksum of every file (ours only)
data/chunk-*/file-*.parquet           one row per frame: state, action, reward, ...
videos/<camera>/chunk-*/file-*.mp4    the images, many episodes per file

v2.x: meta/tasks.jsonl and meta/episodes.jsonl instead of the tables, and for each episode one file of data
(data/chunk-*/episode_*.parquet) and one video of each camera (videos/chunk-*/<camera>/episode_*.mp4).

Torch-free. Files of a dataset with a manifest are verified before they are read; without one, any content may be wrong
and raises a DatasetError.
"""

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from sparring.data import video
from sparring.data.dataset import (
    POSITION,
    TASK,
    Dataset,
    DatasetError,
    Images,
    check_finite,
    is_vector_or_cloud,
    numbered,
    scaled,
)
from sparring.data.tables import read_json, read_lines, read_sorted, read_table
from sparring.errors import UserError
from sparring.processes.manifest import MANIFEST, damage, read_manifest

# folder of episodes that are still being recorded; while it exists, the dataset is incomplete
RECORDING = "recording"
INFO = "meta/info.json"
CLOUD = "observation.points"
# the fields that a template of paths may have, also with leading zeros
_FIELD = re.compile(r"{(video_key|chunk_index|file_index|episode_chunk|episode_index)(:0?\d?d)?}")
# required keys of meta/sparring.json, and their types
_EXTRAS: dict[str, Any] = {"control_mode": str | None, "env": dict, "seed": int, "noise": int | float}
_EXTRAS |= {"episodes_tried": int} | dict.fromkeys(("episode_seeds", "episode_tasks"), list)
_HELD_OUT = ("val", "valid", "validation", "test")  # names of splits; the first one that is not empty is used
_CHUNK_SIZE = 1000  # episodes per folder of v2.x, by default


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
class _Index:
    """Where the parts of a dataset are. E episodes."""

    lengths: np.ndarray  # [E]
    data: list[Path]  # [E]: the file with the numbers of each episode
    # video feature -> the file of each episode, and its start in that file in seconds
    clips: dict[str, list[tuple[Path, float]]]
    instructions: tuple[str, ...]


@dataclass(frozen=True)
class _VideoImages:
    files: _Files
    clips: list[tuple[Path, float]]
    lengths: np.ndarray
    fps: float
    feature: str
    shape: tuple[int, int]

    def check(self) -> None:
        for file in dict.fromkeys(file for file, _ in self.clips):
            if not file.is_file():
                raise DatasetError(f"'{file}' with images of {self.feature} is missing; copy the dataset again")

    def stamp(self) -> list[Any]:
        files = sorted({file for file, _ in self.clips})
        return [(str(f.relative_to(self.files.path)), f.stat().st_size, f.stat().st_mtime_ns) for f in files]

    def read(self, episode: int, height: int, width: int) -> np.ndarray:
        file, start = self.clips[episode]
        self.files.verify([file])
        return video.decode(file, start, int(self.lengths[episode]), self.fps, height, width)


@dataclass(frozen=True)
class _TableImages:
    """Images that are stored as PNG or JPEG in the tables of numbers."""

    data: list[Path]  # [E]
    feature: str
    shape: tuple[int, int]

    def check(self) -> None:
        """The numbers were read from the same files."""

    def stamp(self) -> list[Any]:
        files = sorted(set(self.data))
        return [self.feature, *((str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files)]

    def read(self, episode: int, height: int, width: int) -> np.ndarray:
        from PIL import Image

        table = read_table(self.data[episode], [self.feature, "frame_index"], episode).sort_by("frame_index")
        frames = []
        try:
            for row in table[self.feature].to_pylist():
                # other formats run external programs
                with Image.open(io.BytesIO(row["bytes"]), formats=("PNG", "JPEG")) as image:
                    if image.mode not in ("RGB", "RGBA", "P", "L"):
                        raise ValueError(f"its mode is {image.mode}, expected 8-bit colours")
                    frames.append(scaled(np.asarray(image.convert("RGB"))[None], height, width))
        except (OSError, ValueError, TypeError, KeyError, SyntaxError, Image.DecompressionBombError) as error:
            where = f"image {len(frames)} of {self.feature} in episode {episode}"
            raise DatasetError(f"'{self.data[episode]}': {where} cannot be decoded ({error}); copy it again") from None
        return np.concatenate(frames)


def read_lerobot(path: Path) -> Dataset:
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
        raise DatasetError(f"'{path}' is damaged or not a LeRobotDataset ({why}); copy it again") from error


def _refuse_unfinished(files: _Files) -> None:
    path = files.path
    # our recorder writes the manifest last; earlier versions wrote none
    if (path / RECORDING).is_dir() and not (files.manifest and (path / INFO).exists()):
        raise DatasetError(f"'{path}' is an unfinished recording; run the command that records it again to finish it")
    if not files.manifest and not (path / INFO).exists():
        advice = "expected a LeRobotDataset; `sparring demos TASK --episodes N` records one"
        raise DatasetError(f"'{path}' has no {INFO}; {advice}")


def _read(files: _Files) -> Dataset:
    path = files.path
    info = _read_info(path)
    index = (_index_v2 if str(info["codebase_version"]).startswith("v2.") else _index_v3)(path, info)
    columns, texts, unused = _read_columns(path, sorted(set(index.data)), info)
    cameras: dict[str, Images] = {}
    for feature in _features_of(info, "video", "image"):
        shape, details = info["features"][feature]["shape"], info["features"][feature].get("info") or {}
        if details.get("video.is_depth_map") or not {shape[0], shape[2]} & {3, 4}:
            unused[feature] = f"images of shape {shape} without colours, e.g. of depth"
            continue
        # [H, W, 3], or [3, H, W] from some writers
        size = tuple(shape[:2] if shape[2] in (3, 4) else shape[1:])
        if feature in index.clips:
            cameras[feature] = _VideoImages(files, index.clips[feature], index.lengths, info["fps"], feature, size)
        else:
            cameras[feature] = _TableImages(index.data, feature, size)
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
    texts[TASK] = columns["task_index"], index.instructions
    kind = f"LeRobotDataset {info['codebase_version']}"
    splits = _splits(path, info, len(index.lengths))
    parts = (columns, index.lengths, cameras, texts, info, stats, extras, unused, splits)
    names = {name: _entry_names(feature.get("names")) for name, feature in info["features"].items()}
    dataset = Dataset(path, kind, info["fps"], *parts, names)
    _check_frames(dataset)
    return dataset


def _entry_names(names: Any) -> list[str]:
    # some writers group them: {"motors": [...]}
    groups = names.values() if isinstance(names, dict) else [names]
    return [str(name) for group in groups if isinstance(group, list) for name in group]


def _splits(path: Path, info: dict[str, Any], episodes: int) -> dict[str, np.ndarray]:
    """{"train": "0:8", "val": "8:10"} -> the numbers of the episodes; {} if no split is for evaluation."""
    given = info.get("splits") or {}
    found = {}
    for name in ("train", *_HELD_OUT):
        if name not in given:
            continue
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", str(given[name]))
        first, last = map(int, match.groups()) if match else (1, 0)
        found[name] = np.arange(first, min(last, episodes))
        if last < first or name != "train" and last > episodes:
            expected = f"expected FIRST:END within 0:{episodes}"
            raise DatasetError(f"'{path}/{INFO}' has splits.{name} {given[name]!r}, {expected}; correct it")
    held_out = next((name for name in _HELD_OUT if len(found.get(name, ()))), None)
    if held_out is None:
        return {}
    others = np.concatenate([found.get(name, np.arange(0)) for name in _HELD_OUT])
    return {"train": np.setdiff1d(found.get("train", np.arange(episodes)), others), "valid": found[held_out]}


def _features_of(info: dict[str, Any], *dtypes: str) -> list[str]:
    return [name for name, feature in info["features"].items() if feature["dtype"] in dtypes]


def _episode_files(path: Path) -> list[Path]:
    return sorted((path / "meta/episodes").glob("*/*.parquet"))


def _read_info(path: Path) -> dict[str, Any]:
    info = read_json(path / INFO)
    missing = [key for key in ("codebase_version", "fps", "features", "data_path", "total_frames") if key not in info]
    if missing:
        raise DatasetError(f"'{path}/{INFO}' has no {', '.join(missing)}; copy the dataset again")
    if not str(info["codebase_version"]).startswith(("v3.", "v2.")):
        advice = "convert it with the converters of lerobot (lerobot.datasets)"
        raise DatasetError(f"'{path}' is a LeRobotDataset {info['codebase_version']}, expected v2.x or v3.0; {advice}")
    fps, features = info["fps"], info["features"]
    if not isinstance(fps, int | float) or not 0 < fps < float("inf"):
        raise DatasetError(f"'{path}/{INFO}' has fps {fps!r}, expected frames per second > 0")
    for name, feature in features.items():
        # a name is part of the paths of videos
        if {"/", "\\"} & set(name) or name in (".", "..") or not name.isprintable():
            raise DatasetError(
                f"'{path}/{INFO}' has a feature {name!r}; expected a name without a slash or special characters"
            )
        shape = feature["shape"]
        if not isinstance(shape, list) or not all(type(size) is int and 0 < size < 2**31 for size in shape):
            raise DatasetError(f"'{path}/{INFO}': {name} has shape {shape!r}, expected whole numbers above 0")
        if feature["dtype"] in ("video", "image") and len(shape) != 3:
            raise DatasetError(f"'{path}/{INFO}': {name} has shape {shape!r}, expected height, width and channels")
    for key in ("data_path", *(["video_path"] if _features_of(info, "video") else [])):
        _check_template(path, key, info[key])
    return info


def _check_template(path: Path, key: str, template: str) -> None:
    """Raise for a path outside of the folder or with unknown fields."""
    bare = _FIELD.sub("0", template)
    if "{" in bare or "}" in bare or Path(bare).is_absolute() or ".." in Path(bare).parts:
        fields = "{chunk_index}, {file_index} and {video_key} (v2.x: {episode_chunk}, {episode_index} and {video_key})"
        expected = f"a path within the dataset with the fields {fields} only"
        raise DatasetError(f"'{path}/{INFO}' has {key} {template!r}, expected {expected}")


def _index_v3(path: Path, info: dict[str, Any]) -> _Index:
    files = _episode_files(path)
    if not files:
        raise DatasetError(f"'{path}' has no meta/episodes/chunk-*/file-*.parquet")
    wanted = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    for feature in _features_of(info, "video"):
        wanted += [f"videos/{feature}/{what}" for what in ("chunk_index", "file_index", "from_timestamp")]
    episodes, _ = read_sorted(files, {name: [] for name in wanted}, "episode_index")
    _check_episodes(f"{path}/meta/episodes", episodes["episode_index"], episodes["length"])
    places = zip(episodes["data/chunk_index"], episodes["data/file_index"], strict=True)
    data = [path / info["data_path"].format(chunk_index=int(c), file_index=int(f)) for c, f in places]
    clips = {}
    for feature in _features_of(info, "video"):
        where = (episodes[f"videos/{feature}/{what}"] for what in ("chunk_index", "file_index", "from_timestamp"))
        clips[feature] = [
            (path / info["video_path"].format(video_key=feature, chunk_index=int(c), file_index=int(f)), float(at))
            for c, f, at in zip(*where, strict=True)
        ]
    table = read_table(path / "meta/tasks.parquet", None)
    # pandas stores the instructions as the index, whose name differs between versions
    texts = [name for name in table.column_names if str(table.schema.field(name).type) in ("string", "large_string")]
    if "task_index" not in table.column_names or not texts:
        found = table.column_names
        raise DatasetError(f"'{path}/meta/tasks.parquet' has columns {found}, expected task_index and a text column")
    tasks = zip(table["task_index"].to_pylist(), table[texts[0]].to_pylist(), strict=True)
    instructions = _in_order(f"{path}/meta/tasks.parquet", list(tasks))
    return _Index(episodes["length"].astype(np.int64), data, clips, instructions)


def _index_v2(path: Path, info: dict[str, Any]) -> _Index:
    rows = sorted(read_lines(path / "meta/episodes.jsonl"), key=lambda row: row["episode_index"])
    numbers, lengths = (np.array([row[name] for row in rows]) for name in ("episode_index", "length"))
    _check_episodes(f"{path}/meta/episodes.jsonl", numbers, lengths)
    per_chunk = info.get("chunks_size") or _CHUNK_SIZE

    def of_each_episode(template: str, **fields: str) -> list[Path]:
        places = [{"episode_chunk": n // per_chunk, "episode_index": n} for n in range(len(rows))]
        return [path / template.format(**place, **fields) for place in places]

    videos = _features_of(info, "video")
    clips = {name: [(file, 0.0) for file in of_each_episode(info["video_path"], video_key=name)] for name in videos}
    tasks = [(row["task_index"], row["task"]) for row in read_lines(path / "meta/tasks.jsonl")]
    instructions = _in_order(f"{path}/meta/tasks.jsonl", tasks)
    return _Index(lengths.astype(np.int64), of_each_episode(info["data_path"]), clips, instructions)


def _check_episodes(file: str, numbers: np.ndarray, lengths: np.ndarray) -> None:
    if not np.array_equal(numbers, np.arange(len(numbers))):
        raise DatasetError(f"'{file}': expected each of the episodes 0 to {len(numbers) - 1} once")
    if not len(numbers) or lengths.min() < 1:
        raise DatasetError(f"'{file}' lists no episode, or one without frames; record the dataset again")


def _in_order(file: str, tasks: list[tuple[int, str]]) -> tuple[str, ...]:
    """The instructions in the order of task_index."""
    indices = sorted(index for index, _ in tasks)
    if indices != list(range(len(tasks))):
        raise DatasetError(f"'{file}' has task_index {indices}, expected 0 to {len(tasks) - 1}")
    return tuple(text for _, text in sorted(tasks))


def _read_columns(path: Path, files: list[Path], info: dict[str, Any]) -> tuple[dict, dict, dict]:
    """Numbers and texts of all frames, and why the other features are not read."""
    shapes: dict[str, list[int] | None] = {}
    unused = {}
    for name, feature in info["features"].items():
        shape, dtype = feature["shape"], feature["dtype"]
        if dtype == "string":
            shapes[name] = None
        elif dtype not in ("video", "image"):
            if is_vector_or_cloud(shape):
                shapes[name] = shape
            else:
                unused[name] = f"its shape {shape} is neither a vector nor a point cloud"
    missing = [name for name in POSITION if name not in shapes]
    if missing:
        raise DatasetError(f"'{path}' has no feature {', '.join(missing)}; found {', '.join(info['features'])}")
    columns, texts = read_sorted(files, shapes, "index")
    return columns, {name: numbered(rows) for name, rows in texts.items()}, unused


def _check_frames(dataset: Dataset) -> None:
    """Raise if rows and episodes do not match, rows are not in time order, or values are not finite."""
    path, columns, frames = dataset.path, dataset.columns, dataset.steps
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
    check_finite(dataset, POSITION)
    fps, tasks = dataset.info["fps"], columns["task_index"]
    late = np.abs(columns["timestamp"] - within / fps).max() if frames else 0
    if late > 0.5 / fps:
        raise DatasetError(f"'{path}': timestamps differ by up to {late:.3f} s from {fps} frames/s (meta/info.json)")
    if frames and tasks.min() < 0:
        raise DatasetError(f"'{path}': task_index {tasks.min()} is negative, expected >= 0")
    if tasks.max() >= (known := len(dataset.texts[TASK][1])):
        raise DatasetError(f"'{path}': task_index {tasks.max()} is too large: the dataset has {known} tasks")
