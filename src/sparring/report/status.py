"""How a run stands: what it wrote about itself last, and whether it still lives."""

from pathlib import Path

from sparring.runs import lives, read_json


def read_status(folder: Path) -> dict:
    """`status.json`, with the state `killed` where a run had no time to write how it ended."""
    status = read_json(folder / "status.json")
    if not status:
        started = any((folder / name).exists() for name in ("config.yaml", "episode_metrics.jsonl"))
        why = "this run kept no status.json" if started else "nothing has been written here yet"
        return {"state": "unknown" if started else "waiting", "why": why}
    if status.get("state") == "running" and lives(folder, status) is False:
        return status | {"state": "killed", "why": "its process is gone and did not say why"}
    return status
