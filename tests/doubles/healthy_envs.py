"""Healthy envs that look like a fault, for `sparring check`."""

import gymnasium
import numpy as np
from broken_envs import Healthy, HealthyBackend
from gymnasium import spaces


class SharesMemory(Healthy):
    """Releases its shared memory; Python's resource tracker remains."""

    def __init__(self, render_mode=None):
        from multiprocessing.shared_memory import SharedMemory

        super().__init__(render_mode)
        self.shared = SharedMemory(create=True, size=64)

    def close(self):
        self.shared.close()
        self.shared.unlink()
