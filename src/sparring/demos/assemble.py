"""Recorded blocks, and datasets assembled from them."""

import json
import os
import shutil
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from sparring.data import lerobot as statistics
from sparring.data import video
from sparring.data.lerobot import POINTS, RECORDING, parquet, pixel_counts
from sparring.data.video import encode
from sparring.demos import plan as names
from sparring.demos.plan import Plan
from sparring.envs.backend import Arrays, EpisodeSeeds
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.errors import UserError
from sparring.processes.files import flush, flush_tree

# ---- Plays the expert for a block of episodes and writes those worth keeping.
#
# Which episodes a block holds follows from its number, and what happens in them from their seeds: any process may
# record
# any block, at any time, and the same bytes come out. A block appears under its name only when it is complete.
#
# block-000007/numbers.npz     of the kept episodes, one after another (see `Block`)
# block-000007/0-head.mp4      pictures of the first kept one


@dataclass(frozen=True)
class Block:
    """A recorded block: K episodes kept of those tried, F steps in all."""

    folder: Path
    # "number", "seed", "task", "success", "length": [K]; "state", "privileged", "action": [F, D]; "points": [F, P, 6];
    # "reward": [F]; "pixels/<camera>": [K, 3, 256], see pixel_counts
    numbers: Arrays

    @property
    def kept(self) -> int:
        return len(self.numbers["number"])

    def clip(self, episode: int, camera: str) -> Path:
        return self.folder / f"{episode}-{camera}.mp4"


def block_folder(folder: Path, number: int) -> Path:
    return folder / f"block-{number:06d}"


def read_block(folder: Path) -> Block | None:
    """None where its numbers cannot be read: it is to be recorded again."""
    try:
        with np.load(folder / "numbers.npz") as file:
            return Block(folder, dict(file))
    except (OSError, EOFError, ValueError, BadZipFile):
        return None


class BlockRecorder:
    """Records blocks of a plan into `folder`; one env, used again and again."""

    def __init__(self, plan: Plan, folder: Path):
        self._plan, self._folder = plan, folder
        self._env = Tabletop(plan.env, plan.robots, plan.max_episode_steps)
        self._expert = Expert(self._env, plan.noise, plan.seed)
        self._vectors = [name for name in ("state", "privileged", "points") if name in self._env.spec.observation]

    def __call__(self, number: int) -> int:
        """Record block `number`; the same number comes back."""
        seeds = EpisodeSeeds(self._plan.seed, first_env=number * self._plan.robots, total_envs=self._plan.robots)
        tracks, lengths, success = self._play(seeds)
        kept = np.flatnonzero(success | self._plan.keep_failures)
        numbers = {
            "number": seeds.first_env + kept,
            "seed": np.array([seeds(int(row), 0) for row in kept], np.int64),
            "task": tracks["task"][0, kept],
            "success": success[kept],
            "length": lengths[kept],
        }
        for name in (*self._vectors, "action", "reward"):
            parts = [tracks[name][: lengths[row], row] for row in kept]
            # an empty first part tells shape and type where nothing is kept
            numbers[name] = np.concatenate([tracks[name][:0, 0], *parts])
        self._write(number, numbers, tracks, lengths, kept)
        return number

    def _play(self, seeds: EpisodeSeeds) -> tuple[Arrays, np.ndarray, np.ndarray]:
        """One episode of every robot: what was seen, done and earned `[T, N, ...]`, and `[N]` lengths and successes."""
        env, steps = self._env, self._env.spec.max_episode_steps
        shapes = env.spec.observation | {"action": ((env.spec.action_dim,), "float32"), "reward": ((), "float32")}
        tracks = {name: np.empty((steps, env.num_envs, *shape), dtype) for name, (shape, dtype) in shapes.items()}
        lengths, success = np.zeros(env.num_envs, np.int64), np.zeros(env.num_envs, bool)
        observation = env.reset(seeds)
        for t in range(steps):
            # what is recorded is exactly what the robots are told
            action = self._expert().astype(np.float32)
            step = env.step(action)
            for name, values in (observation | {"action": action[:, 0], "reward": step.reward[:, 0]}).items():
                tracks[name][t] = values
            # where tasks are mixed, the shorter ones go on with another episode, which is not recorded
            first = step.ended[lengths[step.ended] == 0]
            lengths[first], success[first] = t + 1, step.success[first]
            observation = step.observation
        return tracks, lengths, success

    def _write(self, number: int, numbers: Arrays, tracks: Arrays, lengths: np.ndarray, kept: np.ndarray) -> None:
        target = block_folder(self._folder, number)
        partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        fps = int(self._env.spec.control_hz)
        for camera in self._plan.env.cameras:
            counts = np.zeros((len(kept), 3, 256), np.int64)
            for k, row in enumerate(kept):
                # [T, 3, H, W] -> [T, H, W, 3]
                frames = tracks[f"image/{camera}"][: lengths[row], row].transpose(0, 2, 3, 1)
                counts[k] = pixel_counts(frames)
                encode(Block(partial, {}).clip(k, camera), frames, fps, self._plan.pixel_format)
            numbers[f"pixels/{camera}"] = counts
        np.savez(partial / "numbers.npz", **numbers)
        flush_tree(partial)
        os.replace(partial, target)
        flush(self._folder)


