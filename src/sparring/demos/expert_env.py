"""Envs with scripted experts: what a recording needs of the built-in robot, and of gymnasium envs that have experts."""

from typing import Any, Protocol

import gymnasium
import numpy as np

from sparring.contract import EnvSpec, text_of
from sparring.envs.backend import Arrays, EpisodeSeeds, Step
from sparring.envs.configs import GymConfig, TabletopConfig
from sparring.envs.gym_batch import SerialBackend
from sparring.envs.tabletop import observe
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.errors import UserError

_ACTIONS = {
    "delta_qpos": [f"joint_step.{k}" for k in range(6)] + ["finger_step"],
    "delta_ee_pos": ["hand_x", "hand_y", "hand_z", "finger_step"],
    "delta_ee": ["hand_x", "hand_y", "hand_z", "turn_x", "turn_y", "turn_z", "finger_step"],
    "qpos": [f"joint.{k}" for k in range(6)] + ["fingers"],
}


class ExpertEnv(Protocol):
    """N robots with experts."""

    spec: EnvSpec
    robot_type: str
    # feature -> names of the entries of a state, privileged state and action
    names: dict[str, list[str]]

    def reset(self, seeds: EpisodeSeeds) -> Arrays: ...

    def step(self, action: np.ndarray) -> Step: ...

    def expert(self) -> np.ndarray:
        """Actions [N, 1, A] for the current state."""

    def tasks(self, observation: Arrays) -> list[tuple[str, str]]:
        """(task, instruction) of each robot at the start of an episode."""

    def close(self) -> None: ...


def make_expert_env(config: Any, robots: int, max_episode_steps: int | None, noise: float, seed: int) -> ExpertEnv:
    make = _BuiltIn if isinstance(config, TabletopConfig) else _Gymnasium
    return make(config, robots, max_episode_steps, noise, seed)


class _BuiltIn:
    def __init__(self, config: TabletopConfig, robots: int, limit: int | None, noise: float, seed: int):
        self.env = env = Tabletop(config, robots, limit)
        self.spec, self.expert = env.spec, Expert(env, noise, seed)
        self.reset, self.step, self.close = env.reset, env.step, env.close
        self.robot_type = "sparring_arm" if len(env.mounts) == 1 else "sparring_two_arms"
        actions = _ACTIONS[config.control_mode]
        if len(env.mounts) > 1:
            actions = [f"{side}_{name}" for side in ("left", "right") for name in actions]
        self.names = {
            "observation.state": self._observed_names(robot=True, world=config.object_state == "state"),
            "observation.privileged": self._observed_names(robot=False, world=True),
            "action": actions,
        }

    def tasks(self, observation: Arrays) -> list[tuple[str, str]]:
        return [(self.spec.task_names[k], self.spec.instructions[k]) for k in observation["task"]]

    def _observed_names(self, robot: bool, world: bool) -> list[str]:
        now = self.env.situation()
        blocks = observe.layout(now.objects.shape[1], now.mechanisms.shape[1], len(self.env.mounts), robot, world)
        names = []
        for name, place in blocks.items():
            size = place.stop - place.start
            names += [name] if size == 1 else [f"{name}.{k}" for k in range(size)]
        return names


class _Gymnasium:
    """Gymnasium envs with a method `expert_action()`, which returns an action for the current state."""

    def __init__(self, config: GymConfig, robots: int, limit: int | None, noise: float, seed: int):
        self.env, self._noise, self._seed, self._name = SerialBackend(config, robots, limit), noise, seed, config.name
        self.spec, self.robot_type = self.env.spec, config.name
        self.names: dict[str, list[str]] = {}
        self.step, self.close = self.env.step, self.env.close
        self._robots = self.env.robots
        if not self._robots[0].env.has_wrapper_attr("expert_action") or self.spec.discrete_actions:
            self.close()
            needs = "it needs continuous actions and a method expert_action() that returns one for the current state"
            raise UserError(f"env.name={config.name} has no scripted expert; {needs}")
        if (wrapper := _changes_actions(self._robots[0].env)) is not None:
            self.close()
            needs = f"add a method expert_action() to {wrapper} that returns actions of its own action_space"
            raise UserError(f"env.name={config.name}: {wrapper} changes the actions of the expert inside it; {needs}")
        if not self.spec.max_episode_steps:
            self.close()
            raise UserError(f"env.name={config.name} has no time limit; set rollout.max_episode_steps")

    def reset(self, seeds: EpisodeSeeds) -> Arrays:
        self._rngs = [np.random.default_rng([self._seed, seeds(k, 0)]) for k in range(self.env.num_envs)]
        return self.env.reset(seeds)

    def expert(self) -> np.ndarray:
        chosen = [robot.env.get_wrapper_attr("expert_action")() for robot in self._robots]
        steps = np.stack([robot.actions.encode(action) for robot, action in zip(self._robots, chosen, strict=True)])
        if self._noise:
            steps += self._noise * np.stack([rng.standard_normal(steps.shape[1]) for rng in self._rngs])
        return np.clip(steps, -1, 1)[:, None]

    def tasks(self, observation: Arrays) -> list[tuple[str, str]]:
        texts = observation.get("instruction", np.zeros((self.env.num_envs, 0), np.uint8))
        return [(self._name, text_of(text)) for text in texts]


def _changes_actions(env: gymnasium.Env) -> str | None:
    """The name of a wrapper of actions outside of the expert, if there is one."""
    while isinstance(env, gymnasium.Wrapper) and not hasattr(env, "expert_action"):
        if isinstance(env, gymnasium.ActionWrapper):
            return type(env).__name__
        env = env.env
    return None
