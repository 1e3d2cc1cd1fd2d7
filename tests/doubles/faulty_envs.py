"""Twenty faults of a gymnasium env: env.name=faulty_envs:Faulty env.kwargs.how=HOW."""

import ctypes
import os
import signal
import subprocess
import sys
import time

import gymnasium
import numpy as np

FAULTS = ["hang in reset", "hang in step", "hang in close", "hang in render", "hang in C", "slow", "exit", "kill"]
FAULTS += ["segfault", "raise in __init__", "raise in reset", "raise in step", "raise in close", "raise in render"]
FAULTS += ["nan", "wrong shape", "no reward", "endless", "child", "ctrl-c"]
# variants of the faults above
VARIANTS = ["hang in C with the lock", "stubborn child", "inf", "wrong dtype", "nan reward", "shape changes", "prints"]
VARIANTS += ["sys.exit"]
# only used in tests: "generator exit", "memory", "returns nothing", "only its observation in reset"


class Faulty(gymnasium.Env):
    """Fails in step `at` (counted over all episodes), in the first reset after it, or in render() or close().

    It creates the file that $FAULTY_SINCE names when it first fails.
    """

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    metadata = {"render_modes": ["rgb_array"]}

    def __init__(self, how: str = "", at: int = 40, render_mode: str | None = None):
        self.how, self.at, self.render_mode, self.count, self.steps = how, at, render_mode, 0, 0
        self._fail("__init__")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        if self.count >= self.at:
            self._fail("reset")
        return self._observe() if self.how == "only its observation in reset" else (self._observe(), {})

    def step(self, action):
        self.count += 1
        self.steps += 1
        observation, reward = self._observe(), float(-np.abs(action).sum())
        if self.count >= self.at:
            self._fail("step")
            self._go_wrong()
            wrong = {"nan": observation * np.nan, "inf": observation * np.inf, "wrong dtype": observation.astype(str)}
            wrong |= {"wrong shape": observation[:2], "shape changes": np.tile(observation, 2)}
            observation = wrong.get(self.how, observation)
            if self.how == "returns nothing":
                return None
            reward = {"no reward": None, "nan reward": float("nan")}.get(self.how, reward)
        return observation, reward, False, self.steps >= 10 and self.how != "endless", {}

    def render(self):
        self._fail("render")
        return np.zeros((8, 8, 3), np.uint8)

    def close(self):
        self._fail("close")

    def _observe(self):
        return self.np_random.uniform(-1, 1, 4).astype(np.float32)

    def _fail(self, where: str) -> None:
        if self.how.endswith(f" in {where}"):
            self._mark_fault()
        if self.how == f"hang in {where}":
            time.sleep(100_000)
        if self.how == f"raise in {where}":
            raise ValueError("the motor is on fire")

    def _mark_fault(self) -> None:
        if file := os.environ.get("FAULTY_SINCE"):
            with open(file, "a"):
                pass

    def _go_wrong(self) -> None:
        self._mark_fault()
        if self.how == "hang in C":
            # locks a mutex twice: no signal ends this wait
            lock, take = ctypes.create_string_buffer(256), ctypes.CDLL(None).pthread_mutex_lock
            take(lock), take(lock)
        if self.how == "hang in C with the lock":
            # holds the GIL: no other Python thread runs
            ctypes.PyDLL(None).pause()
        if self.how == "slow":
            time.sleep(1)
        if self.how == "exit":
            os._exit(3)
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "segfault":
            ctypes.string_at(0)
        if self.how == "child" and self.count == self.at:
            subprocess.Popen(["sleep", "100000"])
        if self.how == "stubborn child" and self.count == self.at:
            # an orphan that ignores SIGTERM
            subprocess.run(["sh", "-c", "trap '' TERM; sleep 100000 &"], check=True)
        if self.how == "prints":
            sys.stdout.write("x" * 50_000_000 + "\n")
        if self.how == "ctrl-c":
            raise KeyboardInterrupt
        if self.how == "generator exit":
            raise GeneratorExit
        if self.how == "memory":
            raise MemoryError("the scene is too large")
        if self.how == "sys.exit":
            sys.exit(0)