# ---- Makes a LeRobotDataset v3.0 folder out of recorded blocks (see data/lerobot.py for the layout).
#
# meta/info.json comes last, in one stroke: without it a folder is no dataset, so what was interrupted is never read.


# LeRobot keeps the time within a video in float32: beyond 1000 s it could no longer tell frames to a tenth of a ms
_FRAMES_PER_FILE = 20_000
# the folders of a dataset
PARTS = ("data", "videos", "meta")
_FILES_PER_CHUNK = 1000
_PLACE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
_DATA, _VIDEO = f"data/{_PLACE}.parquet", f"videos/{{video_key}}/{_PLACE}.mp4"


@dataclass(frozen=True)
class Kept:
    """An episode of the dataset: the k-th of its block, and its rows in there; then its place in the dataset."""

    block: Block
    k: int
    rows: slice
    file: int
    # steps of earlier episodes, in all and in the same file
    first: int
    first_in_file: int

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start

    def number(self, name: str) -> Any:
        return self.block.numbers[name][self.k]


def assemble(output: Path, plan: Plan, blocks: list[Block], episodes: int) -> dict[str, Any]:
    """The first `episodes` kept ones of these blocks; what was written into meta/info.json."""
    # of an assembly that was interrupted
    for name in PARTS:
        shutil.rmtree(output / name, ignore_errors=True)
    env = Tabletop(plan.env, len(plan.env.task), plan.max_episode_steps)
    fps, cameras = int(env.spec.control_hz), plan.env.cameras
    kept = _pick(blocks, episodes)
    said = [env.spec.instructions[episode.number("task")] for episode in kept]
    # in the order of the env, each once: tasks that differ in their starts only are put in the same words
    instructions = [text for text in dict.fromkeys(env.spec.instructions) if text in said]
    columns = _columns(kept, fps, np.array([instructions.index(text) for text in said]))
    pixels = {_video_key(camera): _gathered(kept, f"pixels/{camera}") for camera in cameras}
    features = _features(env, columns, plan, fps)

    for file, group in groupby(kept, lambda episode: episode.file):
        of_file = list(group)
        rows = slice(of_file[0].first, of_file[-1].first + of_file[-1].length)
        _write_table(output / _DATA.format(**_place(file)), {name: values[rows] for name, values in columns.items()})
        for camera in cameras:
            path = output / _VIDEO.format(video_key=_video_key(camera), **_place(file))
            path.parent.mkdir(parents=True, exist_ok=True)
            _join(path, of_file, camera, output / RECORDING)
    _write_table(
        output / f"meta/episodes/{_PLACE.format(**_place(0))}.parquet", _episodes(kept, said, columns, pixels, fps)
    )
    _write_tasks(output / "meta/tasks.parquet", instructions)
    frames = len(columns["index"])
    _write_json(output / "meta/stats.json", _as_lists(_statistics(columns, pixels, slice(0, len(kept)), slice(None))))
    _write_json(output / "meta/sparring.json", plan.settings() | _told(kept, env))
    info = {
        "codebase_version": "v3.0",
        "robot_type": "sparring_arm" if len(env.mounts) == 1 else "sparring_two_arms",
        "total_episodes": len(kept),
        "total_frames": frames,
        "total_tasks": len(instructions),
        "chunks_size": _FILES_PER_CHUNK,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": fps,
        "splits": {"train": f"0:{len(kept)}"},
        "data_path": _DATA,
        "video_path": _VIDEO if cameras else None,
        "features": features,
    }
    env.close()
    for name in PARTS:
        if (output / name).exists():
            flush_tree(output / name)
    flush(output)
    _write_json(output / "meta/info.json", info)
    return info


