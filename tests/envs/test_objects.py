"""Cubes on the table: grasped by friction, pushed, lifted, rendered, and mixed with tasks without cubes."""

import os
import subprocess
import sys

import numpy as np
import pytest

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop import observe
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.scene import RED, Scene
from sparring.envs.tabletop.tasks.base import Situation, rotation_columns
from sparring.envs.tabletop.tasks.registry import TASKS, WIDE, find
from sparring.evaluation.play import Episode, _score_by_task

TABLE_TASKS = [name for name, task in TASKS.items() if hasattr(task, "cube")]
MIXED = ("reach_d0", "lift_d2", "push_d2")
PICKS = [f"pick_{colour}" for colour in ("red", "blue", "green")]


def test_the_registry_has_all_tasks_with_three_distributions_each():
    names = (
        "reach",
        "push",
        "lift",
        "pick_red",
        "pick_blue",
        "pick_green",
        "place",
        "stack",
        "drawer",
        "button",
        "handover",
        "lift_tray",
    )
    assert list(TASKS) == [f"{name}_d{d}" for name in names for d in range(3)] + ["explore"]
    for task in TASKS.values():
        assert len(set(task.instructions)) >= 3


def _tabletop(num_envs=3, max_episode_steps=None, seed=0, **config):
    env = Tabletop(TabletopConfig(**{"threads": 1, **config}), num_envs, max_episode_steps)
    return env, env.reset(EpisodeSeeds(seed, total_envs=num_envs))


def _block(state, name, objects=1):
    place = observe.layout(objects=objects)[name]
    return state[:, place] / observe.scales(objects=objects)[place]


def _actions(env, steps, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, env.num_envs, 1, env.spec.action_dim))


def _go(env, target, grip, steps):
    """Move all hands towards points `[N, 3]`."""
    for _ in range(steps):
        move = np.clip(0.7 * (target - env.situation().hand) / 0.02, -1, 1)
        env.step(np.concatenate([move, np.full((env.num_envs, 1), grip)], axis=1)[:, None])


def _lifted(**config):
    """Eight robots that hold their cube in the air."""
    env, _ = _tabletop(8, max_episode_steps=1000, task="lift_d0", control_mode="delta_ee_pos", **config)
    cube = env.situation().objects[:, 0]
    _go(env, cube + [0, 0, 0.06], 1, 15)
    _go(env, cube, 1, 10)
    _go(env, cube, -1, 8)
    _go(env, cube + [0, 0, 0.10], -1, 15)
    return env


def test_friction_holds_the_cube_and_opening_the_gripper_drops_it():
    env = _lifted()
    height = env.situation().objects[:, 0, 2]
    assert (height > 0.09).all()
    # in two seconds it slips by less than half a millimetre
    _go(env, env.situation().hand, -1, 50)
    np.testing.assert_allclose(env.situation().objects[:, 0, 2], height, atol=5e-4)
    assert find("lift_d0").score(env.situation())[1].all()
    _go(env, env.situation().hand, 1, 12)
    # on the table again: 22 mm is half its height
    np.testing.assert_allclose(env.situation().objects[:, 0, 2], 0.022, atol=2e-3)
    assert not find("lift_d0").score(env.situation())[1].any()


def test_nothing_but_friction_holds():
    model = find("lift_d0").scene.compile()
    assert model.neq == 0 and model.nmocap == 0 and model.ntendon == 0


def test_a_cube_at_rest_stays_where_it_is():
    env, _ = _tabletop(8, task="lift_d2")
    before = env.situation().objects.copy()
    for _ in range(40):
        env.step(np.zeros((8, 1, 7)))
    np.testing.assert_allclose(env.situation().objects, before, atol=2e-4)


def test_reach_has_no_cube():
    assert find("reach_d2").scene == Scene() and Scene().compile().nq == 8
    assert find("lift_d2").scene.compile().nq == 15


def test_the_state_follows_its_layout():
    env, _ = _tabletop(4, task="push_d2", control_mode="delta_ee_pos")
    for action in _actions(env, 10):
        state = env.step(action).observation["state"]
    now, (_, _, velocity) = env.situation(), env._world.objects(np.arange(4))
    assert state.shape == (4, 51)
    np.testing.assert_allclose(_block(state, "object0"), now.objects[:, 0], atol=1e-6)
    np.testing.assert_allclose(_block(state, "object0_from_hand"), now.objects[:, 0] - now.hand, atol=1e-6)
    np.testing.assert_allclose(_block(state, "object0_velocity"), velocity[:, 0], atol=1e-6)
    yaw = 2 * np.arctan2(now.quats[:, 0, 3], now.quats[:, 0, 0])
    zero = np.zeros(4)
    expected = np.stack([np.cos(yaw), np.sin(yaw), zero, -np.sin(yaw), np.cos(yaw), zero], axis=1)
    np.testing.assert_allclose(_block(state, "object0_rotation"), expected, atol=1e-3)
    hidden, observation = _tabletop(2, task="push_d2", object_state="hidden")
    assert observation["state"].shape == (2, 30)


