"""Gymnasium envs in worker processes (worker_main.py): arrays in shared memory, commands over pipes. Linux and
macOS."""

import logging
import os
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sparring.contract import EnvSpec
from sparring.envs.backend import Arrays, EpisodeSeeds, Step
from sparring.envs.configs import GymConfig
from sparring.envs.gym import unpack
from sparring.envs.gym_batch import StepArrays, below
from sparring.errors import StageFailed, UserError
from sparring.processes.child import Child, usable_cores
from sparring.processes.heartbeat import MAKING_S, OwnStages
from sparring.processes.memory import SharedMemory

log = logging.getLogger("sparring.env")

# environment variable of a worker: its number in its group
WORKER = "SPARRING_WORKER"
CLOSE_S, CLOSE_BUSY_S = 5.0, 0.5  # seconds that workers have to close envs: when idle; in the middle of a step


# timeout in seconds of a worker's reply; the watchdog of a run usually acts earlier
LONGEST_S = MAKING_S


class WorkerError(RuntimeError):
    """An env failed in a worker, or the worker died."""


class ProcessBackend:
    """N gymnasium envs distributed over worker processes. Results do not depend on the number of workers."""

    def __init__(self, config: GymConfig, num_envs: int, max_episode_steps: int | None = None):
        if sys.platform == "win32":
            raise UserError("env.vectorize=process needs Linux or macOS; use env.vectorize=serial")
        if config.name.startswith("__main__:"):
            advice = "move the class to a module, or use env.vectorize=serial"
            what = "is defined in the script or notebook itself, which a worker process cannot import"
            raise UserError(f"env.name={config.name!r} {what}; {advice}")
        self.num_envs = num_envs
        self._pool = _WorkerPool(_slices(num_envs, config.workers or usable_cores()))
        self._config, self._limit, self._restarts = config, max_episode_steps, 0
        # what a restart needs: seeds, the episode of each env, the observations before the step ({}: unknown)
        self._seeds: EpisodeSeeds | None = None
        self._episodes, self._recorded = np.zeros(num_envs, np.int64), list[int]()
        self._before: Arrays = {}
        self._finalizer = weakref.finalize(self, self._pool.close)
        try:
            self.spec = self._pool.make(config, max_episode_steps)
            self._pool.share(self.spec, num_envs, chunk=1)
        except BaseException:
            self.close()
            raise

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        self._pool.call("reset", seeds)
        self._seeds, self._before = seeds, self._pool.arrays.observed()
        self._episodes[:] = 0
        return self._before

    def step(self, action: np.ndarray) -> Step:
        self._pool.check_open()
        if chunk := self._pool.arrays.other_chunk(action):
            self._pool.share(self.spec, self.num_envs, chunk)
        self._pool.arrays.action[:] = action
        frames = {}
        may_die = self._restarts < self._config.restarts and bool(self._before)
        deaths: dict[int, WorkerError] = {}
        for number, result in enumerate(self._pool.step(may_die)):
            if isinstance(result, WorkerError):
                deaths[number] = result
                continue
            part, reports_success = result
            frames.update(part)
            if reports_success and not self.spec.reports_success:
                self.spec = replace(self.spec, reports_success=True)
        if deaths:
            self._restart(deaths)
        step = self._pool.arrays.to_step(frames)
        self._episodes[step.ended] += 1
        self._before = step.observation
        return step

    def record(self, envs: list[int]) -> None:
        self._recorded = list(envs)
        self._pool.call("record", self._recorded)

    def _restart(self, deaths: dict[int, WorkerError]) -> None:
        """Replace workers that died in a step. Their episodes end there, truncated, with the observation before it."""
        arrays = self._pool.arrays
        for number, death in deaths.items():
            if self._restarts == self._config.restarts:
                self.close()
                raise death
            self._restarts += 1
            envs = self._pool.workers[number].envs
            counted = f"restart {self._restarts} of {self._config.restarts} (env.restarts)"
            log.warning("%s; %s; %d episodes count as truncated", death, counted, len(envs))
            rows = slice(envs.start, envs.stop)
            arrays.reward[rows], arrays.executed[rows], arrays.success[rows] = 0, 1, False
            arrays.terminated[rows], arrays.truncated[rows] = False, True
            for key, value in self._before.items():
                arrays.final[key][rows] = value[rows]
        self._pool.restart(list(deaths), self._config, self._limit)
        for number in deaths:
            envs = self._pool.workers[number].envs
            episodes = (self._episodes[envs.start : envs.stop] + 1).tolist()
            self._pool.call("begin", self._seeds, episodes, owner_of=envs.start)
            self._pool.call("record", self._recorded, owner_of=envs.start)

    def render(self, env: int) -> np.ndarray | None:
        return self._pool.call("render", env, owner_of=env)[0]

    def no_picture(self, env: int) -> str | None:
        return self._pool.call("no_picture", env, owner_of=env)[0]

    def state(self) -> Arrays | None:
        parts = self._pool.call("state")
        if any(part is None for part in parts):
            return None
        return {key: value for part in parts for key, value in part.items()}

    def set_state(self, state: Arrays) -> None:
        self._pool.call("set_state", state)
        self._seeds = EpisodeSeeds(**unpack(below(state, "seeds")))
        self._episodes[:] = [state[f"{env}/episode"] for env in range(self.num_envs)]
        self._before = {}

    def close(self) -> None:
        self._finalizer()