def _pick(blocks: list[Block], episodes: int) -> list[Kept]:
    kept, file, first, first_in_file = [], 0, 0, 0
    for block in blocks:
        start = 0
        for k, length in enumerate(block.numbers["length"][: episodes - len(kept)].tolist()):
            if first_in_file and first_in_file + length > _FRAMES_PER_FILE:
                file, first_in_file = file + 1, 0
            kept.append(Kept(block, k, slice(start, start + length), file, first, first_in_file))
            start, first, first_in_file = start + length, first + length, first_in_file + length
    return kept


def _join(path: Path, episodes: list[Kept], camera: str, folder: Path) -> None:
    """ffmpeg joins what it can of damaged clips and says nothing: frames would be missing, so they are counted."""
    clips = [episode.block.clip(episode.k, camera) for episode in episodes]
    try:
        video.join(path, clips, folder)
        if video.count(path) == sum(episode.length for episode in episodes):
            return
    except UserError:
        # which clip is to blame is said below
        pass
    for episode, clip in zip(episodes, clips, strict=True):
        whole = video.count(clip)
        if whole != episode.length:
            raise UserError(
                f"'{clip}' is damaged: {whole} of its {episode.length} frames can be read; delete the folder "
                f"'{clip.parent}' and run the same command again, which records it anew"
            )
    raise UserError(f"'{path}' was not written whole; is the disk full? run the same command again")


def _columns(kept: list[Kept], fps: int, tasks: np.ndarray) -> Arrays:
    """Feature -> `[F]` or `[F, D]` (points: `[F, P, 6]`), all frames."""
    lengths = np.array([episode.length for episode in kept])
    frames, ends = int(lengths.sum()), np.cumsum(lengths)
    within = np.arange(frames) - np.repeat(ends - lengths, lengths)
    done = np.zeros(frames, bool)
    done[ends - 1] = True
    success = np.zeros(frames, bool)
    success[ends - 1] = [episode.number("success") for episode in kept]

    def recorded(name):
        return np.concatenate([episode.block.numbers[name][episode.rows] for episode in kept])

    vectors = {"observation.state": recorded("state")}
    for name in ("privileged", "points"):
        if name in kept[0].block.numbers:
            vectors[f"observation.{name}"] = recorded(name)
    return vectors | {
        "action": recorded("action"),
        "next.reward": recorded("reward"),
        "next.done": done,
        "next.success": success,
        "timestamp": (within / fps).astype(np.float32),
        "frame_index": within,
        "episode_index": np.repeat(np.arange(len(kept)), lengths),
        "index": np.arange(frames),
        "task_index": np.repeat(tasks, lengths),
    }


def _features(env: Tabletop, columns: Arrays, plan: Plan, fps: int) -> dict[str, Any]:
    said = {"observation.state": names.state_names(env), "action": names.action_names(env)}
    if "observation.privileged" in columns:
        said["observation.privileged"] = names.privileged_names(env)
    if POINTS in columns:
        # of its axes, as of a picture's
        said[POINTS] = ["points", "x_y_z_r_g_b"]
    features = {
        name: {"dtype": str(values.dtype), "shape": list(values.shape[1:]) or [1], "names": said.get(name)}
        for name, values in columns.items()
    }
    size = plan.env.image_size
    for camera in plan.env.cameras:
        features[_video_key(camera)] = {
            "dtype": "video",
            "shape": [size, size, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": size,
                "video.width": size,
                "video.codec": video.CODEC,
                "video.pix_fmt": plan.pixel_format,
                "video.is_depth_map": False,
                "video.fps": fps,
                "video.channels": 3,
                "has_audio": False,
            },
        }
    return features


