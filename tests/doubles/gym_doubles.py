"""Small gymnasium envs whose numbers can be computed by hand."""

import os
import signal
import subprocess
import sys
import time
import warnings

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env):
    """Observation: [steps so far, seed of the episode mod 1000, last action]; reward: 10 * steps; ends at `length`."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}
    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = spaces.Box(np.array([0.0], np.float32), np.array([10.0], np.float32))

    def __init__(self, length: int = 3, truncates: bool = False, render_mode: str | None = None):
        self.length, self.truncates, self.render_mode = length, truncates, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count, self.seed, self.action = 0, seed, -1.0
        return self._observe(), {}

    def step(self, action):
        assert action.shape == (1,) and action.dtype == np.float32
        self.count += 1
        self.action = float(action[0])
        ended = self.count >= self.length
        return self._observe(), 10.0 * self.count, ended and not self.truncates, ended and self.truncates, {}

    def render(self):
        return np.full((4, 6, 3), self.count, np.uint8)

    def get_state(self):
        return {"count": self.count, "seed": self.seed, "action": np.float64(self.action)}

    def set_state(self, state):
        self.count, self.seed, self.action = state["count"], state["seed"], state["action"]

    def _observe(self):
        return np.array([self.count, self.seed % 1000, self.action])


class Succeeds(Counter):
    """Reports success in info, under the given key, from step 2 on."""

    def __init__(self, key: str = "success", **kwargs):
        super().__init__(**kwargs)
        self.key = key

    def step(self, action):
        *rest, _ = super().step(action)
        return *rest, {self.key: self.count >= 2}


class HasImported(Counter):
    """Observation: whether its process has imported `sys`, and whether it has imported `module`."""

    def __init__(self, module: str = "", **kwargs):
        super().__init__(**kwargs)
        self.module = module

    def _observe(self):
        return np.array(["sys" in sys.modules, self.module in sys.modules, 0.0])


class Breaks(Counter):
    """In step `length`: raises, returns NaN, inf or 1e30, or ends its process. `only_seed` selects the env."""

    def __init__(self, how: str, length: int = 2, only_seed: int | None = None, **kwargs):
        super().__init__(length=10_000, **kwargs)
        self.how, self.fault_step, self.only_seed = how, length, only_seed

    def step(self, action):
        observation, reward, *rest = super().step(action)
        if self.count == self.fault_step and self.only_seed in (None, self.seed):
            if self.how == "raise":
                raise ZeroDivisionError("the gripper fell off")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "crash":
                print("about to crash")
                signal.raise_signal(signal.SIGSEGV)
            if self.how == "sleep":
                time.sleep(60)
            observation = observation * np.nan if self.how == "nan" else observation
            reward = {"inf": np.inf, "huge": 1e30}.get(self.how, reward)
        return observation, reward, *rest


class HasSimulator(Counter):
    """Starts a process, whose id it observes in place of the steps; close() ends it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.simulator = subprocess.Popen(["sleep", "300"])

    def close(self):
        self.simulator.terminate()
        self.simulator.wait()

    def _observe(self):
        return np.array([self.simulator.pid, 0.0, 0.0])


class CannotDraw(Counter):
    def render(self):
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed")


class HasNoOpenGL(Counter):
    """Like gymnasium's MuJoCo envs without OpenGL: a second attempt would end the process."""

    tries = 0

    def render(self):
        HasNoOpenGL.tries += 1
        # like MuJoCo's window library
        warnings.warn_explicit("no display", RuntimeWarning, "glfw/__init__.py", 1, "glfw")
        raise mujoco.FatalError("no OpenGL")


class RenderRaises(Counter):
    def render(self):
        raise KeyError("camera")


class RendersInItsMode(Counter):
    """Like gymnasium's own envs: render() depends on the current render_mode."""

    def render(self):
        return super().render() if self.render_mode == "rgb_array" else None


class Wrapped(gymnasium.Wrapper):
    pass


def make_env(length: int = 3):
    return Wrapped(RendersInItsMode(length))


def make_env_in_mode(render_mode: str = "human"):
    return Wrapped(RendersInItsMode(render_mode=render_mode))


class Shows(gymnasium.Env):
    """An env with a fixed observation of any space."""

    action_space = spaces.Discrete(3, start=5)

    def __init__(self, space: spaces.Space, value):
        self.observation_space, self.value = space, value
        self.actions = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.value, {}

    def step(self, action):
        self.actions.append(action)
        return self.value, 0.0, False, False, {}


class Follows(gymnasium.Env):
    """A point in a plane that should reach a goal. Has an instruction, a camera and an expert."""

    metadata = {"render_modes": [], "render_fps": 10}
    max_episode_steps = 20
    action_space = spaces.Box(-2.0, 2.0, (2,), np.float32)
    observation_space = spaces.Dict(
        state=spaces.Box(-np.inf, np.inf, (4,), np.float64),
        eye=spaces.Box(0, 255, (8, 16, 3), np.uint8),
        text=spaces.Text(32),
    )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.point, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self._observed(), {}

    def step(self, action):
        self.point = self.point + 0.1 * np.asarray(action, np.float64)
        near = bool(np.linalg.norm(self.goal - self.point) < 0.1)
        return self._observed(), float(near), near, False, {"success": near}

    def expert_action(self):
        return np.clip(10 * (self.goal - self.point), -2, 2).astype(np.float32)

    def _observed(self):
        side = "left" if self.goal[0] < 0 else "right"
        eye = np.full((8, 16, 3), 40 if side == "left" else 200, np.uint8)
        return {"state": np.concatenate([self.point, self.goal]), "eye": eye, "text": f"go to the {side}"}


class _Halves(gymnasium.wrappers.RescaleAction):
    """Takes actions of -1 to 1, and so does its expert."""

    def __init__(self, env):
        super().__init__(env, np.float32(-1), np.float32(1))

    def expert_action(self):
        return self.env.expert_action() / 2


def _with_limit(env):
    env.max_episode_steps = Follows.max_episode_steps
    return env


def follows_in_wrappers():
    return _with_limit(Wrapped(Wrapped(Follows())))


def follows_in_own_action_wrapper():
    return _with_limit(Wrapped(_Halves(Follows())))


def follows_rescaled():
    return _with_limit(gymnasium.wrappers.RescaleAction(Follows(), np.float32(-1), np.float32(1)))


def observed(robot) -> dict[str, np.ndarray]:
    """The observation of a `GymRobot` as it writes it."""
    arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in robot.spec.observation.items()}
    robot.write(arrays, 0)
    return {key: value[0] for key, value in arrays.items()}
