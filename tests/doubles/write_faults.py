"""Commands in which one writing call fails; needs a process that was started with the library of write_faults.c."""

import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from forks import fork

# one call fails; it and all later calls that need space fail; it writes half; the process ends before it, or at half
KINDS = {"EIO": 1, "ENOSPC": 2, "short": 3, "kill": 4, "torn": 5}
HANG_S = 120


class Point(NamedTuple):
    """The `nth` call of this function on a path (wildcards) below the output folder."""

    call: str
    path: str
    nth: int

    def fits(self, kind: str) -> bool:
        """Only write calls can write half."""
        return "write" in self.call or kind not in ("short", "torn")


def build(folder: Path) -> Path | None:
    """The library for LD_PRELOAD; None without a compiler or on other systems than Linux."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "lib_write_faults.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def points_of(words: list[str], folder: Path) -> list[Point]:
    """All writing calls of a command below a folder, in order."""
    with tempfile.TemporaryFile() as listed:
        code, text = run(words, folder, listed.fileno())
        listed.seek(0)
        lines = listed.read().decode().splitlines()
    if code:
        raise RuntimeError(f"sparring {' '.join(words)}: {code}\n{text}")
    met, points = Counter(), []
    for line in lines:
        call, _, path = line.partition(" ")
        # names with a time or random letters differ between processes
        path = re.sub(r"\d{8}_\d{6}|(?<=\.tmp)\w{6}", "*", path)
        points.append(Point(call, path, met[call, path]))
        met[call, path] += 1
    return points


def run(
    words: Sequence[str], folder: Path, listed: int = -1, point: Point | None = None, kind: str = "kill"
) -> tuple[int | None, str]:
    """Exit code and output of a `sparring` command in a fork of this process; -signal if a signal ended it."""
    from sparring.cli.main import main

    def act(argv: list[str]) -> int:
        if point or listed >= 0:
            call, path, nth = point or Point("", "", 0)
            ctypes.CDLL(None).faults_arm(str(folder).encode(), listed, call.encode(), path.encode(), nth, KINDS[kind])
        return main(argv)

    return fork(list(words), HANG_S, act)
