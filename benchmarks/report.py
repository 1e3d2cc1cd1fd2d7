"""Metadata that every benchmark stores with its numbers (date, commit, machine, load), and helpers for output."""

import fcntl
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "tensordict", "numpy", "gymnasium", "mujoco", "numba", "stable-baselines3")


def metadata() -> dict:
    """Metadata of a measurement that begins now; call `load()` again after it."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "load": load(),
    }


def load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes: timings on a busy machine are unreliable."""
    return [round(x, 2) for x in os.getloadavg()]


def commit() -> str:
    """The commit of the working tree, with `-dirty` if src/ differs from it."""
    name = _git("rev-parse", "--short=12", "HEAD") or "unknown"
    return f"{name}-dirty" if _git("status", "--porcelain", "--", "src") else name


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def device(name: str) -> str:
    """The model of the device 'cpu' or 'cuda'."""
    if name == "cpu":
        return cpu_model()
    import torch

    return torch.cuda.get_device_name(name)


def write_json(path: Path, content: dict) -> None:
    """Replace the file atomically, so that an interrupted benchmark leaves the previous one intact."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)


def keep_run(results: Path, runs: Path, outcome: dict) -> None:
    """Add the outcome of one seed of one problem to the results file."""
    runs.mkdir(exist_ok=True)
    # another seed may finish at the same time
    with open(runs / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = json.loads(results.read_text())["runs"] if results.is_file() else {}
        known[f"{outcome['problem']}/{outcome['seed']}"] = outcome
        write_json(results, {"about": metadata(), "runs": known})


def rate_in_words(rate: dict) -> str:
    """A success rate with its interval, as text."""
    return f"{rate['success']:.1%} ({rate['low']:.1%}..{rate['high']:.1%})"


def table(rows: list[tuple]) -> str:
    """Format rows as a text table; the first row is the header."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parents[1], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
