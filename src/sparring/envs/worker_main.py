"""A worker process of `ProcessBackend`, run as `python -m sparring.envs.worker_main <fd>`, where fd is its end of the
pipe. It ends when the parent closes the pipe or dies. No torch."""

import time
from functools import partial
from typing import Any

from sparring.contract import EnvSpec
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym_batch import Frames, GymBatch, StepArrays
from sparring.processes.child import connect_to_parent, error_report
from sparring.processes.memory import SharedHandle, SharedMemory

LEAVE_S = 5.0  # seconds that a worker has to close its envs after the parent closed the pipe


class _Commands:
    """Each method is a command, called by its name; commands that it lacks are methods of its `GymBatch`."""

    def __init__(self) -> None:
        self.batch: GymBatch | None = None
        self._arrays: StepArrays  # from `attach` on

    def make(self, config: GymConfig, envs: range, max_episode_steps: int | None) -> EnvSpec:
        self.batch = GymBatch(config, envs, max_episode_steps)
        return self.batch.spec

    def attach(self, handle: SharedHandle) -> None:
        """Use this worker's rows of shared `StepArrays` in all later commands."""
        rows = slice(self.batch.envs.start, self.batch.envs.stop)
        shared = SharedMemory.attach(handle, last=False).arrays
        self._arrays = StepArrays.of({key: array[rows] for key, array in shared.items()})

    def reset(self, seeds: EpisodeSeeds) -> None:
        self.batch.reset(seeds, self._arrays)

    def begin(self, seeds: EpisodeSeeds, episodes: list[int]) -> None:
        self.batch.begin(seeds, episodes, self._arrays)

    def step(self) -> tuple[Frames, bool]:
        return self.batch.step(self._arrays), self.batch.reports_success

    def __getattr__(self, method: str) -> Any:
        return getattr(self.batch, method)


def _run_command(commands: _Commands, method: str, arguments: tuple) -> tuple[bool, Any]:
    """Return (True, result), or (False, (description of the error, traceback))."""
    try:
        return True, getattr(commands, method)(*arguments)
    except BaseException as error:  # an env may raise anything
        return False, error_report(error)


def _main() -> None:
    commands, pipe = _Commands(), connect_to_parent(leave=partial(time.sleep, LEAVE_S))
    try:
        while True:
            method, arguments = pipe.receive()
            pipe.send(_run_command(commands, method, arguments))
    except (EOFError, OSError):
        pass
    finally:
        if commands.batch is not None:
            commands.batch.close()


if __name__ == "__main__":
    _main()
