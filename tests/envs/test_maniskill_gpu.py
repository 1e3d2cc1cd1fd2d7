"""The batch of ManiSkill's GPU simulator, on a double with the signatures of ManiSkill's env."""

import inspect

import maniskill_double
import numpy as np
import pytest
from maniskill_double import SIGNATURES, BaseEnv

from sparring.contract import text_of
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.env import make_env
from sparring.envs.sims import maniskill
from sparring.envs.sims.maniskill import ManiSkill, Task
from sparring.envs.sims.maniskill_gpu import ManiSkillBatch
from sparring.errors import UserError


@pytest.fixture
def made(monkeypatch):
    """The (task, number of robots, on the GPU) of each env that was made."""
    calls = []

    def make_inner(task, num_envs, on_gpu):
        calls.append((task.name, num_envs, on_gpu))
        return BaseEnv(num_envs), 5

    monkeypatch.setattr(maniskill, "_make_inner", make_inner)
    return calls


def batch(num_envs=3, limit=None, **kwargs) -> ManiSkillBatch:
    return ManiSkillBatch(GymConfig(name="maniskill:PickCube-v1", kwargs=kwargs), num_envs, limit)


def chunk(*rows) -> np.ndarray:
    """Displacements, robot by robot -> actions [N, C, 1]: an action of 1 moves a robot by 2."""
    return np.array(rows, np.float32)[..., None] / 2


def test_the_double_has_the_signatures_of_maniskill():
    for name, expected in SIGNATURES.items():
        owner, method = name.split(".")
        assert list(inspect.signature(getattr(getattr(maniskill_double, owner), method)).parameters) == expected, name


def test_vectorize_gpu_makes_one_env_of_all_robots(made):
    env = make_env(GymConfig(name="maniskill:PickCube-v1", vectorize="gpu"), 4)
    assert made == [("PickCube-v1", 4, True)] and env.spec.max_episode_steps == 5 and env.spec.control_hz == 20
    assert env.spec.observation == {"state": ((2,), "float32"), "instruction": ((256,), "uint8")}
    td = env.reset(0)
    assert text_of(td["observation", "instruction"][2].numpy()) == "lift the cube to the goal"


def test_actions_and_states_are_described_as_on_the_cpu(made):
    spec = batch().spec
    assert (spec.action_low, spec.action_high) == ((-2.0,), (2.0,))
    assert spec.state_entries == (("state", 2),) and spec.reports_success


def test_a_task_without_success_reports_none(made, monkeypatch):
    monkeypatch.setattr(BaseEnv, "get_info", lambda self: {})
    monkeypatch.setattr(BaseEnv, "step", lambda self, action: (self.get_obs(), self.x, self.x > 9, None, {}))
    one = batch(2)
    assert not one.spec.reports_success
    one.reset(EpisodeSeeds(0))
    assert not one.step(chunk([1.2], [1.2])).success.any()
    alone = ManiSkill(Task("PickCube-v1"))
    alone.reset(seed=0)
    assert alone.step(np.ones(1, np.float32))[4] == {}
    with pytest.raises(UserError, match="reward=sparse: PickCube-v1 reports no success; use dense"):
        batch(reward="sparse")


