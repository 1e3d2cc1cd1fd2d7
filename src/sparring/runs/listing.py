"""`sparring runs`: lists run folders and the state of each, read from status.json. Never imports torch, to be fast."""

import math
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparring.config.text import read_settings
from sparring.errors import UserError
from sparring.processes.files import is_held
from sparring.processes.rows import Document

# a folder with config.yaml and one of these is a run folder
_TRACES = {"status.json", "episode_metrics.jsonl", "evaluation.json", "train.log", "writer.lock"}
# files that only runs write
_PROOF = {"status.json", "episode_metrics.jsonl"}
# folders inside a run folder that contain no runs
_INNER = {"episodes", "generations", "logs", "samples", "tensorboard", "videos", "wandb"}
_STATES = {"running": "is running", "interrupted": "was interrupted", "crashed": "crashed", "killed": "was killed"}
# status.json: key -> type of its value
_STATUS: dict[str, type | tuple[type, ...]] = dict.fromkeys(("state", "why", "phase", "task", "host"), str)
_STATUS |= dict.fromkeys(("progress", "last", "best", "system", "rows"), dict) | {"pid": int}
_STATUS |= dict.fromkeys(("started", "updated", "ended", "seconds"), (int, float))
_COUNTS = ("updates", "env_steps", "fraction")
# maximum number of runs that a hint names
_NAMED = 5


@dataclass(frozen=True)
class RunState:
    """The state of a run folder, read from its files. `None`: unknown."""

    path: str
    phase: str | None
    task: str | None
    state: str  # running, finished, interrupted, crashed, killed or unknown
    why: str | None
    updates: int | None
    env_steps: int | None
    fraction: float | None
    best: dict[str, Any] | None  # success_rate, low, high
    bytes: int
    age: float  # seconds since its last write


def find_runs(*roots: Path) -> list[RunState]:
    """The runs in `roots` and below them, without duplicates, the most recently written first."""
    if wrong := [root for root in roots if not root.is_dir()]:
        raise UserError(f"'{wrong[0]}' is not a folder; give the folder that contains your runs")
    found = dict.fromkeys(run for root in roots for run in run_folders(root))
    return sorted(map(_read_run, found), key=lambda run: run.age)


def run_folders(root: Path) -> Iterator[Path]:
    """All run folders among `root` and the folders below it; checkpoints are not searched."""
    for folder, names, files in os.walk(root):
        if _is_run({*names, *files}):
            yield Path(folder)
        names[:] = [name for name in names if name not in _INNER and not name.startswith((".", "checkpoint-"))]


def why_no_checkpoint(folder: Path) -> str | None:
    """Why a folder without checkpoints has none, if it is a run folder or contains some; None for any other folder."""
    if _is_run_folder(folder):
        try:
            saved = {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
        except UserError:
            saved = {}
        run, every = _read_run(folder), saved.get("training.save_every")
        done = f" after {run.updates:,} updates" if run.updates else ""
        fix = "wait for it" if run.state == "running" else "run the same command again"
        fix = f"it ended with: {run.why}. Change what this names, and train again" if run.state == "crashed" else fix
        return (
            f"'{folder}' has no checkpoint yet: its run {_STATES.get(run.state, 'ended')}{done}, and one is saved "
            f"every {every or 'n'} updates (training.save_every) and at the end; {fix}"
        )
    # not deeper, because any large folder may be given
    found = [path for deep in ("*", "*/*") for path in sorted(folder.glob(deep)) if _is_run_folder(path)]
    if not found:
        return None
    more = f" or {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"'{folder}' is not a run folder but contains some; give {', '.join(map(str, found[:_NAMED]))}{more}"


def _is_run_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.name.startswith("checkpoint-") and _is_run(set(os.listdir(path)))
    except PermissionError:  # a folder of another user
        return False


def _is_run(names: set[str]) -> bool:
    """Whether a folder with these files and folders is a run folder."""
    saved = any(name.startswith("checkpoint-") for name in names)
    return bool(_PROOF & names) or "config.yaml" in names and (bool(_TRACES & names) or saved)


def _read_run(folder: Path) -> RunState:
    status = read_status(folder)
    progress = status.get("progress") or {}
    values = {name: status.get(name) for name in ("phase", "task", "why", "best")}
    values |= {name: progress.get(name) for name in ("updates", "env_steps", "fraction")}
    values["why"] = status.get("damaged") or values["why"]
    files = [folder / name for name in {"config.yaml", *_TRACES} if (folder / name).exists()]
    updated = status.get("updated") or max((file.stat().st_mtime for file in files), default=folder.stat().st_mtime)
    state, age = _state(folder, status), time.time() - updated
    return RunState(path=str(folder), state=state, bytes=size_of(folder), age=age, **values)


def lives(folder: Path, status: dict) -> bool | None:
    """Whether the process that wrote this status is alive; None: unknown.

    Checks the lock; on a file system without locks the process id, which another process may have after a restart."""
    held = is_held(folder)
    if held is not None or status.get("host") != platform.node() or not isinstance(status.get("pid"), int):
        return held
    try:
        os.kill(status["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        pass
    return True


def size_of(folder: Path) -> int:
    """The size of all files, in bytes; links are not followed."""
    total = 0
    for inner, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(inner, name)).st_size
            except FileNotFoundError:  # a running process deleted it
                continue
    return total


def _state(folder: Path, status: dict) -> str:
    if status.get("state") == "running":
        return "killed" if lives(folder, status) is False else "running"
    return "running" if is_held(folder) else status.get("state") or "unknown"


def read_status(folder: Path) -> dict[str, Any]:
    """The values of `status.json` that have the expected type; if it is damaged, only `damaged` with the reason."""
    status, wrong = Document(folder / "status.json").read()
    if wrong or "state" not in status or not _is_number(status.get("updated")):
        # a run that wrote metrics must have a status
        is_there = os.path.lexists(folder / "status.json") or (folder / "episode_metrics.jsonl").exists()
        return {"damaged": wrong or "status.json is damaged: state or updated is missing"} if is_there else {}
    valid = {name: status[name] for name, kind in _STATUS.items() if isinstance(status.get(name), kind)}
    for name in valid.keys() & {"progress", "last", "best", "system", "rows"}:
        valid[name] = {key: value for key, value in valid[name].items() if not isinstance(value, (dict, list))}
    progress, best = valid.get("progress", {}), valid.get("best")
    if not 0 < valid.get("pid", 1) < 2**31:
        del valid["pid"]
    for name in [name for name in progress if name in _COUNTS and not _is_number(progress[name])]:
        del progress[name]
    if best is not None and not all(_is_number(best.get(name)) for name in ("success_rate", "low", "high")):
        del valid["best"]
    return valid


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
