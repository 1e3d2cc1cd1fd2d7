"""What tests know of the names of metrics."""

from collections.abc import Iterable

from sparring.record.names import FAMILIES, FLAT, NAMES

KNOWN = {*FLAT, "timestamp", "row", "crc", *(name for name, _ in NAMES.values())}
# `behind_` of perf/ -> perf/behind_
BEGINNINGS = tuple(f"{group}{prefix}" for prefix, (group, _) in FAMILIES.items())


def unexplained(keys: Iterable[str]) -> list[str]:
    """Those keys of a line of episode_metrics.jsonl that record/names.py, and so docs/metrics.md, says nothing of."""
    return [key for key in keys if key not in KNOWN and not key.startswith(BEGINNINGS)]
