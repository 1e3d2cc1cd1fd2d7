"""Assembles a LeRobotDataset v3.0 folder (see data/lerobot.py) from recorded blocks of episodes.

meta/info.json and then manifest.json are written last, each atomically: an incomplete dataset is never read.
"""

import json
import shutil
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from sparring.data import video
from sparring.data.lerobot import (
    CLOUD,
    INFO,
    RECORDING,
)
from sparring.data.statistics import image_statistics, number_statistics, point_statistics
from sparring.data.tables import parquet
from sparring.demos.expert_env import ExpertEnv
from sparring.demos.plan import Plan, image_shapes
from sparring.envs.backend import Arrays
from sparring.errors import UserError
from sparring.processes.files import flush, write_whole
from sparring.processes.manifest import MANIFEST, damage, entry, read_manifest, write_manifest

# LeRobot stores the time within a video as float32: beyond 1000 s its resolution is worse than a tenth of a ms
_FRAMES_PER_FILE = 20_000
# the folders of a dataset
PARTS = ("data", "videos", "meta")
_FILES_PER_CHUNK = 1000
_PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_DATA, _VIDEO = f"data/{_PLACE}.parquet", f"videos/{{video_key}}/{_PLACE}.mp4"


@dataclass(frozen=True)
class EpisodeBlock:
    """A recorded block: K kept episodes with F steps in total.

    block-000007/numbers.npz     arrays of the kept episodes, concatenated
    block-000007/0-head.mp4      frames of the first kept episode
    block-000007/manifest.json   checksums of both
    """

    folder: Path
    number: int
    # "number", "seed", "task", "instruction", "success", "length": [K]; "state", "privileged", "action": [F, D];
    # "points": [F, P, 6]; "reward": [F]; "pixels/<camera>": [K, 3, 256], see pixel_counts
    numbers: Arrays

    @classmethod
    def read(cls, folder: Path, number: int) -> "EpisodeBlock | None":
        """None if it is missing or damaged: it must be recorded again."""
        block = cls(folder, number, {})
        try:
            manifest = read_manifest(block.path)
            if manifest is None or damage(block.path, manifest):
                return None
            with np.load(block.path / "numbers.npz") as file:
                return cls(folder, number, dict(file))
        except (OSError, EOFError, ValueError, BadZipFile):
            return None

    @property
    def path(self) -> Path:
        return self.folder / f"block-{self.number:06d}"

    def clip(self, episode: int, camera: str) -> Path:
        return self.path / f"{episode}-{camera}.mp4"


@dataclass(frozen=True)
class _Episode:
    """The k-th episode of a block, its rows in the block, and its position in the dataset."""

    block: EpisodeBlock
    k: int
    rows: slice
    file: int
    # steps of earlier episodes, in total and in the same file
    first: int
    first_in_file: int

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start

    def number(self, name: str) -> Any:
        return self.block.numbers[name][self.k]


