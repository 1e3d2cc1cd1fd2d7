"""How a run stands: what it wrote about itself last, and whether it still lives."""

import fcntl
import os
import platform
from pathlib import Path

import orjson


def read_status(folder: Path) -> dict:
    """`status.json`, with the state `killed` where a run had no time to write how it ended."""
    status = read_object(folder / "status.json")
    if not status:
        started = any((folder / name).exists() for name in ("config.yaml", "episode_metrics.jsonl"))
        why = "this run kept no status.json" if started else "nothing has been written here yet"
        return {"state": "unknown" if started else "waiting", "why": why}
    if status.get("state") == "running" and not _lives(folder, status):
        return status | {"state": "killed", "why": "its process is gone and did not say why"}
    return status


def read_object(file: Path) -> dict:
    """A JSON object; an empty one where there is none, or where it cannot be read."""
    try:
        content = orjson.loads(file.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


def _lives(folder: Path, status: dict) -> bool:
    """By its process where that is of this machine; elsewhere by the lock, which we would rather not touch."""
    if status.get("host") == platform.node() and isinstance(status.get("pid"), int):
        try:
            os.kill(status["pid"], 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        return True
    try:
        with (folder / "writer.lock").open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or none that can be read
        return False
    return False
