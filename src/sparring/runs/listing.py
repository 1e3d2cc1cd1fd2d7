"""`sparring runs`: which run folders there are, and how each fares. Torch-free, so that it answers at once.

What a run says of itself is in its status.json; folders of earlier versions have none, and tell less.
"""

import errno
import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.config.text import read_settings
from sparring.errors import UserError

# what a run leaves beside its config, any of it
TRACES = {"status.json", "episode_metrics.jsonl", "evaluation.json", "train.log", "writer.lock"}
# what only runs leave, so that it tells one by itself
PROOF = {"status.json", "episode_metrics.jsonl"}
# folders in a run folder that hold no runs
INNER = {"episodes", "generations", "logs", "samples", "tensorboard", "videos", "wandb"}
# a state in words
_HOW = {"running": "goes on", "interrupted": "was interrupted", "crashed": "crashed", "killed": "was killed"}
# of runs that somebody may have meant, so many are named
NAMED = 5
# of a file, enough for its last line
TAIL = 1 << 16


@dataclass(frozen=True)
class RunState:
    """A run folder, seen from outside. `None`: not known."""

    path: str
    phase: str | None
    task: str | None
    # running, finished, interrupted, crashed, killed or unknown
    state: str
    why: str | None
    updates: int | None
    env_steps: int | None
    fraction: float | None
    # success_rate, low, high
    best: dict[str, Any] | None
    bytes: int
    # seconds since it was last heard of
    age: float


def find_runs(root: Path) -> list[RunState]:
    """Of `root` and all that is below it, the one last heard of first."""
    if not root.is_dir():
        raise UserError(f"'{root}' is no folder; give the one that your runs are in")
    return sorted(map(look_at, run_folders(root)), key=lambda run: run.age)


def run_folders(root: Path) -> Iterator[Path]:
    """`root` itself and those below it, as far as they are run folders; what lies in checkpoints is not looked at."""
    for folder, names, files in os.walk(root):
        if _is_run({*names, *files}):
            yield Path(folder)
        names[:] = [name for name in names if name not in INNER and not name.startswith((".", "checkpoint-"))]


def why_no_checkpoint(folder: Path) -> str | None:
    """In words, where a folder without one is a run, or holds some; None: it is something else."""
    if _is_run_folder(folder):
        run, often = look_at(folder), _config(folder).get("training.save_every")
        done = f" after {run.updates:,} updates" if run.updates else ""
        mend = "wait for it" if run.state == "running" else "train it again by the same command"
        return (
            f"'{folder}' has no checkpoint yet: its run {_HOW.get(run.state, 'ended')}{done}, and one is saved every "
            f"{often or 'so many'} updates (training.save_every) and at the end; {mend}"
        )
    # not deeper: it may be anybody's folder
    found = [path for deep in ("*", "*/*") for path in sorted(folder.glob(deep)) if _is_run_folder(path)]
    if not found:
        return None
    more = f" or {len(found) - NAMED} more" if len(found) > NAMED else ""
    return f"'{folder}' is no run but holds some; did you mean {', '.join(map(str, found[:NAMED]))}{more}?"


def _is_run_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.name.startswith("checkpoint-") and _is_run(set(os.listdir(path)))
    except PermissionError:  # somebody else's
        return False


def _is_run(names: set[str]) -> bool:
    """By what lies in a folder."""
    saved = any(name.startswith("checkpoint-") for name in names)
    return bool(PROOF & names) or "config.yaml" in names and (bool(TRACES & names) or saved)


def look_at(folder: Path) -> RunState:
    status = read_json(folder / "status.json")
    config = {} if status else _config(folder)
    last = _last_line(folder / "episode_metrics.jsonl")
    progress = status.get("progress") or {"updates": last.get("update"), "env_steps": last.get("total_steps")}
    return RunState(
        path=str(folder),
        phase=status.get("phase") or config.get("phase"),
        task=status.get("task") or _task(config),
        state=_state(folder, status),
        why=status.get("why"),
        updates=progress.get("updates"),
        env_steps=progress.get("env_steps"),
        fraction=progress.get("fraction"),
        best=status.get("best") if status else _evaluated(folder, last),
        bytes=size_of(folder),
        age=time.time() - (status.get("updated") or _touched(folder)),
    )


def is_held(folder: Path) -> bool | None:
    """Whether a process trains there; None: it cannot be told. Asking takes the lock for a moment, see `take_lock`."""
    try:
        handle = os.open(folder / "writer.lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    except PermissionError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            return None
        raise
    finally:
        os.close(handle)
    return False


def lives(folder: Path, status: dict) -> bool | None:
    """Whether the process that wrote this status is still there; None: nothing can tell.

    By the lock; where that tells nothing, by the number of the process, which after a restart may be another's.
    """
    held = is_held(folder)
    if held is not None or status.get("host") != platform.node() or not isinstance(status.get("pid"), int):
        return held
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True


def json_lines(file: Path) -> Iterator[dict]:
    """Those that are whole: a run that was killed may have left half of one."""
    if not file.exists():
        return
    with file.open() as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


def seconds_of(status: dict) -> float | None:
    """That a run has trained by its status.json, over all its starts; earlier versions told of the last one only."""
    if "seconds" in status or "started" not in status:
        return status.get("seconds")
    return (status.get("ended") or status.get("updated") or status["started"]) - status["started"]


def size_of(folder: Path) -> int:
    """In bytes, of all files; links are not followed."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(inner, name)).st_size
            except FileNotFoundError:  # a run goes on meanwhile
                continue
    return total


def _state(folder: Path, status: dict) -> str:
    said = status.get("state")
    if said == "running":
        return "killed" if lives(folder, status) is False else "running"
    return "running" if is_held(folder) else said or "unknown"


def read_json(file: Path) -> dict:
    """A JSON object; an empty one where there is none, or where it cannot be read."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _config(folder: Path) -> dict[str, Any]:
    try:
        return {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
    except UserError:
        return {}


def _task(config: dict[str, Any]) -> str | None:
    task = config.get("env.task") or config.get("env.name")
    return ", ".join(task) if isinstance(task, list) else task


def _last_line(file: Path) -> dict:
    if not file.exists():
        return {}
    with file.open("rb") as lines:
        lines.seek(max(0, file.stat().st_size - TAIL))
        for line in reversed(lines.read().splitlines()):
            try:
                return json.loads(line)
            except json.JSONDecodeError:  # half a line, at either end
                continue
    return {}


def _evaluated(folder: Path, last: dict) -> dict[str, Any] | None:
    """Of a run without a status, its last evaluation, where the env tells success from failure."""
    scores = read_json(folder / "evaluation.json").get("scores", {}).get("policy", {})
    if not scores or last.get("success_rate") is None:
        return None
    success = scores.get("all", next(iter(scores.values())))["success"]
    return {"success_rate": success["rate"], "low": success["low"], "high": success["high"]}


def _touched(folder: Path) -> float:
    return max((folder / name).stat().st_mtime for name in {"config.yaml", *TRACES} if (folder / name).exists())
