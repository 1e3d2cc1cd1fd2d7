"""Sides of a comparison that take turns, so that a busy moment affects all. Each is a process of env_peers.py."""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


class Worker:
    """One side of a comparison: a process that runs turns on request and is idle otherwise."""

    def __init__(self, kind: str, gl: str = "disable", python: str = sys.executable, **arguments):
        # one core means one thread: neither the GL driver nor BLAS may start threads
        quiet = {"MUJOCO_GL": gl, "LP_NUM_THREADS": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, Path(__file__).with_name("env_peers.py"), kind, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | quiet,
            text=True,
        )
        self._kind = kind
        self.turns = 1
        # the description that the process prints
        self.about = json.loads(self._answer())

    def settle(self, seconds: float) -> None:
        """Warm up, and choose a number of turns that takes about this long."""
        self.seconds_per_turn()
        self.turns = max(1, round(seconds / self.seconds_per_turn()))

    def seconds_per_turn(self) -> float:
        self.start()
        return self.wait()

    def start(self) -> None:
        print(self.turns, file=self._process.stdin, flush=True)

    def wait(self) -> float:
        return float(self._answer()) / self.turns

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._errors.close()

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(timeout=60)
            self._errors.seek(0)
            raise SideFailed(f"{self._kind} ended: {self._errors.read().strip()[-2000:]}")
        return line


class SideFailed(RuntimeError): ...


class AtOnce:
    """Several workers that run at the same time as one side; the slowest one determines its time."""

    def __init__(self, *workers: Worker):
        self._workers = workers
        self.about = workers[0].about

    def settle(self, seconds: float) -> None:
        for worker in self._workers:
            worker.settle(seconds)
        turns = min(worker.turns for worker in self._workers)
        for worker in self._workers:
            worker.turns = turns

    def seconds_per_turn(self) -> float:
        for worker in self._workers:
            worker.start()
        return max(worker.wait() for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def take_turns(sides: dict[str, Worker | AtOnce], rounds: int, seconds: float) -> dict[str, dict]:
    """Name -> seconds per turn and description of each side. The order changes from round to round."""
    for side in sides.values():
        side.settle(seconds)
    measured = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
            measured[name].append(sides[name].seconds_per_turn())
    for side in sides.values():
        side.close()
    return {
        name: {"seconds": float(f"{statistics.median(times):.5g}"), "all_seconds": [float(f"{t:.4g}") for t in times]}
        | sides[name].about
        for name, times in measured.items()
    }


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Pin processes that start within this context, and their threads, to one core."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
