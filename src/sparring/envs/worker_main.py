"""A worker process of `ProcessBackend`: owns some of the envs and does what it is told over a pipe. No torch.

Run as `python -m sparring.envs.worker_main <fd>`, where fd is its end of the pipe. It ends when the other end is
closed, which also happens when the parent dies.
"""

import os
import select
import sys
import threading
import time
import traceback
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import numpy as np

from sparring.contract import EnvSpec
from sparring.envs.backend import Arrays, EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym_batch import Frames, GymBatch, StepArrays
from sparring.errors import UserError
from sparring.processes.signals import leave_signals_to_the_parent

# what a worker whose parent hung up gets to close its envs in peace
LEAVE_S = 5.0


class _Commands:
    """Each public method is a command of the parent, called by its name."""

    def __init__(self):
        self.batch: GymBatch | None = None
        self._memory: SharedMemory | None = None
        self._arrays: StepArrays | None = None

    def make(self, config: GymConfig, envs: range, max_episode_steps: int | None) -> EnvSpec:
        self.batch = GymBatch(config, envs, max_episode_steps)
        return self.batch.spec

    def attach(self, memory: str, num_envs: int, chunk: int) -> None:
        """From now on read and fill this shared memory, a `StepArrays` of all envs."""
        self._detach()
        self._memory = attach_untracked(memory)
        whole = StepArrays.on(self._memory.buf, self.batch.spec, num_envs, chunk)
        self._arrays = whole.rows(self.batch.envs.start, self.batch.envs.stop)

    def reset(self, seeds: EpisodeSeeds) -> None:
        self.batch.reset(seeds, self._arrays)

    def step(self) -> tuple[Frames, bool]:
        """The rest of the result is in the shared memory."""
        return self.batch.step(self._arrays), self.batch.reports_success

    def record(self, envs: list[int]) -> None:
        self.batch.record(envs)

    def render(self, env: int) -> np.ndarray | None:
        return self.batch.render(env)

    def no_picture(self, env: int) -> str | None:
        return self.batch.no_picture(env)

    def state(self) -> Arrays | None:
        return self.batch.state()

    def set_state(self, state: Arrays) -> None:
        self.batch.set_state(state)

    def has_imported(self, module: str) -> bool:
        return module in sys.modules

    def close(self) -> None:
        self._detach()
        if self.batch is not None:
            self.batch.close()

    def _detach(self) -> None:
        # the memory can be closed only when no array looks at it any more
        self._arrays = None
        if self._memory is not None:
            self._memory.close()


def attach_untracked(name: str) -> SharedMemory:
    """Shared memory that the parent alone cleans up: else Python removes it, with a warning, when a worker ends."""
    if sys.version_info >= (3, 13):
        return SharedMemory(name, track=False)
    memory = SharedMemory(name)
    resource_tracker.unregister(memory._name, "shared_memory")
    return memory


def serve(connection: Connection, worker: _Commands) -> None:
    """Answer `(method, arguments)` with `(True, result)` or `(False, (what happened, traceback))` until hung up on."""
    while True:
        try:
            method, arguments = connection.recv()
        except (EOFError, ConnectionResetError):
            return
        try:
            answer = True, getattr(worker, method)(*arguments)
        except Exception as error:
            # a mistake a person can mend needs no traceback
            mendable = isinstance(error, UserError)
            told = str(error) if mendable else f"{type(error).__name__}: {error}"
            what = " ".join([told, *getattr(error, "__notes__", ())])
            answer = False, (what, None if mendable else traceback.format_exc())
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):
            return


def leave_with_the_parent(connection: Connection) -> None:
    """A worker in the middle of a step, which may never end, hears of nothing else."""
    hung_up = select.poll()
    # of no event but the end, which is always told
    hung_up.register(connection.fileno(), 0)
    hung_up.poll()
    time.sleep(LEAVE_S)
    os._exit(1)


def main() -> None:
    leave_signals_to_the_parent()
    worker, connection = _Commands(), Connection(int(sys.argv[1]))
    threading.Thread(target=leave_with_the_parent, args=(connection,), daemon=True).start()
    try:
        serve(connection, worker)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