def test_rotation_columns_of_a_known_turn():
    half = np.sqrt(0.5)
    # a quarter turn about x: y -> z
    np.testing.assert_allclose(rotation_columns(np.array([half, half, 0, 0])), [1, 0, 0, 0, 0, 1], atol=1e-12)


def _situation(hand, cube, goal=(0, 0, 0), width=0.08, grip=0.04):
    one = np.array([[cube]], float)
    hands, widths, grips = np.array([[hand]], float), np.array([[width]]), np.array([[grip]])
    return Situation(hands, np.array([goal], float), widths, grips, one, np.zeros((1, 1, 4)))


def test_lift_reward_by_hand():
    score = find("lift_d0").score
    far = score(_situation((9, 9, 9), (0, 0, 0.022)))
    assert far[0][0] == pytest.approx(0, abs=1e-6) and not far[1][0]
    # at the cube with open fingers: 0.3 of 2
    assert score(_situation((0, 0, 0.022), (0, 0, 0.022)))[0][0] == pytest.approx(0.15)
    held = dict(width=0.044, grip=0.0)
    assert score(_situation((0, 0, 0.022), (0, 0, 0.022), **held))[0][0] == pytest.approx(0.25)
    # 4 of 8 cm up
    assert score(_situation((0, 0, 0.062), (0, 0, 0.062), **held))[0][0] == pytest.approx(0.5)
    top, done = score(_situation((0, 0, 0.11), (0, 0, 0.11), **held))
    assert top[0] == pytest.approx(1.0) and done[0]


def test_push_reward_by_hand():
    score = find("push_d0").score
    # the hand is where it should push from, 10 cm from the goal
    reward, done = score(_situation((-0.035, 0, 0.03), (0, 0, 0.022), goal=(0.1, 0, 0)))
    assert reward[0] == pytest.approx((0.2 + 0.8 * (1 - np.tanh(0.8))) / 1.5) and not done[0]
    reward, done = score(_situation((-0.035, 0, 0.03), (0, 0, 0.022), goal=(0.001, 0, 0)))
    assert reward[0] > 0.99 and done[0]


def _two_cubes(hand, cube, below, width=0.08, grip=0.04):
    pair = np.array([[cube, below]], float)
    goal, quats = np.zeros((1, 3)), np.zeros((1, 2, 4))
    return Situation(np.array([[hand]], float), goal, np.array([[width]]), np.array([[grip]]), pair, quats)


def test_stack_reward_by_hand():
    score, below = find("stack_d0").score, (0.2, 0, 0.022)
    held = dict(width=0.044, grip=0.0)
    # held 20 cm away from its goal and at its initial height: 0.15 near, 0.1 held
    reward, done = score(_two_cubes((0, 0, 0.022), (0, 0, 0.022), below, **held))
    assert reward[0] == pytest.approx(0.25 + 0.35 * (1 - np.tanh(8 * np.hypot(0.2, 0.044)))) and not done[0]
    # at its goal and still held
    reward, done = score(_two_cubes((0.2, 0, 0.066), (0.2, 0, 0.066), below, **held))
    assert reward[0] == pytest.approx(0.65 + 0.2 * 0.044 / 0.08) and not done[0]
    # released: first with the hand still near, then with the hand away
    reward, done = score(_two_cubes((0.2, 0, 0.066), (0.2, 0, 0.066), below))
    assert reward[0] == pytest.approx(0.65 + 0.2) and not done[0]
    reward, done = score(_two_cubes((0.2, 0, 0.12), (0.2, 0, 0.066), below))
    assert reward[0] == 1 and done[0]
    # next to the other cube on the table is not on it
    assert not score(_two_cubes((0.2, 0, 0.12), (0.2, 0, 0.022), (0.22, 0, 0.022)))[1][0]


def test_a_cube_cannot_be_pushed_onto_the_plate():
    env, _ = _tabletop(8, max_episode_steps=1000, task="place_d0", control_mode="delta_ee_pos")
    cube = env.situation().objects[:, 0].copy()
    _go(env, cube + [-0.07, 0, 0.08], -1, 15)
    _go(env, cube + [-0.07, 0, 0.0], -1, 10)
    _go(env, cube + [0.15, 0, 0.0], -1, 30)
    now = env.situation()
    assert (now.objects[:, 0, 0] > cube[:, 0] + 0.03).all() and not find("place_d0").score(now)[1].any()
    assert (now.objects[:, 0, 2] < 0.03).all()


