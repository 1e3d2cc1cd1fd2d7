"""Runs a `sparring` command in a fork of this process, which has already imported the packages."""

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable


def fork(argv: list[str], seconds: float, act: Callable | None = None) -> tuple[int | None, str]:
    """Exit code and output of a `sparring` command, or of `act(argv)`; -signal if a signal ended it, None after a
    timeout."""
    with tempfile.TemporaryFile() as out:
        child = os.fork()
        if child == 0:
            _run_child(argv, out.fileno(), act)
        end, done, status = time.monotonic() + seconds, 0, 0
        while not done and time.monotonic() < end:
            done, status = os.waitpid(child, os.WNOHANG)
            time.sleep(0.01)
        if not done:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        out.seek(0)
        return os.waitstatus_to_exitcode(status) if done else None, out.read().decode(errors="replace")


def _run_child(argv: list[str], out: int, act: Callable | None) -> None:
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        from sparring.cli.main import main

        code = (act or main)(argv)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
