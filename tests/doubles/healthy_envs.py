"""Healthy envs that look like a fault, for `sparring check`."""

import time

import gymnasium
import numpy as np
from broken_envs import BackendConfig, Healthy, HealthyBackend
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


class OffsetToTheGoal(gymnasium.Env):
    """A grid world that observes the offset to the goal, and is terminated there."""

    observation_space = spaces.Box(-3, 3, (2,), np.float32)
    action_space = spaces.Discrete(4)
    max_episode_steps = 5000

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.zeros(2)
        while not self.place.any():
            self.place = self.np_random.integers(-2, 3, 2).astype(float)
        return self.place.astype(np.float32), {}

    def step(self, action):
        self.place = np.clip(self.place + [(1, 0), (-1, 0), (0, 1), (0, -1)][int(action)], -2, 2)
        near = not self.place.any()
        return self.place.astype(np.float32), float(near), near, False, {"success": near}


class OwnMasses(HealthyBackend):
    """Each robot has a mass of its own, which only critics see."""

    def observe(self):
        masses = np.stack([np.arange(self.num_envs), np.ones(self.num_envs)], 1)
        return super().observe() | {"privileged": masses.astype(np.float32)}


class Contacts(HealthyBackend):
    """Contact sensors, which feel nothing at most ends."""

    def observe(self):
        near = np.abs(self.places[:, :2]).max(1) < 0.1
        return super().observe() | {"privileged": np.stack([near, near], 1).astype(np.float32)}


class SucceedsInTheEnd(Healthy):
    """Its limit is far, so that only successes end episodes in a short run."""

    max_episode_steps = 3000
    expert_action = property()

    def step(self, action):
        self.point = np.clip(self.point + 0.2 * action, -1, 1)
        distance = float(np.linalg.norm(self.goal - self.point))
        return self.observe(), -distance, distance < 0.8, False, {"success": distance < 0.8}


class SeesNoObject(HealthyBackend):
    """Nothing that its masks name is in view."""

    def __init__(self, config: BackendConfig, num_envs: int, max_episode_steps: int | None = None):
        super().__init__(config, num_envs)
        self.spec.observation["segmentation/head"] = ((1, 8, 8), "uint8")

    def observe(self):
        return super().observe() | {"segmentation/head": np.zeros((self.num_envs, 1, 8, 8), np.uint8)}


class Dithers(Healthy):
    """A renderer that draws some pixels differently by one level."""

    def draw(self, axis):
        image = super().draw(axis)
        image[tuple(np.random.default_rng().integers(0, 12, 2))] += 1
        return image


class WakesSlowly(Healthy):
    """A slow simulator whose robot ignores the first actions."""

    expert_action = get_state = set_state = property()

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset(seed=seed)

    def step(self, action):
        time.sleep(0.06)
        self.steps += 1
        return super().step(action if self.steps > 4 else 0 * action)
