"""A healthy gymnasium env and a healthy Backend, and the same ones with one fault each, for `sparring check`."""

import mmap
import multiprocessing
import os
import subprocess
import time

import gymnasium
import mujoco
import numpy as np
from gymnasium import spaces
from pydantic import Field

from sparring.config.section import Section
from sparring.contract import EnvSpec
from sparring.envs.backend import EpisodeSeeds, Step


class Healthy(gymnasium.Env):
    """A point in a plane that should reach a goal, with two cameras, depth, points and an expert."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    max_episode_steps = 20
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    observation_space = spaces.Dict(
        state=spaces.Box(-2.0, 2.0, (4,), np.float32),
        front=spaces.Box(0, 255, (12, 16, 3), np.uint8),
        side=spaces.Box(0, 255, (12, 16, 3), np.uint8),
        depth=spaces.Box(0, 10, (12, 16, 1), np.float32),
        points=spaces.Box(-10, 10, (24, 3), np.float32),
    )

    def __init__(self, render_mode: str | None = None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.point, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self.observe(), {}

    def step(self, action):
        self.point = np.clip(self.point + 0.1 * action, -2, 2)
        distance = float(np.linalg.norm(self.goal - self.point))
        near = distance < 0.15
        return self.observe(), 1.0 if near else -0.1 * distance, near, False, {"success": near}

    def observe(self):
        state = np.concatenate([self.point, self.goal]).astype(np.float32)
        depth = np.linspace(1, 2, 12 * 16).reshape(12, 16, 1) + abs(self.point[0])
        points = np.linspace(-1, 1, 72).reshape(24, 3) + [*self.point, 0]
        return {
            "state": state,
            "front": self.draw(0),
            "side": self.draw(1),
            "depth": depth.astype(np.float32),
            "points": points.astype(np.float32),
        }

    def draw(self, axis):
        image = np.full((12, 16, 3), 90, np.uint8)
        image[:, round(3.5 * (self.point[axis] + 2)), axis] = 250
        image[:6, round(3.5 * (self.goal[axis] + 2)), 2] = 200
        return image

    def render(self):
        return self.draw(0)

    def expert_action(self):
        return np.clip(10 * (self.goal - self.point), -1, 1).astype(np.float32)

    def get_state(self):
        return {"point": self.point.copy(), "goal": self.goal.copy()}

    def set_state(self, state):
        self.point, self.goal = state["point"], state["goal"]


class InMuJoCo(Healthy):
    """Its camera is one of a MuJoCo model, mounted upside down; `turn` changes the picture."""

    observation_space = spaces.Dict(
        state=spaces.Box(-2.0, 2.0, (4,), np.float32), wall=spaces.Box(0, 255, (48, 64, 3), np.uint8)
    )
    xml = """<mujoco><worldbody><light pos="0 0 3"/><geom type="plane" size="3 3 .1" rgba=".2 .8 .2 1"/>
    <body name="ball" pos=".2 0 .3"><freejoint/><geom size=".2" rgba="1 0 0 1"/></body>
    <camera name="wall" pos="0 -2 1" xyaxes="-1 0 0 0 -.4 -1"/></worldbody></mujoco>"""

    def __init__(self, rows: int = -1, columns: int = -1, render_mode: str | None = None):
        super().__init__(render_mode)
        self.turn = slice(None, None, rows), slice(None, None, columns)
        self.model = mujoco.MjModel.from_xml_string(self.xml)
        self.data = mujoco.MjData(self.model)
        self.camera = None

    def observe(self):
        from sparring.envs.sims.mujoco import Cameras

        self.data.qpos[:2] = self.point
        mujoco.mj_forward(self.model, self.data)
        self.camera = self.camera or Cameras(self.model, 48, 64)
        return {"state": super().observe()["state"], "wall": self.camera.draw(self.data, "wall")[0][self.turn]}

    def close(self):
        if self.camera is not None:
            self.camera.close()


class BeyondItsSpace(Healthy):
    def observe(self):
        seen = super().observe()
        return seen | {"state": seen["state"] * 3}


class FractionsInIntegers(Healthy):
    observation_space = spaces.Dict(
        Healthy.observation_space.spaces | {"front": spaces.Box(0, 255, (12, 16, 3), np.uint8)}
    )

    def observe(self):
        seen = super().observe()
        return seen | {"front": seen["front"] / 1.7}


class WrongShape(Healthy):
    def observe(self):
        seen = super().observe()
        return seen | {"state": seen["state"][:3]}


class NotANumber(Healthy):
    def observe(self):
        seen = super().observe()
        return seen | {"state": seen["state"] * (np.nan if self.point.max() > 1.2 else 1)}


class Huge(Healthy):
    observation_space = spaces.Dict(
        Healthy.observation_space.spaces | {"state": spaces.Box(-1e6, 1e6, (4,), np.float32)}
    )

    def observe(self):
        seen = super().observe()
        return seen | {"state": seen["state"] * np.float32(1e5)}


class NeverChanges(Healthy):
    def observe(self):
        seen = super().observe()
        return seen | {"state": np.ones(4, np.float32), "points": seen["points"]}


class NoBounds(Healthy):
    action_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def step(self, action):
        return super().step(np.clip(action, -1, 1))


class EqualBounds(Healthy):
    action_space = spaces.Box(np.array([-1, -1, 0], np.float32), np.array([1, 1, 0], np.float32))

    def step(self, action):
        return super().step(action[:2])

    def expert_action(self):
        return np.append(super().expert_action(), np.float32(0))


class FailsAtItsBounds(Healthy):
    def step(self, action):
        if np.abs(action).min() == 1:
            raise ArithmeticError("the motor is too fast")
        return super().step(action)

    expert_action = property()


class IgnoresActions(Healthy):
    def step(self, action):
        return super().step(self.np_random.uniform(-1, 1, 2))

    expert_action = property()


class NotDeterministic(Healthy):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=int(np.random.default_rng().integers(2**31)))

    get_state = set_state = property()


class DrawsAnotherPicture(Healthy):
    """Its light does not come from the seed."""

    light = 0

    def reset(self, *, seed=None, options=None):
        self.light = int(np.random.default_rng().integers(60))
        return super().reset(seed=seed)

    def draw(self, axis):
        return np.minimum(super().draw(axis), 190) + np.uint8(self.light)

    get_state = set_state = property()


class RememberedByStep(Healthy):
    """Reset does not restore the wear that steps cause."""

    wear = 1.0

    def step(self, action):
        self.wear *= 0.999
        return super().step(action * self.wear)

    get_state = set_state = property()


class RoundsDifferently(RememberedByStep):
    """The same, but hardly."""

    def reset(self, *, seed=None, options=None):
        self.wear -= 1e-5
        return super().reset(seed=seed)

    def step(self, action):
        return Healthy.step(self, action * self.wear)


class MovesWhenDrawn(Healthy):
    def render(self):
        self.point = self.point + 1e-3
        return super().render()


class OneStart(Healthy):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=3)


class NoReward(Healthy):
    def step(self, action):
        observation, _, *rest = super().step(action)
        return observation, 0.0, *rest


class HugeReward(Healthy):
    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, 1e5 * reward, *rest


class NoSuccess(Healthy):
    def step(self, action):
        return *super().step(action)[:4], {}


class NeverSucceeds(Healthy):
    def step(self, action):
        return *super().step(action)[:4], {"success": False}


class NeverSucceedsAtRandom(NeverSucceeds):
    expert_action = property()


class AlwaysSucceeds(Healthy):
    def step(self, action):
        return *super().step(action)[:4], {"success": True}


class ResetsItself(Healthy):
    """Returns the first observation of another episode with the end of this one."""

    def step(self, action):
        self.point = np.clip(self.point + 0.001 * action, -2, 2)
        self.count += 1
        ended = self.count >= 5 + self.length
        if ended:
            self.point, self.goal = self.np_random.uniform(-1, 1, (2, 2))
        return self.observe(), float(self.point[0]), False, ended, {"success": self.point[0] > 0}

    def reset(self, *, seed=None, options=None):
        found = super().reset(seed=seed)
        self.count, self.length = 0, 3
        return found

    max_episode_steps = 8
    expert_action = get_state = set_state = property()


class TerminatesAtItsLimit(Healthy):
    max_episode_steps = 0

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return super().reset(seed=seed)

    def step(self, action):
        self.count += 1
        observation, reward, _, _, _ = super().step(action)
        return observation, reward, self.count == 9, False, {"success": self.point[0] > 0}

    get_state = set_state = expert_action = property()


class TruncatesItsFailures(Healthy):
    def step(self, action):
        observation, reward, near, _, info = super().step(action)
        return observation, reward, False, near, info


class NeverEnds(Healthy):
    max_episode_steps = 0

    def step(self, action):
        observation, reward, near, _, info = super().step(action)
        return observation, reward, False, False, info

    expert_action = property()


class Black(Healthy):
    def draw(self, axis):
        return super().draw(axis) * np.uint8(axis == 1)


class OneColour(Healthy):
    def draw(self, axis):
        return np.full((12, 16, 3), 80, np.uint8) if axis == 0 else super().draw(axis)


class ZeroToOne(Healthy):
    def draw(self, axis):
        return super().draw(axis) if axis else (super().draw(axis) > 90).astype(np.uint8)


class Frozen(Healthy):
    def draw(self, axis):
        return super().draw(axis) if axis else np.arange(12 * 16 * 3).reshape(12, 16, 3).astype(np.uint8)


class SameCameraTwice(Healthy):
    def draw(self, axis):
        return super().draw(0)


class Millimetres(Healthy):
    observation_space = spaces.Dict(
        Healthy.observation_space.spaces | {"depth": spaces.Box(0, 1e4, (12, 16, 1), np.float32)}
    )

    def observe(self):
        seen = super().observe()
        return seen | {"depth": 1000 * seen["depth"]}


class NegativeDepth(Healthy):
    observation_space = spaces.Dict(
        Healthy.observation_space.spaces | {"depth": spaces.Box(-10, 10, (12, 16, 1), np.float32)}
    )

    def observe(self):
        seen = super().observe()
        return seen | {"depth": -seen["depth"]}


class OnePoint(Healthy):
    def observe(self):
        seen = super().observe()
        return seen | {"points": np.repeat(seen["points"][:1], 24, 0)}


class ForgetsItsGoal(Healthy):
    def get_state(self):
        return {"point": self.point.copy()}

    def set_state(self, state):
        self.point = state["point"]


class CannotRestore(Healthy):
    def set_state(self, state):
        self.point = state["position"]


class Slow(Healthy):
    max_episode_steps = 3

    def step(self, action):
        time.sleep(0.04)
        return *super().step(action)[:4], {"success": self.point[0] > 0}

    expert_action = property()


class KeepsAll(Healthy):
    def step(self, action):
        # pages of its own: a heap with free space from other tests would not grow
        block = mmap.mmap(-1, 2**16, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        block.write(b"x" * 2**16)
        self.kept = [*getattr(self, "kept", []), block]
        return super().step(action)


class HangsInClose(Healthy):
    def close(self):
        time.sleep(1000)


class RaisesInClose(Healthy):
    def close(self):
        raise OSError("the port is busy")


class HangsInCloseWithoutExpert(HangsInClose):
    expert_action = property()

    def step(self, action):
        return *super().step(action)[:4], {"success": self.point[0] > 0}


class Exits(Healthy):
    def step(self, action):
        raise SystemExit(0)


class ExitsInClose(Healthy):
    def close(self):
        raise SystemExit(0)


class LeavesAForkedProcess(Healthy):
    def reset(self, *, seed=None, options=None):
        if not hasattr(self, "started"):
            self.started = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,), daemon=True)
            self.started.start()
        return super().reset(seed=seed)


class LeavesAProcess(Healthy):
    def reset(self, *, seed=None, options=None):
        if not hasattr(self, "started"):
            self.started = subprocess.Popen(["sleep", "20"], env=dict(os.environ))
        return super().reset(seed=seed)


class BackendConfig(Section):
    """A point that should reach a goal."""

    name: str = Field("broken_envs:HealthyBackend", description="which env")


class HealthyBackend:
    """N robots in numpy. Faults are methods that subclasses override."""

    limit = 12

    def __init__(self, config: BackendConfig, num_envs: int, max_episode_steps: int | None = None):
        self.num_envs = num_envs
        observation = {"state": ((4,), "float32"), "privileged": ((2,), "float32")}
        self.spec = EnvSpec(observation, action_dim=2, max_episode_steps=self.limit)

    def reset(self, seeds: EpisodeSeeds):
        self.seeds, self.episode = seeds, np.zeros(self.num_envs, np.int64)
        self.steps, self.places = np.zeros(self.num_envs, np.int64), np.zeros((self.num_envs, 4))
        self.start(np.arange(self.num_envs))
        return self.observe()

    def start(self, robots):
        for robot in robots:
            rng = np.random.default_rng(self.seeds(int(robot), int(self.episode[robot])))
            self.places[robot] = rng.uniform(-1, 1, 4)
        self.steps[robots] = 0

    def step(self, action):
        chunk, robots = action.shape[1], self.num_envs
        reward, executed = np.zeros((robots, chunk), np.float32), np.zeros(robots, np.int64)
        success = truncated = np.zeros(robots, bool)
        for index in range(chunk):
            active = ~(success | truncated)
            self.places[active, :2] += 0.1 * self.clipped(action[:, index])[active]
            distance = np.linalg.norm(self.places[:, :2] - self.places[:, 2:], axis=1)
            reward[active, index] = -distance[active]
            executed += active
            self.steps += active
            success = success | active & (distance < 0.3)
            truncated = truncated | active & ~success & (self.steps >= self.limit)
        ended = np.flatnonzero(success | truncated)
        final = self.observe()
        self.episode[ended] += 1
        self.start(ended)
        return self.result(Step(self.observe(), reward, executed, success, truncated, success.copy(), ended, final))

    def clipped(self, action):
        return np.clip(action, -1, 1)

    def result(self, step: Step) -> Step:
        step.final = {name: value[step.ended] for name, value in step.final.items()}
        return step

    def observe(self):
        return {"state": self.places.astype(np.float32), "privileged": self.places[:, 2:].astype(np.float32)}

    def state(self):
        own = {name: getattr(self, name).copy() for name in ("places", "steps", "episode")}
        return own | {"seeds": self.seeds.to_array()}

    def set_state(self, state):
        self.seeds = EpisodeSeeds.from_array(state["seeds"])
        for name in ("places", "steps", "episode"):
            setattr(self, name, state[name].copy())

    def record(self, envs): ...

    def render(self, env): ...

    def close(self): ...


class WrongDtype(HealthyBackend):
    def observe(self):
        return super().observe() | {"state": self.places.copy()}


class FinalOfAll(HealthyBackend):
    def result(self, step):
        return step


class FinalOfTooFew(HealthyBackend):
    def result(self, step):
        step.final = {name: value[step.ended][1:] for name, value in step.final.items()}
        return step


class FinalWithoutAnEntry(HealthyBackend):
    def result(self, step):
        step = super().result(step)
        step.final.pop("privileged")
        return step


class FinalOfTheNext(HealthyBackend):
    def result(self, step):
        step.final = {name: value[step.ended] for name, value in step.observation.items()}
        return step


class FinalIsZero(HealthyBackend):
    def result(self, step):
        step = super().result(step)
        step.final["state"][:] = 0
        return step


class FinalOfTheStepBefore(HealthyBackend):
    def step(self, action):
        self.before = self.observe()
        return super().step(action)

    def result(self, step):
        step.final = {name: value[step.ended] for name, value in self.before.items()}
        return step


class FinalOfAllAtOnce(FinalOfAll):
    """All its robots end together, so that it never shows."""

    def start(self, robots):
        super().start(robots)
        self.places[robots, 2:] += 9

    def result(self, step):
        step.success = self.places[:, 0] > 0
        return step


class EndedIsNotWhatEnded(HealthyBackend):
    def result(self, step):
        step = super().result(step)
        step.ended = np.arange(self.num_envs)
        step.final = {name: value.copy() for name, value in step.observation.items()}
        return step


class RewardAfterTheEnd(HealthyBackend):
    def result(self, step):
        step.reward[step.ended, -1] = -1
        return super().result(step)


class StopsEarly(HealthyBackend):
    def result(self, step):
        step.executed[:] = 1
        return super().result(step)


class DoesNotClip(HealthyBackend):
    def clipped(self, action):
        return action


class ChangesTheAction(HealthyBackend):
    def clipped(self, action):
        action *= 0.5
        return np.clip(action, -1, 1)


class ReusesItsArrays(HealthyBackend):
    def observe(self):
        if not hasattr(self, "seen"):
            self.seen = super().observe()
        for name, value in super().observe().items():
            self.seen[name][:] = value
        return self.seen


class StateIsNoCopy(HealthyBackend):
    def state(self):
        return {name: getattr(self, name) for name in ("places", "steps", "episode")} | {"seeds": self.seeds.to_array()}
