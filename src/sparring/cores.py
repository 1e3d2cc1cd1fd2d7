"""How many cores there are to share out."""

import os


def usable_cores() -> int:
    """Those that this process may use, where the system can tell: of a machine of 64 a job may have 4."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(parts: int) -> int:
    """For each of `parts` that work at the same time."""
    return max(1, usable_cores() // parts)
