import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.arm import CONTROLS
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert, _keyed_normal
from sparring.envs.tabletop.tasks import registry as tasks
from sparring.envs.tabletop.tasks.base import Reach
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError


def _env(task, num_envs, mode="delta_ee_pos", **config):
    env = Tabletop(TabletopConfig(task=task, control_mode=mode, threads=1, **config), num_envs)
    env.reset(EpisodeSeeds(3, "eval", total_envs=num_envs))
    return env


def _play(env, expert):
    for _ in range(env.spec.max_episode_steps):
        step = env.step(expert())
    return step.success


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if task.expert is not None])
def test_experts_succeed(task):
    # a bar at any angle needs a hand that can turn
    env = _env(task, 40, "delta_ee" if task == "handover_d2" else "delta_ee_pos")
    # benchmarks/experts.py measures 100 episodes: 95 % or more on d0, 85 % or more on d2
    assert _play(env, Expert(env)).mean() >= (0.8 if task.endswith("d2") else 0.95)


@pytest.mark.parametrize("task", ["lift_d0", "lift_tray_d0"])
@pytest.mark.parametrize("mode", list(CONTROLS))
def test_experts_succeed_in_every_control_mode(mode, task):
    env = _env(task, 8, mode)
    assert _play(env, Expert(env)).all()


@pytest.mark.parametrize("mode", ["qpos", "delta_ee_pos"])
def test_actions_of_experts_are_padded(mode):
    plain, padded = _env("lift_d0", 4, mode), _env("lift_d0", 4, mode, pad_action=12)
    action, size = Expert(padded, noise=0.2)(), plain.spec.action_dim
    assert action.shape == (4, 1, 12) and (action[..., size:] == 0).all()
    np.testing.assert_array_equal(action[..., :size], Expert(plain, noise=0.2)())
    padded.step(action)


def test_experts_of_mixed_tasks_act_together_and_need_no_object_state():
    env = _env(("lift_d0", "push_d0", "reach_d0"), 9, object_state="hidden")
    expert, succeeded = Expert(env), np.zeros(9, bool)
    for _ in range(60):
        step = env.step(expert())
        succeeded |= step.success
    assert succeeded.all()


def test_noise_changes_actions_and_is_seeded():
    env = _env("lift_d0", 30)
    first, again, other = (Expert(env, noise=0.3, seed=seed)() for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and np.abs(first).max() <= 1
    # an expert depends on positions only, so it succeeds in spite of noise
    assert _play(env, Expert(env, noise=0.3)).mean() >= 0.9


@pytest.mark.parametrize("task", ["lift_d0", "lift_tray_d0"])
def test_noise_on_absolute_actions_is_noise_on_the_step_to_them(task):
    env = _env(task, 20, "qpos")
    commands = []
    for noise in (0.0, 0.1):
        env.reset(EpisodeSeeds(3, "eval", total_envs=20))
        env.step(Expert(env, noise)())
        commands.append(env.arms()[0])
    # [N, R, 7]; the standard deviation is a tenth of 0.05 rad and 1 cm, as in delta_qpos; five of them are rare
    delta = np.abs(commands[1] - commands[0])
    assert 0.0015 < delta[..., :6].mean() < 0.005 and delta[..., :6].max() < 0.025 and delta[..., 6].max() < 0.005
    env.reset(EpisodeSeeds(3, "eval", total_envs=20))
    assert _play(env, Expert(env, noise=0.1)).mean() >= 0.95


@pytest.mark.parametrize("noise", ["a", -0.1, np.nan, np.inf, None])
def test_invalid_noise_is_refused(noise):
    with pytest.raises(UserError, match=r"Expert\(noise=.*expected a number >= 0"):
        Expert(_env("reach_d0", 1), noise=noise)


def test_noise_does_not_depend_on_the_number_of_robots():
    actions = {}
    for count in (2, 5):
        env = Tabletop(TabletopConfig(task="lift_d0", control_mode="delta_ee_pos", threads=1), count)
        env.reset(EpisodeSeeds(3, total_envs=5))
        expert = Expert(env, noise=0.3)
        env.step(expert())
        actions[count] = expert()
    np.testing.assert_array_equal(actions[2], actions[5][:2])
    # it differs between robots and between steps
    noise = _keyed_normal(0, env.step_keys(), 4)
    assert len(np.unique(noise)) == noise.size
    env.step(expert())
    assert (_keyed_normal(0, env.step_keys(), 4) != noise).all()


def test_noise_is_standard_normal():
    noise = _keyed_normal(0, np.arange(50_000), 2)
    np.testing.assert_allclose([noise.mean(), noise.std(), (noise**4).mean()], [0, 1, 3], atol=0.06)
    assert abs(np.corrcoef(noise.T)[0, 1]) < 0.02


def test_an_expert_continues_from_any_state():
    env = _env("lift_d0", 6)
    expert = Expert(env)
    for _ in range(20):
        env.step(expert())
    state, action = env.state(), expert()
    for _ in range(20):
        env.step(expert())
    env.set_state(state)
    np.testing.assert_array_equal(expert(), action)


@dataclass(frozen=True)
class _Odd(Reach):
    expert = None


def test_a_task_without_an_expert_is_refused(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "odd_d0", _Odd("odd_d0", (0, 0, 0.1), (0, 0, 0.1), joint_noise=0.0))
    with pytest.raises(ValueError, match="no expert for odd_d0; choose another"):
        Expert(_env("odd_d0", 1))


def test_experts_are_imported_only_when_used():
    code = "import sys, sparring.envs.tabletop.backend as b; sys.exit(any('experts' in m for m in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
