"""The documented names of metrics."""

from collections.abc import Iterable

from sparring.record.names import FAMILIES, FLAT, NAMES

KNOWN = {*FLAT, "timestamp", "row", "crc", *(name for name, _ in NAMES.values())}
# `behind_` of perf/ -> perf/behind_
BEGINNINGS = tuple(f"{group}{prefix}" for prefix, (group, _) in FAMILIES.items())


def unexplained(keys: Iterable[str]) -> list[str]:
    """Keys of a line of episode_metrics.jsonl that are not in record/names.py, and therefore not in docs/metrics.md."""
    return [key for key in keys if key not in KNOWN and not key.startswith(BEGINNINGS)]