def assemble(output: Path, plan: Plan, blocks: list[EpisodeBlock], episodes: int) -> None:
    """Write a dataset of the first `episodes` kept episodes of these blocks."""
    # remove the files of an interrupted assembly
    (output / MANIFEST).unlink(missing_ok=True)
    for name in PARTS:
        shutil.rmtree(output / name, ignore_errors=True)
    env = plan.make_env(len(plan.tasks))
    fps, shapes = int(env.spec.control_hz), image_shapes(env.spec)
    kept = _pick(blocks, episodes)
    phrases = [str(episode.number("instruction")) for episode in kept]
    # in the order of the env, without duplicates: tasks that differ only in their start states share instructions
    instructions = [text for text in dict.fromkeys([*env.spec.instructions, *phrases]) if text in phrases]
    columns = _columns(kept, fps, np.array([instructions.index(text) for text in phrases]))
    pixels = {_video_key(name): np.stack([episode.number(f"pixels/{name}") for episode in kept]) for name in shapes}
    for file, group in groupby(kept, lambda episode: episode.file):
        of_file = list(group)
        rows = slice(of_file[0].first, of_file[-1].first + of_file[-1].length)
        _write_table(output / _DATA.format(**_place(file)), {name: values[rows] for name, values in columns.items()})
        for camera in shapes:
            path = output / _VIDEO.format(video_key=_video_key(camera), **_place(file))
            path.parent.mkdir(parents=True, exist_ok=True)
            _join(path, of_file, camera, output / RECORDING)
    table = _episodes(kept, phrases, columns, pixels, fps)
    _write_table(output / f"meta/episodes/{_PLACE.format(**_place(0))}.parquet", table)
    _write_tasks(output / "meta/tasks.parquet", instructions)
    write_json(output / "meta/stats.json", _statistics(columns, pixels, slice(0, len(kept)), slice(None)))
    # per-episode data without a place in LeRobot's format
    extras: dict[str, Any] = {"episodes_tried": int(kept[-1].number("number")) + 1}
    extras |= {f"episode_{n}s": [int(episode.number(n)) for episode in kept] for n in ("number", "seed")}
    extras["episode_tasks"] = [str(episode.number("task")) for episode in kept]
    write_json(output / "meta/sparring.json", plan.settings() | extras)
    info: dict[str, Any] = {"codebase_version": "v3.0", "robot_type": env.robot_type, "total_episodes": len(kept)}
    info |= {"total_frames": len(columns["index"]), "total_tasks": len(instructions)}
    info |= {"chunks_size": _FILES_PER_CHUNK, "data_files_size_in_mb": 100, "video_files_size_in_mb": 200}
    info |= {"fps": fps, "splits": {"train": f"0:{len(kept)}"}, "data_path": _DATA}
    info |= {"video_path": _VIDEO if shapes else None, "features": _features(env, columns, plan, fps)}
    env.close()
    for name in PARTS:
        if (output / name).exists():
            flush(output / name, tree=True)
    flush(output)
    write_json(output / INFO, info)
    files = sorted(file for name in PARTS for file in (output / name).rglob("*") if file.is_file())
    write_manifest(output, "dataset", {file.relative_to(output).as_posix(): entry(file) for file in files})


def _pick(blocks: list[EpisodeBlock], episodes: int) -> list[_Episode]:
    kept: list[_Episode] = []
    file, first, first_in_file = 0, 0, 0
    for block in blocks:
        start = 0
        for k, length in enumerate(block.numbers["length"][: episodes - len(kept)].tolist()):
            if first_in_file and first_in_file + length > _FRAMES_PER_FILE:
                file, first_in_file = file + 1, 0
            kept.append(_Episode(block, k, slice(start, start + length), file, first, first_in_file))
            start, first, first_in_file = start + length, first + length, first_in_file + length
    return kept


def _join(path: Path, episodes: list[_Episode], camera: str, folder: Path) -> None:
    """Concatenate clips and count the frames, because ffmpeg silently drops damaged parts."""
    clips = [episode.block.clip(episode.k, camera) for episode in episodes]
    # an error is reported below, with the name of the damaged clip
    with suppress(UserError):
        video.join(path, clips, folder)
        if video.count(path) == sum(episode.length for episode in episodes):
            return
    for episode, clip in zip(episodes, clips, strict=True):
        whole = video.count(clip)
        if whole != episode.length:
            advice = f"delete the folder '{clip.parent}' and run the same command again to record it again"
            raise UserError(f"'{clip}' is damaged: {whole} of its {episode.length} frames can be read; {advice}")
    raise UserError(f"'{path}' is incomplete; is the disk full? Run the same command again")


def _columns(kept: list[_Episode], fps: int, tasks: np.ndarray) -> Arrays:
    """Feature -> `[F]` or `[F, D]` (points: `[F, P, 6]`), for all frames."""
    lengths = np.array([episode.length for episode in kept])
    frames, ends = int(lengths.sum()), np.cumsum(lengths)
    within = np.arange(frames) - np.repeat(ends - lengths, lengths)
    done = np.isin(np.arange(frames), ends - 1)

    def recorded(name: str) -> np.ndarray:
        return np.concatenate([episode.block.numbers[name][episode.rows] for episode in kept])

    observed = [name for name in ("state", "privileged", "points") if name in kept[0].block.numbers]
    columns = {f"observation.{name}": recorded(name) for name in observed}
    columns |= {"action": recorded("action"), "next.reward": recorded("reward"), "next.done": done}
    columns["next.success"] = done & np.repeat([episode.number("success") for episode in kept], lengths)
    columns |= {"timestamp": (within / fps).astype(np.float32), "frame_index": within}
    columns |= {"episode_index": np.repeat(np.arange(len(kept)), lengths), "index": np.arange(frames)}
    return columns | {"task_index": np.repeat(tasks, lengths)}