def test_the_sparse_reward_is_given_once_at_the_end_of_a_success():
    env, _ = _tabletop(2, max_episode_steps=8, reward="sparse")
    near, rewards = env.situation().hand.copy(), []
    for number in range(1, 9):
        # robot 0 is at its goal in steps 4..8, robot 1 in 5..8
        env._goal[:] = near + [[9.0 * (number < 4)], [9.0 * (number < 5)]]
        rewards.append(env.step(np.zeros((2, 1, 7))).reward[:, 0])
    np.testing.assert_array_equal(np.sum(rewards, axis=0), [1, 0])
    assert rewards[-1][0] == 1


@pytest.mark.parametrize("task", TABLE_TASKS)
def test_starts_stay_in_their_ranges_and_use_them(task):
    env, _ = _tabletop(200, task=task)
    now, region = env.situation(), find(task).cube
    cube = now.objects[:, 0]
    assert all(region.holds(point) for point in cube) and (cube[:, 2] == 0.022).all()
    away = np.hypot(cube[:, 0] + 0.38, cube[:, 1])
    assert np.ptp(away) > 0.85 * (region.far - region.near)
    yaw = np.rad2deg(2 * np.arctan2(now.quats[:, 0, 3], now.quats[:, 0, 0]))
    assert np.abs(yaw).max() <= find(task).yaw + 1e-9 and np.ptp(yaw) >= 1.8 * find(task).yaw


def test_the_widest_distribution_covers_60_percent_of_the_reachable_area():
    # the hand touches the table, pointing down, between 10 and 53 cm from the base, up to 2.6 rad to the side
    x, y = np.meshgrid(np.linspace(-0.5, 0.5, 201), np.linspace(-0.55, 0.55, 221))
    radius, angle = np.hypot(x + 0.38, y), np.abs(np.arctan2(y, x + 0.38))
    reachable = (radius > 0.10) & (radius < 0.53) & (angle < 2.6)
    inside = (radius > WIDE.near) & (radius < WIDE.far) & (angle < np.deg2rad(WIDE.degrees))
    assert inside.sum() / reachable.sum() > 0.6


def test_distances_of_discs_are_in_their_range():
    for task in ("push_d0", "push_d1", "push_d2"):
        env, _ = _tabletop(100, task=task)
        now = env.situation()
        assert (now.goal[:, 2] == 0).all()
        travel = np.hypot(*(now.goal - now.objects[:, 0])[:, :2].T)
        assert (travel >= find(task).travel[0]).all() and (travel <= find(task).travel[1]).all()


def test_phrasings_are_drawn_per_episode():
    env, observation = _tabletop(64, task="lift_d0", max_episode_steps=1)
    assert env.spec.instructions == find("lift_d0").instructions and len(set(env.spec.instructions)) == 4
    assert set(observation["task"]) == {0, 1, 2, 3} and env.spec.task_names == ("lift_d0",) * 4
    again = env.step(np.zeros((64, 1, 7))).observation["task"]
    assert (again != observation["task"]).any()
    # reports aggregate all phrasings of a task
    episodes = [Episode(env=0, task=index, reward=1.0, steps=1, success=index < 2) for index in range(4)]
    scores = _score_by_task(episodes, env.spec)
    assert list(scores) == ["lift_d0"] and scores["lift_d0"].success.rate == 0.5


def test_each_task_has_its_own_time_limit():
    env, _ = _tabletop(2, task=("lift_d0", "push_d0"))
    ends = [env.step(np.zeros((2, 1, 7))).truncated for _ in range(60)]
    assert np.flatnonzero([end[0] for end in ends]).tolist() == [49]
    assert np.flatnonzero([end[1] for end in ends]).tolist() == [59] and env.spec.max_episode_steps == 60


def test_mixed_robots_behave_as_without_the_others():
    mixed, observation = _tabletop(6, task=MIXED)
    assert len(mixed._world._groups) == 3 and observation["state"].shape == (6, 51)
    # reach has no object: its blocks are zero
    assert (observation["state"][[0, 3], 36:] == 0).all() and (observation["state"][[1, 4], 36:] != 0).any()
    alone = {row: _tabletop(6, task=MIXED[row])[0] for row in range(3)}
    for action in _actions(mixed, 12):
        reward = mixed.step(action).reward
        for row, env in alone.items():
            np.testing.assert_array_equal(reward[row::3], env.step(action).reward[row::3])


def test_mixed_robots_are_rendered_as_without_the_others():
    mixed, observation = _tabletop(6, task=MIXED, cameras=("head", "wrist"), image_size=32)
    for row in range(3):
        _, alone = _tabletop(6, task=MIXED[row], cameras=("head", "wrist"), image_size=32)
        for camera in ("image/head", "image/wrist"):
            np.testing.assert_array_equal(observation[camera][row::3], alone[camera][row::3])
    assert mixed.render(1).shape == (256, 512, 3)


