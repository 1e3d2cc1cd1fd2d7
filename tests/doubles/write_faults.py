"""Commands in which one call that writes goes wrong; write_faults.c does it, in a process that was started with it."""

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# the call fails, once, or it and all that need space after it; it writes half; the process ends before it, or at half
KINDS = {"EIO": 1, "ENOSPC": 2, "short": 3, "kill": 4, "torn": 5}
HANG_S = 120


class Point(NamedTuple):
    """The `nth` time that this is called on that path (wildcards), which is below the folder that is written to."""

    call: str
    path: str
    nth: int

    def fits(self, kind: str) -> bool:
        """Only what writes can write half."""
        return "write" in self.call or kind not in ("short", "torn")


def build(folder: Path) -> Path | None:
    """The library for LD_PRELOAD; None where there is no compiler, or no such thing."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "lib_write_faults.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def points_of(words: list[str], folder: Path) -> list[Point]:
    """All that a command calls to write below a folder, in turn."""
    with tempfile.TemporaryFile() as listed:
        code, text = run(words, folder, listed.fileno())
        listed.seek(0)
        lines = listed.read().decode().splitlines()
    if code:
        raise RuntimeError(f"sparring {' '.join(words)}: {code}\n{text}")
    met, points = Counter(), []
    for line in lines:
        call, _, path = line.partition(" ")
        # names that hold the time, or letters at random, are others in another process
        path = re.sub(r"\d{8}_\d{6}|(?<=\.tmp)\w{6}", "*", path)
        points.append(Point(call, path, met[call, path]))
        met[call, path] += 1
    return points


def run(
    words: Sequence[str], folder: Path, listed: int = -1, point: Point | None = None, kind: str = "kill"
) -> tuple[int | None, str]:
    """Exit code and output of a `sparring` command in a fork of this process; -signal where one ended it."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            faults = ctypes.CDLL(None) if point or listed >= 0 else None
            _be(words, out.fileno(), faults, (str(folder).encode(), listed, point or Point("", "", 0), KINDS[kind]))
        end, done, status = time.monotonic() + HANG_S, 0, 0
        while not done and time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.005)
        if not done:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        out.seek(0)
        return os.waitstatus_to_exitcode(status) if done else None, out.read().decode(errors="replace")


def _be(words: Sequence[str], out: int, faults: ctypes.CDLL | None, how: tuple) -> None:
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        from sparring.cli.main import main

        if faults is not None:
            folder, listed, point, kind = how
            faults.faults_arm(folder, listed, point.call.encode(), point.path.encode(), point.nth, kind)
        code = main(list(words))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