def _episodes(kept: list[Kept], said: list[str], columns: Arrays, pixels: Arrays, fps: int) -> dict[str, list]:
    """Column -> an entry for each episode."""
    rows = []
    for number, (episode, text) in enumerate(zip(kept, said, strict=True)):
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
        for feature, values in _as_lists(of_episode).items():
            row |= {f"stats/{feature}/{name}": value for name, value in values.items()}
        rows.append(row)
    return {name: [row[name] for row in rows] for name in rows[0]}


def _statistics(columns: Arrays, pixels: Arrays, episodes: slice, rows: slice) -> dict[str, dict[str, np.ndarray]]:
    found = {
        name: statistics.of_points(values[rows]) if name == POINTS else statistics.of_numbers(values[rows])
        for name, values in columns.items()
    }
    frames = int(found["index"]["count"][0])
    return found | {key: statistics.of_pictures(counts[episodes].sum(axis=0), frames) for key, counts in pixels.items()}


def _told(kept: list[Kept], env: Tabletop) -> dict[str, Any]:
    """What LeRobot has no place for, of each episode."""
    return {
        "episodes_tried": int(kept[-1].number("number")) + 1,
        "episode_numbers": [int(episode.number("number")) for episode in kept],
        "episode_seeds": [int(episode.number("seed")) for episode in kept],
        "episode_tasks": [env.spec.task_names[episode.number("task")] for episode in kept],
    }


def _gathered(kept: list[Kept], name: str) -> np.ndarray:
    return np.stack([episode.number(name) for episode in kept])


def _video_key(camera: str) -> str:
    return f"observation.images.{camera}"


def _place(file: int) -> dict[str, int]:
    return {"chunk_index": file // _FILES_PER_CHUNK, "file_index": file % _FILES_PER_CHUNK}


def _as_lists(values: dict[str, dict[str, np.ndarray]]) -> dict[str, dict[str, list]]:
    return {name: {key: value.tolist() for key, value in of_name.items()} for name, of_name in values.items()}


def _write_table(path: Path, columns: dict[str, Any], metadata: dict[bytes, bytes] | None = None) -> None:
    import pyarrow

    def column(values):
        if isinstance(values, np.ndarray) and values.ndim == 2:
            return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values.ravel()), values.shape[1])
        if isinstance(values, np.ndarray) and values.ndim == 3:
            # lists of lists, which is how LeRobot keeps what has two axes
            frames, points, entries = values.shape
            inner = np.arange(frames * points + 1, dtype=np.int32) * entries
            rows = pyarrow.ListArray.from_arrays(pyarrow.array(inner), pyarrow.array(values.ravel()))
            return pyarrow.ListArray.from_arrays(pyarrow.array(np.arange(frames + 1, dtype=np.int32) * points), rows)
        return pyarrow.array(values)

    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.table({name: column(values) for name, values in columns.items()})
    parquet().write_table(table.replace_schema_metadata(metadata), path)


def _write_tasks(path: Path, instructions: list[str]) -> None:
    """LeRobot reads it with pandas and looks the words up in the index; this says so in pandas' own way."""
    fields = [("task_index", "int64"), ("task", "unicode")]
    described = [
        {"name": name, "field_name": name, "pandas_type": kind, "metadata": None}
        | {"numpy_type": "int64" if kind == "int64" else "object"}
        for name, kind in fields
    ]
    pandas = {"index_columns": ["task"], "column_indexes": [], "columns": described}
    columns = {"task_index": np.arange(len(instructions)), "task": instructions}
    _write_table(path, columns, {b"pandas": json.dumps(pandas).encode()})


def _write_json(path: Path, values: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=2))
    flush(partial)
    os.replace(partial, path)
    flush(path.parent)
