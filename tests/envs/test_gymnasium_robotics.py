"""gymnasium-robotics through the gymnasium adapter: goals in the state, success from info, a trusted module."""

import numpy as np
import pytest

from sparring.config.text import Setting
from sparring.config.trust import _names_code
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym_batch import SerialBackend

pytest.importorskip("gymnasium_robotics", reason='needs pip install "sparring[sims]"')
NAME = "gym:gymnasium_robotics:FetchReach-v4"


def test_fetch_reach_is_solved_by_moving_towards_its_goal():
    backend = SerialBackend(GymConfig(name=NAME), 2)
    assert backend.spec.observation == {"state": ((16,), "float32")} and backend.spec.max_episode_steps == 50
    state = backend.reset(EpisodeSeeds(0, total_envs=2))["state"]
    for _ in range(50):
        # the keys in order: achieved goal, desired goal, observation
        action = np.zeros((2, 1, 4), np.float32)
        action[:, 0, :3] = 10 * (state[:, 3:6] - state[:, :3])
        step = backend.step(action)
        state = step.observation["state"]
    assert step.ended.tolist() == [0, 1] and step.truncated.all() and step.success.all()
    assert backend.spec.reports_success and (step.reward == 0).all()  # -1 while the goal is not reached
    backend.close()


def test_its_module_is_imported_without_trust():
    assert not _names_code(Setting("env.name", NAME, "config.yaml"))
    assert _names_code(Setting("env.name", "gym:somebody:FetchReach-v4", "config.yaml"))