def _reddish(image):
    red, green, blue = image.astype(int)
    return (red > 100) & (green < 0.5 * red) & (blue < 0.5 * red)


def test_cubes_are_visible_at_all_positions():
    _, observation = _tabletop(60, task="lift_d2", cameras=("head",), image_size=64)
    assert RED[0] > 2 * RED[1]
    seen = [_reddish(image).sum() for image in observation["image/head"]]
    # the arm occludes a few
    assert np.mean(np.array(seen) >= 4) > 0.9
    _, without = _tabletop(1, task="reach_d0", cameras=("head",), image_size=64)
    assert _reddish(without["image/head"][0]).sum() == 0


def _assert_same_step(one, other):
    for key in one.observation:
        np.testing.assert_array_equal(one.observation[key], other.observation[key], err_msg=key)
    np.testing.assert_array_equal(one.reward, other.reward)


def test_number_of_threads_changes_nothing():
    envs = [_tabletop(6, threads=threads, task=MIXED, max_episode_steps=9)[0] for threads in (1, 2, 3)]
    for action in _actions(envs[0], 20):
        steps = [env.step(action) for env in envs]
        for step in steps[1:]:
            _assert_same_step(steps[0], step)


def test_set_state_restores_a_held_cube():
    env = _lifted()
    state, actions = env.state(), _actions(env, 15)
    once = [env.step(action) for action in actions]
    env.set_state(state)
    for action, before in zip(actions, once, strict=True):
        _assert_same_step(before, env.step(action))


_CONTINUE = """
import sys, numpy as np
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
saved = dict(np.load(sys.argv[1]))
env = Tabletop(TabletopConfig(threads=2, task=("reach_d0", "lift_d2", "push_d2")), 6, 9)
env.set_state({key[6:]: value for key, value in saved.items() if key.startswith("state/")})
steps = [env.step(action) for action in saved["actions"]]
np.savez(sys.argv[2], state=[s.observation["state"] for s in steps], task=[s.observation["task"] for s in steps])
assert "torch" not in sys.modules
"""


def test_a_fresh_process_continues_bit_identically(tmp_path):
    env, _ = _tabletop(6, max_episode_steps=9, task=MIXED, seed=5)
    actions = _actions(env, 15)
    for action in actions[:4]:
        env.step(action)
    saved = {f"state/{key}": value for key, value in env.state().items()}
    np.savez(tmp_path / "in.npz", actions=actions[4:], **saved)
    command = [sys.executable, "-c", _CONTINUE, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    there, here = np.load(tmp_path / "out.npz"), [env.step(action) for action in actions[4:]]
    np.testing.assert_array_equal(there["state"], [step.observation["state"] for step in here])
    np.testing.assert_array_equal(there["task"], [step.observation["task"] for step in here])


@pytest.mark.parametrize("d", range(3))
def test_only_the_instruction_determines_the_target_cube(d):
    tasks = [find(f"{pick}_d{d}") for pick in PICKS]
    assert len({frozenset(task.scene.objects) for task in tasks}) == 1
    assert [task.scene.objects[0].name for task in tasks] == ["red_cube", "blue_cube", "green_cube"]
    assert not set(tasks[0].instructions) & set(tasks[1].instructions)
    rng = np.random.default_rng(0)
    # [100, 3 cubes, 2], for any target colour
    points = np.stack([task.start(rng).objects[:, :2] for task in tasks for _ in range(100)])
    gaps = [np.linalg.norm(points[:, i] - points[:, j], axis=1).min() for i, j in ((0, 1), (0, 2), (1, 2))]
    assert min(gaps) >= 0.10


def test_in_d0_each_colour_has_its_own_region():
    rng = np.random.default_rng(0)
    y = {pick: np.array([find(f"{pick}_d0").start(rng).objects[0, 1] for _ in range(50)]) for pick in PICKS}
    assert y["pick_red"].min() > 0.05 and np.abs(y["pick_blue"]).max() < 0.04 and y["pick_green"].max() < -0.05


def test_lifting_another_cube_is_no_success():
    env, _ = _tabletop(2, task="pick_red_d0", control_mode="delta_ee_pos")
    objects, up = env.situation().objects.copy(), [0, 0, 0.1]
    task, now = find("pick_red_d0"), env.situation()
    wanted, other = objects.copy(), objects.copy()
    wanted[:, 0] += up
    other[:, 1] += up
    assert task.score(now._replace(objects=wanted))[1].all() and not task.score(now._replace(objects=other))[1].any()