def _features(env: ExpertEnv, columns: Arrays, plan: Plan, fps: int) -> dict[str, Any]:
    # points have named axes, like images
    names = env.names | {CLOUD: ["points", "x_y_z_r_g_b"]}
    features: dict[str, Any] = {
        name: {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": names.get(name)}
        for name, values in columns.items()
    }
    for camera, (height, width) in image_shapes(env.spec).items():
        features[_video_key(camera)] = {
            "dtype": "video",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
            "info": {"video.height": height, "video.width": width, "video.codec": video.CODEC}
            | {"video.pix_fmt": plan.pixel_format, "video.is_depth_map": False, "video.fps": fps}
            | {"video.channels": 3, "has_audio": False},
        }
    return features


def _episodes(kept: list[_Episode], phrases: list[str], columns: Arrays, pixels: Arrays, fps: int) -> dict[str, list]:
    """Column -> its values, one per episode."""
    rows = []
    for number, (episode, text) in enumerate(zip(kept, phrases, strict=True)):
        place, end = _place(episode.file), episode.first + episode.length
        row = {"episode_index": number, "tasks": [text], "length": episode.length}
        row |= {f"data/{key}": value for key, value in place.items()}
        row |= {"dataset_from_index": episode.first, "dataset_to_index": end}
        for key in pixels:
            row |= {f"videos/{key}/{name}": value for name, value in place.items()}
            row[f"videos/{key}/from_timestamp"] = episode.first_in_file / fps
            row[f"videos/{key}/to_timestamp"] = (episode.first_in_file + episode.length) / fps
        row |= {f"meta/episodes/{key}": value for key, value in _place(0).items()}
        of_episode = _statistics(columns, pixels, slice(number, number + 1), slice(episode.first, end))
        for feature, values in of_episode.items():
            row |= {f"stats/{feature}/{name}": value for name, value in values.items()}
        rows.append(row)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _statistics(columns: Arrays, pixels: Arrays, episodes: slice, rows: slice) -> dict[str, dict[str, list]]:
    found = {
        name: point_statistics(values[rows]) if name == CLOUD else number_statistics(values[rows])
        for name, values in columns.items()
    }
    frames = int(found["index"]["count"][0])
    found |= {key: image_statistics(counts[episodes].sum(axis=0), frames) for key, counts in pixels.items()}
    return {feature: {name: value.tolist() for name, value in values.items()} for feature, values in found.items()}


def _video_key(camera: str) -> str:
    return f"observation.images.{camera}"


def _place(file: int) -> dict[str, int]:
    return {"chunk_index": file // _FILES_PER_CHUNK, "file_index": file % _FILES_PER_CHUNK}


def _write_table(path: Path, columns: dict[str, Any], metadata: dict[bytes, bytes] | None = None) -> None:
    import pyarrow

    def column(values):
        if isinstance(values, np.ndarray) and values.ndim == 2:
            return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), values.shape[1])
        if isinstance(values, np.ndarray) and values.ndim == 3:
            # LeRobot stores arrays with two axes as lists of lists
            frames, points, entries = values.shape
            inner = np.arange(frames * points + 1, dtype=np.int32) * entries
            rows = pyarrow.ListArray.from_arrays(pyarrow.array(inner), pyarrow.array(values.ravel()))
            return pyarrow.ListArray.from_arrays(pyarrow.array(np.arange(frames + 1, dtype=np.int32) * points), rows)
        return pyarrow.array(values)

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({name: column(values) for name, values in columns.items()})
    parquet().write_table(table.replace_schema_metadata(metadata), path)


def _write_tasks(path: Path, instructions: list[str]) -> None:
    """LeRobot reads it with pandas and looks instructions up in the index; the metadata declares that index."""
    described = [
        {"name": name, "field_name": name, "pandas_type": kind, "metadata": None, "numpy_type": numpy}
        for name, kind, numpy in (("task_index", "int64", "int64"), ("task", "unicode", "object"))
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": described}
    columns = {"task_index": np.arange(len(instructions)), "task": instructions}
    _write_table(path, columns, {b"pandas": json.dumps(pandas).encode()})


def write_json(path: Path, values: dict[str, Any]) -> None:
    write_whole(path, json.dumps(values, indent=2), sync=True)
