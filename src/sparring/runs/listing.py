"""`sparring runs`: which run folders there are, and the state of each, by its status.json. Torch-free: it is fast."""

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

# what a run writes next to its config, any of it
_TRACES = {"status.json", "episode_metrics.jsonl", "evaluation.json", "train.log", "writer.lock"}
# what only runs write
_PROOF = {"status.json", "episode_metrics.jsonl"}
# folders in a run folder that hold no runs
_INNER = {"episodes", "generations", "logs", "samples", "tensorboard", "videos", "wandb"}
_HOW = {"running": "goes on", "interrupted": "was interrupted", "crashed": "crashed", "killed": "was killed"}
# status.json: key -> kind of its value
_STATUS: dict[str, type | tuple[type, ...]] = dict.fromkeys(("state", "why", "phase", "task", "host"), str)
_STATUS |= dict.fromkeys(("progress", "last", "best", "system", "rows"), dict) | {"pid": int}
_STATUS |= dict.fromkeys(("started", "updated", "ended", "seconds"), (int, float))
_COUNTS = ("updates", "env_steps", "fraction")
# most runs that a hint names
_NAMED = 5


@dataclass(frozen=True)
class RunState:
    """A run folder, seen from outside. `None`: not known."""

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
    age: float  # seconds since it wrote last


def find_runs(root: Path) -> list[RunState]:
    """Those in `root` and below it, the one that wrote last first."""
    if not root.is_dir():
        raise UserError(f"'{root}' is no folder; give the one that your runs are in")
    return sorted(map(_look_at, run_folders(root)), key=lambda run: run.age)


def run_folders(root: Path) -> Iterator[Path]:
    """`root` itself and all below it that are run folders; checkpoints are not searched."""
    for folder, names, files in os.walk(root):
        if _is_run({*names, *files}):
            yield Path(folder)
        names[:] = [name for name in names if name not in _INNER and not name.startswith((".", "checkpoint-"))]


def why_no_checkpoint(folder: Path) -> str | None:
    """A message, where a folder without one is a run, or holds some; None: it is something else."""
    if _is_run_folder(folder):
        try:
            saved = {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
        except UserError:
            saved = {}
        run, often = _look_at(folder), saved.get("training.save_every")
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
    more = f" or {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"'{folder}' is no run but holds some; did you mean {', '.join(map(str, found[:_NAMED]))}{more}?"


def _is_run_folder(path: Path) -> bool:
    try:
        return path.is_dir() and not path.name.startswith("checkpoint-") and _is_run(set(os.listdir(path)))
    except PermissionError:  # somebody else's
        return False


def _is_run(names: set[str]) -> bool:
    """By what lies in a folder."""
    saved = any(name.startswith("checkpoint-") for name in names)
    return bool(_PROOF & names) or "config.yaml" in names and (bool(_TRACES & names) or saved)


def _look_at(folder: Path) -> RunState:
    status = read_status(folder)
    progress = status.get("progress") or {}
    told = {name: status.get(name) for name in ("phase", "task", "why", "best")}
    told |= {name: progress.get(name) for name in ("updates", "env_steps", "fraction")}
    told["why"] = status.get("damaged") or told["why"]
    files = [folder / name for name in {"config.yaml", *_TRACES} if (folder / name).exists()]
    updated = status.get("updated") or max((file.stat().st_mtime for file in files), default=folder.stat().st_mtime)
    state, age = _state(folder, status), time.time() - updated
    return RunState(path=str(folder), state=state, bytes=size_of(folder), age=age, **told)


def lives(folder: Path, status: dict) -> bool | None:
    """Whether the process that wrote this status is still there; None: unknown.

    By the lock; where there are no locks, by the process id, which after a restart may be another's.
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
    if status.get("state") == "running":
        return "killed" if lives(folder, status) is False else "running"
    return "running" if is_held(folder) else status.get("state") or "unknown"


def read_status(folder: Path) -> dict[str, Any]:
    """What `status.json` says and is of the kind that a run writes; or else `damaged`, what is wrong with it."""
    status, wrong = Document(folder / "status.json").read()
    if wrong or "state" not in status or not _is_number(status.get("updated")):
        # a run that has written numbers has a status
        is_there = os.path.lexists(folder / "status.json") or (folder / "episode_metrics.jsonl").exists()
        return {"damaged": wrong or "status.json is damaged: it does not say how the run fares"} if is_there else {}
    known = {name: status[name] for name, kind in _STATUS.items() if isinstance(status.get(name), kind)}
    for name in known.keys() & {"progress", "last", "best", "system", "rows"}:
        known[name] = {key: value for key, value in known[name].items() if not isinstance(value, (dict, list))}
    progress, best = known.get("progress", {}), known.get("best")
    if not 0 < known.get("pid", 1) < 2**31:
        del known["pid"]
    for name in [name for name in progress if name in _COUNTS and not _is_number(progress[name])]:
        del progress[name]
    if best is not None and not all(_is_number(best.get(name)) for name in ("success_rate", "low", "high")):
        del known["best"]
    return known


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