def test_robots_move_by_scaled_actions_until_their_episodes_end(made):
    one = batch()
    start = one.reset(EpisodeSeeds(0))["state"][:, 0]
    assert ((start >= 0) & (start <= 0.1)).all() and len(set(start.tolist())) == 3
    # robot 0 stays in the middle, 1 solves the task in its second step, 2 fails in its first
    step = one.step(chunk([0.1, 0.1, 0.1], [0.5, 0.6, 0.1], [-1.2, 0.1, 0.1]))
    assert step.executed.tolist() == [3, 2, 1] and step.ended.tolist() == [1, 2]
    assert step.truncated.tolist() == [False, True, False] and step.terminated.tolist() == [False, False, True]
    assert step.success.tolist() == [False, True, False]
    np.testing.assert_allclose(step.reward[0], start[0] + [0.1, 0.2, 0.3], atol=1e-6)
    np.testing.assert_allclose(step.reward[1], [start[1] + 0.5, start[1] + 1.1, 0], atol=1e-6)
    np.testing.assert_allclose(step.reward[2], [start[2] - 1.2, 0, 0], atol=1e-6)
    # the true last observations, although the simulator has moved these robots on
    np.testing.assert_allclose(step.final["state"][:, 0], [start[1] + 1.1, start[2] - 1.2], atol=1e-6)
    np.testing.assert_allclose(step.observation["state"][0], [start[0] + 0.3, -start[0] - 0.3], atol=1e-6)
    begun = step.observation["state"][1:, 0]
    assert ((begun >= 0) & (begun <= 0.1)).all()
    assert one._simulation.inner.resets == [[0, 1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("kwargs", "terminated", "truncated"),
    [({}, False, True), ({"reward": "sparse"}, True, False), ({"at_success": "continue"}, False, False)],
)
def test_what_happens_at_success(made, kwargs, terminated, truncated):
    one = batch(1, **kwargs)
    one.reset(EpisodeSeeds(0))
    step = one.step(chunk([1.2]))
    assert (step.terminated[0], step.truncated[0], step.success[0]) == (terminated, truncated, True)
    if not (terminated or truncated):
        # it has succeeded, even if it does not stay there
        step = one.step(chunk([-0.6] * 4))
        assert step.truncated.tolist() == [True] and step.success.tolist() == [True] and step.executed.tolist() == [4]


def test_time_limits(made):
    one = batch(2, limit=3)
    one.reset(EpisodeSeeds(0))
    step = one.step(chunk([0.1] * 2, [0.1] * 2))
    assert not len(step.ended)
    step = one.step(chunk([0.1] * 2, [0.1] * 2))
    assert step.ended.tolist() == [0, 1] and step.executed.tolist() == [1, 1] and step.truncated.all()
    assert one.spec.max_episode_steps == 3


def test_starts_depend_on_the_seeds_of_the_episodes(made):
    starts = {}
    for run, seed in enumerate((0, 0, 1)):
        one = batch(2, limit=1)
        first = one.reset(EpisodeSeeds(seed))["state"]
        later = [one.step(chunk([0.1], [0.1])).observation["state"] for _ in range(2)]
        starts[run] = np.stack([first, *later])
    assert (starts[0] == starts[1]).all() and not (starts[0] == starts[2]).any()
    assert len(np.unique(starts[0][..., 0])) == 6  # each episode starts elsewhere


def test_cameras_are_drawn_where_they_are_needed(made):
    one = batch(2, 10, cameras="base_camera", depth=True, image_size=8)
    shown = one.reset(EpisodeSeeds(0))
    assert shown["image/base_camera"].shape == (2, 3, 8, 8) and shown["depth/base_camera"].shape == (2, 1, 8, 8)
    assert (shown["depth/base_camera"] == 1.5).all()
    assert {key: (value.shape[1:], value.dtype.name) for key, value in shown.items()} == one.spec.observation
    camera = one._simulation.inner.scene.sensors["base_camera"]
    assert camera.captured == 1
    one.step(chunk([0.1] * 3, [0.1] * 3))
    assert camera.captured == 2  # the last of three steps
    # robot 0 ends in the first step of three: its last images, and those after the reset
    step = one.step(chunk([1.2, 0, 0], [0.1, 0, 0]))
    assert camera.captured == 4 and step.final["image/base_camera"].min() >= 120
    assert step.observation["image/base_camera"][0].max() <= 10


def test_videos_show_the_steps_of_a_robot(made):
    one = batch(2)
    one.reset(EpisodeSeeds(0))
    one.record([1])
    step = one.step(chunk([0.1, 0.1, 0.1], [0.5, 0.6, 0.1]))
    assert list(step.frames) == [1] and len(step.frames[1]) == 2 and step.frames[1][0].shape == (16, 16, 3)
    one.record([])
    assert one.step(chunk([0.1], [0.1])).frames == {} and one.state() is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "gym:CartPole-v1"}, "vectorize=gpu is for maniskill:TASK; env.name=gym:CartPole-v1 needs serial"),
        (
            {"name": "maniskill:PickCube-v1", "roles": {"state": "ignore"}},
            "env.roles, env.points and env.success_return are not",
        ),
        (
            {"name": "maniskill:PickCube-v1", "kwargs": {"bogus": 1}},
            "maniskill:PickCube-v1 cannot be created with env.kwargs={'bogus': 1}: .*'bogus'",
        ),
        ({"name": "maniskill:PickCube-v1", "kwargs": {"depth": True}}, "depth=true needs env.kwargs.cameras"),
        (
            {"name": "maniskill:PickCube-v1", "kwargs": {"cameras": "top"}},
            "'top' is unknown; this env has base_camera",
        ),
        (
            {"name": "maniskill:PickCube-v1", "kwargs": {"reward": "shaped"}},
            "reward='shaped'; expected dense or sparse",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(made, settings, message):
    with pytest.raises(UserError, match=message):
        ManiSkillBatch(GymConfig(vectorize="gpu", **settings), 1)
