"""Videos and strips of a run folder: lists them, and chooses those to show."""

import filecmp
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sparring.report.curves import Tail

STRIPS = 12
VIDEOS = 48
# keys of a line of index.jsonl, and their types
_KINDS: dict[str, type | tuple[type, ...]] = dict.fromkeys(("kind", "task", "settings"), str)
_KINDS |= dict.fromkeys(("update", "episode", "steps"), int) | {"success": bool, "reward": (int, float)}
TYPES = {".mp4": "video/mp4", ".png": "image/png"}


@dataclass(frozen=True)
class Picture:
    file: str  # relative to the run folder
    kind: str
    bytes: int
    update: int | None = None
    episode: int | None = None
    task: str | None = None
    success: bool | None = None
    reward: float | None = None
    steps: int | None = None
    settings: str | None = None  # of an evaluation whose settings differ from those of the run

    @staticmethod
    def videos(folder: Path) -> list["Picture"]:
        """All video files, with their entries in index.jsonl; failures first, then the newest."""
        index: dict[str, dict] = {}
        for rows in Tail(folder / "videos" / "index.jsonl").rows():
            index |= {Path(str(row["file"])).name: row for row in rows if "file" in row}
        found = [_video(name, size, index.get(name, {})) for name, size in _files(folder / "videos", ".mp4").items()]
        failures_first = {False: 0, None: 1, True: 2}
        found.sort(key=lambda v: (failures_first[v.success], -(v.update or v.episode or 0), v.file))
        # `sparring eval` may have recorded the same episodes as the run itself
        later = [video for video in found if Path(video.file).name.startswith("eval_")]
        own = [video for video in found if video not in later]
        doubles = []
        for video, other in product(later, own):
            with suppress(FileNotFoundError):  # removed since they were listed
                if video.bytes == other.bytes and filecmp.cmp(folder / video.file, folder / other.file, shallow=False):
                    doubles.append(video)
        return [video for video in found if video not in doubles]

    @staticmethod
    def strips(folder: Path) -> list["Picture"]:
        """Predicted and true frames of world models, oldest first; the other images in samples/ belong to a video."""
        found = []
        for name, size in _files(folder / "samples", "_pred_vs_gt.png").items():
            number = re.match(r"episode_(\d+)", name)
            found.append(Picture(f"samples/{name}", "pred vs gt", size, episode=int(number[1]) if number else None))
        return sorted(found, key=lambda strip: (strip.episode or 0, strip.file))

    @staticmethod
    def choose(
        videos: list["Picture"], strips: list["Picture"], budget: int | None
    ) -> tuple[list["Picture"], list["Picture"]]:
        videos, strips = videos[:VIDEOS], _spread(strips, STRIPS)
        if budget is not None:
            strips = _within(strips, budget // 4)
            videos = _within(videos, budget - sum(strip.bytes for strip in strips))
        return videos, strips


def _spread(pictures: list[Picture], most: int) -> list[Picture]:
    """At most `most` pictures, evenly spaced, including the first and the last."""
    if len(pictures) <= most:
        return pictures
    return [pictures[i] for i in np.linspace(0, len(pictures) - 1, most).round().astype(int)]


def _within(pictures: list[Picture], budget: int) -> list[Picture]:
    """The pictures that fit into `budget` bytes, in order; skips one that is too large and tries the next."""
    kept = []
    for picture in pictures:
        if picture.bytes <= budget:
            kept.append(picture)
            budget -= picture.bytes
    return kept


def _video(name: str, size: int, line: dict) -> Picture:
    """Described by its index entry, or by its name: rollout_<update>_*, episode_<n>_*, a prediction's episode_<n>."""
    guess: dict[str, Any] = {"kind": "eval" if name.startswith("eval_") else "video"}
    if match := re.match(r"rollout_(\d+)", name):
        guess = {"kind": "rollout", "update": int(match[1])}
    elif match := re.match(r"episode_(\d+)(_?)", name):
        guess = {"kind": "evaluation" if match[2] else "prediction", "episode": int(match[1])}
    known = {key: line[key] for key, kind in _KINDS.items() if isinstance(line.get(key), kind)}
    return Picture(**(guess | known | {"file": f"videos/{name}", "bytes": size}))


def _files(folder: Path, suffix: str) -> dict[str, int]:
    """Names and sizes; skips empty files: a video that is being encoded is empty at first."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    sizes = {}
    for entry in entries:
        # it may have been removed since it was listed
        with suppress(FileNotFoundError):
            is_file = entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False)
            if is_file and (size := entry.stat().st_size):
                sizes[entry.name] = size
    return sizes
