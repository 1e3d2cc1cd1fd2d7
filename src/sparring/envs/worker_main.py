"""A worker process of `ProcessBackend`: owns some of the envs and obeys commands over a pipe. No torch.

Run as `python -m sparring.envs.worker_main <fd>`, where fd is its end of the pipe. It ends when the other end is
closed, which also happens when the parent dies.
"""

import time
import traceback
from functools import partial
from typing import Any

from sparring.contract import EnvSpec
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym_batch import Frames, GymBatch, StepArrays
from sparring.errors import UserError
from sparring.processes.child import connect_to_parent
from sparring.processes.shared_memory import SharedHandle, SharedMemory

# what a worker whose parent hung up gets to close its envs in peace
LEAVE_S = 5.0


class _Commands:
    """Each method is a command of the parent, called by its name; others are those of its `GymBatch`."""

    def __init__(self):
        self.batch: GymBatch | None = None
        self._arrays: StepArrays | None = None

    def make(self, config: GymConfig, envs: range, max_episode_steps: int | None) -> EnvSpec:
        self.batch = GymBatch(config, envs, max_episode_steps)
        return self.batch.spec

    def attach(self, handle: SharedHandle) -> None:
        """From now on read and fill its own rows of this shared memory, which holds the `StepArrays` of all envs."""
        whole = StepArrays.of(SharedMemory.attach(handle, last=False).arrays)
        self._arrays = whole.rows(self.batch.envs.start, self.batch.envs.stop)

    def reset(self, seeds: EpisodeSeeds) -> None:
        self.batch.reset(seeds, self._arrays)

    def step(self) -> tuple[Frames, bool]:
        """The rest of the result is in the shared memory."""
        return self.batch.step(self._arrays), self.batch.reports_success

    def __getattr__(self, method: str) -> Any:
        return getattr(self.batch, method)


def _answer(commands: _Commands, method: str, arguments: tuple) -> tuple[bool, Any]:
    """(True, result), or (False, (what happened, traceback))."""
    try:
        return True, getattr(commands, method)(*arguments)
    except Exception as error:  # whatever an env raises
        # a mistake a person can mend needs no traceback
        mendable = isinstance(error, UserError)
        what = str(error) if mendable else f"{type(error).__name__}: {error}"
        what = " ".join([what, *getattr(error, "__notes__", ())])
        return False, (what, None if mendable else traceback.format_exc())


def main() -> None:
    commands, pipe = _Commands(), connect_to_parent(leave=partial(time.sleep, LEAVE_S))
    try:
        while True:
            method, arguments = pipe.receive()
            pipe.send(_answer(commands, method, arguments))
    except (EOFError, OSError):
        # the parent hung up
        pass
    finally:
        if commands.batch is not None:
            commands.batch.close()


if __name__ == "__main__":
    main()
