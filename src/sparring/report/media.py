"""Videos and strips of a run folder: which there are, and which to show."""

import base64
import filecmp
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparring.report.tail import Tail

STRIPS = 12
VIDEOS = 48
TYPES = {".mp4": "video/mp4", ".png": "image/png"}


@dataclass(frozen=True)
class Picture:
    """A video or a strip; what is not known is None."""

    # relative to the run folder
    file: str
    kind: str
    bytes: int
    update: int | None = None
    episode: int | None = None
    task: str | None = None
    success: bool | None = None
    reward: float | None = None
    steps: int | None = None
    # of an evaluation in other episodes than the run's own
    settings: str | None = None


def videos(folder: Path) -> list[Picture]:
    """Those of an index and those that merely lie there; failures first, then the newest."""
    told = {}
    for rows in Tail(folder / "videos" / "index.jsonl").rows():
        told |= {Path(str(row["file"])).name: row for row in rows if "file" in row}
    found = [_video(name, size, told.get(name, {})) for name, size in _files(folder / "videos", ".mp4").items()]
    worst_first = {False: 0, None: 1, True: 2}
    found.sort(key=lambda v: (worst_first[v.success], -(v.update or v.episode or 0), v.file))
    return _each_once(found, folder)


def strips(folder: Path) -> list[Picture]:
    """What world models foretold beside what came, oldest first; the other pictures are moments of a video."""
    found = []
    for name, size in _files(folder / "samples", "_pred_vs_gt.png").items():
        number = re.match(r"episode_(\d+)", name)
        found.append(Picture(f"samples/{name}", "pred vs gt", size, episode=int(number[1]) if number else None))
    return sorted(found, key=lambda strip: (strip.episode or 0, strip.file))


def spread(pictures: list[Picture], most: int = STRIPS) -> list[Picture]:
    """At most so many, evenly, with the first and the last."""
    if len(pictures) <= most:
        return pictures
    return [pictures[i] for i in np.linspace(0, len(pictures) - 1, most).round().astype(int)]


def within(pictures: list[Picture], budget: int) -> list[Picture]:
    """Those that fit into so many bytes, the first ones first; a large one does not keep small ones out."""
    kept = []
    for picture in pictures:
        if picture.bytes <= budget:
            kept.append(picture)
            budget -= picture.bytes
    return kept


def data_uri(path: Path) -> str:
    return f"data:{TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _video(name: str, size: int, told: dict) -> Picture:
    """What the index tells, or else the name: rollout_<update>_*, episode_<n>_*, of predictions episode_<n>."""
    guess = {}
    if match := re.match(r"rollout_(\d+)", name):
        guess = {"kind": "rollout", "update": int(match[1])}
    elif match := re.match(r"episode_(\d+)(_?)", name):
        guess = {"kind": "evaluation" if match[2] else "prediction", "episode": int(match[1])}
    elif name.startswith("eval_"):
        guess = {"kind": "eval"}
    known = {key: told[key] for key in Picture.__dataclass_fields__ if told.get(key) is not None}
    return Picture(**({"kind": "video"} | guess | known | {"file": f"videos/{name}", "bytes": size}))


def _each_once(videos: list[Picture], folder: Path) -> list[Picture]:
    """`sparring eval` may have filmed anew what the run had filmed itself."""
    own = [video for video in videos if not _is_since(video)]
    return [video for video in videos if not (_is_since(video) and any(_same(folder, video, one) for one in own))]


def _is_since(video: Picture) -> bool:
    """By `sparring eval`."""
    return Path(video.file).name.startswith("eval_")


def _same(folder: Path, one: Picture, other: Picture) -> bool:
    try:
        return one.bytes == other.bytes and filecmp.cmp(folder / one.file, folder / other.file, shallow=False)
    except FileNotFoundError:  # removed since they were listed
        return False


def _files(folder: Path, suffix: str) -> dict[str, int]:
    """Names and sizes; a video that is being encoded is empty at first."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(suffix))
    except FileNotFoundError:
        return {}
    return {name: size for name in names if (size := _size(folder / name))}


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # removed since it was listed
        return 0