class _WorkerPool:
    """The workers and their shared memory. A separate object, so that it can clean up after the backend is deleted."""

    def __init__(self, slices: list[range]):
        self.arrays: StepArrays | None = None
        self.memory: SharedMemory | None = None
        self._busy = self._closed = False
        self.workers = [_Worker(number, envs) for number, envs in enumerate(slices)]

    def make(self, config: GymConfig, max_episode_steps: int | None) -> EnvSpec:
        return self._request(self.workers, "make", lambda worker: (config, worker.envs, max_episode_steps))[0]

    def share(self, spec: EnvSpec, num_envs: int, chunk: int) -> None:
        columns = StepArrays.columns(spec, num_envs, chunk)
        instead = "a larger /dev/shm, or env.vectorize=serial"
        self.memory = SharedMemory.make(columns, what="the memory shared with env workers", advice=instead)
        self.arrays = StepArrays.of(self.memory.arrays)
        self.call("attach", self.memory.handle)
        self.memory.unlink()

    def call(self, method: str, *arguments: Any, owner_of: int | None = None) -> list[Any]:
        """Run a command in all workers, or in the worker of the env `owner_of`; return the results."""
        self.check_open()
        workers = [worker for worker in self.workers if owner_of is None or owner_of in worker.envs]
        return self._request(workers, method, lambda worker: arguments)

    def step(self, may_die: bool) -> list[Any]:
        """Step all workers. If they may die, the result of one that died is its WorkerError."""
        self.check_open()
        return self._request(self.workers, "step", lambda worker: (), may_die)

    def restart(self, numbers: list[int], config: GymConfig, max_episode_steps: int | None) -> None:
        """Start workers in place of those that died, and share new memory with the same content."""
        for number in numbers:
            self.workers[number] = _Worker(number, self.workers[number].envs)
        started = [self.workers[number] for number in numbers]
        spec, *_ = self._request(started, "make", lambda worker: (config, worker.envs, max_episode_steps))
        assert self.memory is not None and self.arrays is not None
        before = self.memory.arrays
        self.share(spec, *self.arrays.action.shape[:2])
        for key, array in self.memory.arrays.items():
            array[:] = before[key]

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this ProcessBackend is closed; make a new one")
        if self._busy:
            raise RuntimeError("this ProcessBackend was interrupted in the middle of a step; make a new one")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for worker in self.workers:
            worker.hang_up()
        deadline = time.monotonic() + (CLOSE_BUSY_S if self._busy else CLOSE_S)
        for worker in self.workers:
            worker.end(max(0.0, deadline - time.monotonic()))
        self.arrays = self.memory = None

    def _request(
        self,
        workers: list["_Worker"],
        method: str,
        arguments: Callable[["_Worker"], tuple],
        may_die: bool = False,
    ) -> list[Any]:
        """Read all replies before raising an error, so that none remains for the next request."""
        self._busy = True  # stays True if a KeyboardInterrupt leaves replies unread
        check = partial(self._check, time.monotonic() + LONGEST_S, may_die)
        try:
            for worker in workers:
                given = arguments(worker)
                # a message without arguments, such as "step", cannot block: the worker has read all earlier messages
                worker.send((method, given), partial(check, [worker]) if given else None)
            replies = [worker.reply(partial(check, workers[n:]), may_die) for n, worker in enumerate(workers)]
        except (WorkerError, StageFailed):
            self.close()
            raise
        self._busy = False
        for worker, (succeeded, result) in zip(workers, replies, strict=True):
            if not succeeded and result[1] is None:
                raise UserError(f"{worker.name}: {result[0]}")
            if not succeeded:
                raise WorkerError(f"{worker.name} failed: {result[0]}\n\nTraceback of the worker:\n{result[1]}")
        return [result for _, result in replies]

    def _check(self, deadline: float, may_die: bool, waited_for: list["_Worker"]) -> None:
        """Called while waiting for workers. Raise if a worker has died or a deadline has passed."""
        for worker in self.workers:
            if worker.process.poll() is not None and not may_die:
                raise worker.failure()
        try:
            if OwnStages.now is not None:
                OwnStages.now.check()
        except StageFailed as error:
            error.add_note(f"in {', '.join(worker.name for worker in waited_for if not worker.has_message())}")
            raise
        if time.monotonic() > deadline:
            raise WorkerError(f"the env workers have not replied for {LONGEST_S:g} seconds")


class _Worker(Child):
    def __init__(self, number: int, envs: range):
        self.envs = envs
        name = f"worker {number} (envs {envs[0]}..{envs[-1]})"
        environment = {"OMP_NUM_THREADS": "1", **os.environ, WORKER: str(number)}
        super().__init__("sparring.envs.worker_main", name, environment)

    def reply(self, check: Callable[[], None], may_die: bool = False) -> tuple[bool, Any]:
        try:
            return self.receive(check)
        except EOFError:
            if not may_die:
                raise self.failure() from None
            return True, self.failure()

    def failure(self) -> WorkerError:
        return WorkerError(f"{self.name} {self.death(CLOSE_S)}")


def _slices(num_envs: int, workers: int) -> list[range]:
    """Split `num_envs` into contiguous ranges of nearly equal size."""
    workers = min(workers, num_envs)
    edges = [num_envs * k // workers for k in range(workers + 1)]
    return [range(first, last) for first, last in zip(edges[:-1], edges[1:], strict=True)]
