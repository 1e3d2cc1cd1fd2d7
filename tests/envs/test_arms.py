"""Robots with two arms and their tasks."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.registered import register
from sparring.envs.tabletop import observe
from sparring.envs.tabletop.arm import CONTROLS, HandMover
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.envs.tabletop.scene import DUAL, Scene, load_mujoco
from sparring.envs.tabletop.tasks.base import Situation, arm_near_home
from sparring.envs.tabletop.tasks.dual import BAR, BAR_GRIP, LEFT, RIGHT, TRAY, Area, _handles, _rotations
from sparring.envs.tabletop.tasks.manipulate import REACHABLE
from sparring.envs.tabletop.tasks.registry import find
from sparring.errors import UserError

# entries of an action of one arm, by control mode
ENTRIES = {"delta_qpos": 7, "delta_ee_pos": 4, "delta_ee": 7, "qpos": 7}
DUAL_TASKS = [f"{name}_d{d}" for name in ("lift_tray", "handover") for d in range(3)]


def _tabletop(num_envs=3, max_episode_steps=None, task="lift_tray_d0", seed=0, **config):
    env = Tabletop(TabletopConfig(**{"threads": 1, "task": task, **config}), num_envs, max_episode_steps)
    return env, env.reset(EpisodeSeeds(seed, total_envs=num_envs))


def _actions(env, steps, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (steps, env.num_envs, 1, env.spec.action_dim))


def test_names_in_the_model_start_with_their_arm():
    model = find("handover_d0").scene.compile()
    assert [model.camera(i).name for i in range(model.ncam)] == ["head", "left_wrist", "right_wrist"]
    assert [model.site(i).name for i in range(model.nsite)] == ["left_hand", "right_hand"]
    joints = [model.joint(i).name for i in range(model.njnt)]
    assert all(name.startswith("left_") for name in joints[:8])
    assert all(name.startswith("right_") for name in joints[8:16]) and joints[16:] == ["bar"]
    assert model.nq == 16 + 7 and model.nu == 16
    # held by nothing but friction
    assert model.neq == 0 and model.nmocap == 0 and model.ntendon == 0


def test_rotations_are_those_of_mujoco():
    mujoco, quats = load_mujoco(), np.random.default_rng(0).normal(size=(20, 4))
    quats /= np.linalg.norm(quats, axis=1, keepdims=True)
    expected = np.zeros((20, 9))
    for quat, mat in zip(quats, expected, strict=True):
        mujoco.mju_quat2Mat(mat, quat)
    np.testing.assert_allclose(_rotations(quats), expected.reshape(20, 3, 3), atol=1e-12)


def _homes():
    return np.stack([arm_near_home(np.random.default_rng(0), 0.0, mount=mount) for mount in DUAL])


def test_poses_of_hands_equal_those_of_mujoco():
    mujoco, scene = load_mujoco(), Scene(arms=DUAL)
    model = scene.compile()
    data = mujoco.MjData(model)
    arms = _homes() + np.random.default_rng(0).uniform(-0.3, 0.3, (2, 8))
    data.qpos[:] = arms.ravel()
    mujoco.mj_kinematics(model, data)
    pos, mat = HandMover(DUAL).where(arms[None])
    np.testing.assert_allclose(pos[0], data.site_xpos, atol=1e-9)
    np.testing.assert_allclose(mat[0].reshape(2, 9), data.site_xmat, atol=1e-9)


def test_at_home_hands_point_down_and_fingers_open_along_x():
    homes = _homes()
    pos, mat = HandMover(DUAL).where(homes[None])
    np.testing.assert_allclose(mat[0, :, :, 2], [[0, 0, -1]] * 2, atol=1e-4)
    np.testing.assert_allclose(np.abs(mat[0, :, :, 1]), [[1, 0, 0]] * 2, atol=1e-4)
    np.testing.assert_allclose(pos[0, :, 1], [0.28, -0.28], atol=1e-6)
    np.testing.assert_allclose(HandMover(DUAL).pointing_down, mat[0], atol=1e-4)


def _touching(hands_y):
    """Pairs of arms ("left" or "right") whose shapes overlap with the hands at these y."""
    mujoco, model = load_mujoco(), Scene(arms=DUAL).compile()
    mover, arms = HandMover(DUAL), _homes()
    for _ in range(60):
        pos, _ = mover.where(arms[None])
        move = np.clip(np.stack([-0.1 - pos[0, :, 0], hands_y - pos[0, :, 1], 0.1 - pos[0, :, 2]], axis=1), -0.02, 0.02)
        arms[:, :6] += mover.upright(arms[:, :7], arms, move)
    data = mujoco.MjData(model)
    data.qpos[:] = arms.ravel()
    mujoco.mj_forward(model, data)
    root = {i: model.body(model.body_rootid[i]).name.removesuffix("_base") for i in range(model.nbody)}
    return {frozenset(root[model.geom_bodyid[g]] for g in contact.geom) for contact in data.contact}


def test_arms_touch_each_other_but_not_themselves():
    assert _touching(np.array([0.2, -0.2])) == set()
    assert _touching(np.array([0.01, -0.01])) == {frozenset({"left", "right"})}


def test_two_arms_cannot_be_driven_through_each_other():
    env, _ = _tabletop(1, task="handover_d0", control_mode="delta_ee_pos", max_episode_steps=1000)
    inwards = np.array([0, -1, -0.2, -1, 0, 1, -0.2, -1.0])
    gap = []
    for _ in range(40):
        env.step(inwards[None, None])
        gap.append(env.situation().hands[0, LEFT, 1] - env.situation().hands[0, RIGHT, 1])
    # their hands are 4 cm wide
    assert gap[0] > 0.5 and 0.02 < min(gap) < 0.08


@pytest.mark.parametrize("mode", list(CONTROLS))
def test_the_first_half_of_an_action_moves_the_left_arm_only(mode):
    half = ENTRIES[mode]
    envs = [_tabletop(2, task="handover_d0", control_mode=mode)[0] for _ in range(2)]
    assert envs[0].spec.action_dim == 2 * half
    action = np.random.default_rng(0).uniform(-0.5, 0.5, (2, 1, 2 * half))
    other = action.copy()
    other[0, 0, :half] -= 0.4
    other[1, 0, half:] -= 0.4
    for _ in range(3):
        envs[0].step(action)
        envs[1].step(other)
    # bit-identical: [command, joints] of the left and right arm
    for one, two in zip(*(env.arms() for env in envs), strict=True):
        np.testing.assert_array_equal((one != two).any(axis=2), [[True, False], [False, True]])


def test_both_hands_follow_their_commands():
    env, _ = _tabletop(1, task="handover_d0", control_mode="delta_ee_pos", max_episode_steps=1000)
    before = env.situation().hands.copy()
    env.step(np.array([[[1, 0, 0, 0, 0, 0, 1, 0.0]]]))
    for _ in range(30):
        env.step(np.zeros((1, 1, 8)))
    np.testing.assert_allclose(env.situation().hands - before, [[[0.02, 0, 0], [0, 0, 0.02]]], atol=3e-3)


def test_layout_of_two_arms():
    # 29 of each arm, time; goal and its offset from both hands; 12 of each object and its offset from both hands
    assert len(observe.scales(arms=2)) == 58 + 1 + 9 and len(observe.scales(objects=2, arms=2)) == 58 + 1 + 9 + 2 * 18
    assert len(observe.scales(arms=2, world=False)) == 59
    layout = observe.layout(objects=1, arms=2)
    names = list(layout)
    assert names[0] == "left_joints" and names[8] == "right_joints" and names[16] == "time_left"
    assert names[17:21] == ["goal", "goal_from_left_hand", "goal_from_right_hand", "object0"]
    # the layout of one arm is unchanged
    assert list(observe.layout(objects=1))[:2] == ["joints", "fingers"] and len(observe.scales(objects=1)) == 51


def test_the_state_follows_its_layout():
    env, _ = _tabletop(4, task="lift_tray_d2", control_mode="delta_ee")
    for action in _actions(env, 10):
        state = env.step(action).observation["state"]
    layout, scales = observe.layout(objects=2, arms=2), observe.scales(objects=2, arms=2)
    now, (command, arms) = env.situation(), env.arms()
    expected = {
        "left_joints": arms[:, LEFT, :6],
        "right_fingers": arms[:, RIGHT, 6:],
        "right_commanded_joints": command[:, RIGHT, :6],
        "left_hand": now.hands[:, LEFT],
        "right_hand": now.hands[:, RIGHT],
        "goal_from_right_hand": now.goal - now.hands[:, RIGHT],
        "object1_from_left_hand": now.objects[:, 1] - now.hands[:, LEFT],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(state[:, layout[name]] / scales[layout[name]], values, atol=1e-6, err_msg=name)


def test_robots_with_one_and_with_two_arms_are_not_mixed():
    with pytest.raises(UserError, match=r"env.task .*: lift_d0 has 1 arm\(s\) and handover_d0 has 2;"):
        _tabletop(4, task=("lift_d0", "handover_d0"))


def test_tasks_for_two_arms_are_mixed_as_others_are():
    mixed, observation = _tabletop(4, task=("lift_tray_d0", "handover_d0"))
    assert observation["state"].shape == (4, 104) and (observation["state"][1::2, -18:] == 0).all()
    alone = [_tabletop(4, task=task)[0] for task in ("lift_tray_d0", "handover_d0")]
    for action in _actions(mixed, 8):
        reward = mixed.step(action).reward
        for row, env in enumerate(alone):
            np.testing.assert_array_equal(reward[row::2], env.step(action).reward[row::2])


def test_a_camera_that_the_robot_does_not_have_is_refused():
    with pytest.raises(UserError, match="env.cameras .*wrist, .* handover_d0 .* head, left_wrist, right_wrist"):
        _tabletop(1, task="handover_d0", cameras=("head", "wrist"))


def _after_expert_steps(task, steps, num_envs=4):
    """Robots after `steps` steps of their experts, in very long episodes."""
    env, _ = _tabletop(num_envs, 1000, task, control_mode="delta_ee")
    expert = Expert(env)
    for _ in range(steps):
        env.step(expert())
    return env, expert


def test_both_hands_hold_the_tray_until_they_open():
    env, _ = _after_expert_steps("lift_tray_d0", 50)
    score = find("lift_tray_d0").score
    assert (env.situation().objects[:, 0, 2] > 0.09).all() and score(env.situation())[1].all()
    still = np.zeros((4, 1, 14))
    for _ in range(50):
        env.step(still)
    # two seconds later both hands still hold it
    assert score(env.situation())[1].all()
    still[..., [6, 13]] = 1
    for _ in range(15):
        env.step(still)
    np.testing.assert_allclose(env.situation().objects[:, 0, 2], TRAY.half[2], atol=3e-3)
    reward, satisfied = score(env.situation())
    assert not satisfied.any() and (reward < 0.3).all()


def test_the_task_is_not_satisfied_with_one_hand():
    env, expert = _after_expert_steps("lift_tray_d0", 50)
    action = np.zeros((4, 1, 14))
    action[..., 13] = 1
    for _ in range(15):
        env.step(action)
    assert not find("lift_tray_d0").score(env.situation())[1].any()


def test_the_bar_changes_hands():
    env, expert = _after_expert_steps("handover_d0", 45)
    now = env.situation()
    # the left hand holds it in the air, the right one is open
    assert (now.objects[:, 0, 2] > 0.1).all() and (now.grips[:, LEFT] < 0.01).all()
    assert (now.grips[:, RIGHT] > 0.03).all() and not find("handover_d0").score(now)[1].any()
    for _ in range(50):
        env.step(expert())
    now = env.situation()
    assert (now.grips[:, RIGHT] < 0.01).all() and (now.grips[:, LEFT] > 0.03).all()
    assert find("handover_d0").score(now)[1].all()
    action = np.zeros((4, 1, 14))
    action[..., 13] = 1
    for _ in range(20):
        env.step(action)
    assert (env.situation().objects[:, 0, 2] < 0.03).all()


def _tray(hands, tray, cube, width=0.08, grip=0.04, tilt=0.0):
    """One robot; the tray turned by `tilt` radians about x."""
    quats = np.array([[[np.cos(tilt / 2), np.sin(tilt / 2), 0, 0], [1, 0, 0, 0]]])
    fingers = np.full((1, 2), width), np.full((1, 2), grip)
    return Situation(np.array([hands], float), np.zeros((1, 3)), *fingers, np.array([[tray, cube]], float), quats)


def test_lift_tray_reward_by_hand():
    score, held = find("lift_tray_d0").score, dict(width=0.036, grip=0.0)

    def at(z, x=0.0):
        return [[0, 0.105, z + 0.026], [0, -0.105, z + 0.026]], [0, 0, z], [x, 0, z + 0.028]

    far = score(_tray([[9, 9, 9]] * 2, [0, 0, 0.006], [0, 0, 0.034]))
    assert far[0][0] == pytest.approx(0, abs=1e-6) and not far[1][0]
    assert score(_tray(*at(0.006)))[0][0] == pytest.approx(0.15)
    assert score(_tray(*at(0.006), **held))[0][0] == pytest.approx(0.30)
    assert score(_tray(*at(0.056), **held))[0][0] == pytest.approx(0.50)
    top, done = score(_tray(*at(0.106), **held))
    assert top[0] == pytest.approx(1) and done[0]
    # without the cube, or tilted, lifting gives no reward
    for worse in (_tray(*at(0.106, x=0.3), **held), _tray(*at(0.106), **held, tilt=0.27)):
        reward, done = score(worse)
        assert reward[0] <= 0.30 and not done[0]


def _bar(left, right, bar, widths=(0.08, 0.08), grips=(0.04, 0.04)):
    quats = np.array([[[1.0, 0, 0, 0]]])
    hands, goal = np.array([[left, right]], float), np.array([[-0.1, 0, 0.16]])
    return Situation(hands, goal, np.array([widths]), np.array([grips]), np.array([[bar]], float), quats)


def test_handover_rewards_rise_from_stage_to_stage():
    score, task = find("handover_d0").score, find("handover_d0")
    lying, meeting, end = (-0.1, 0.35, 0.016), (-0.1, 0.0, 0.16), BAR_GRIP
    free, held = (0.08, 0.04), (0.032, 0.0)

    def both(left, right):
        return dict(widths=(left[0], right[0]), grips=(left[1], right[1]))

    stages = [
        _bar((-0.1, 0.28, 0.19), (-0.1, -0.28, 0.19), lying),
        _bar((-0.1, 0.35 + end, 0.016), (-0.1, -0.28, 0.19), lying),
        _bar((-0.1, 0.35 + end, 0.016), (-0.1, -0.28, 0.19), lying, **both(held, free)),
        _bar((-0.1, end, 0.16), (-0.1, -0.28, 0.19), meeting, **both(held, free)),
        _bar((-0.1, end, 0.16), (-0.1, -end, 0.16), meeting, **both(held, free)),
        _bar((-0.1, end, 0.16), (-0.1, -end, 0.16), meeting, **both(held, held)),
        _bar((-0.1, end, 0.16), (-0.1, -end, 0.16), meeting, **both(free, held)),
        _bar((-0.1, end, 0.20), (-0.1, -end, 0.16), meeting, **both(free, held)),
        _bar((-0.1, end, 0.23), (-0.1, -end, 0.16), meeting, **both(free, held)),
    ]
    rewards = np.array([score(now)[0][0] for now in stages])
    assert (np.diff(rewards) > 0.04).all() and rewards[-1] == 1 and rewards[0] < 0.1
    assert [bool(score(now)[1][0]) for now in stages] == [False] * 8 + [True]
    # held too low, or by a hand that has closed on nothing
    low = (-0.1, 0.0, 0.016 + task.height - 0.01)
    assert not score(_bar((-0.1, end, 0.3), (-0.1, -end, low[2]), low, **both(free, held)))[1][0]
    assert not score(_bar((-0.1, end, 0.3), (-0.1, -end, 0.16), meeting, **both(free, (0.0, 0.0))))[1][0]


@pytest.mark.parametrize("task", DUAL_TASKS)
def test_starts_are_in_their_ranges_and_use_them(task):
    env, _ = _tabletop(150, task=task)
    now, kind = env.situation(), find(task)
    area = kind.tray if "tray" in task else kind.bar
    x, y = now.objects[:, 0, 0], now.objects[:, 0, 1]
    assert (x >= area.x[0]).all() and (x <= area.x[1]).all() and (y >= area.y[0]).all() and (y <= area.y[1]).all()
    yaw = np.rad2deg(2 * np.arctan2(now.quats[:, 0, 3], now.quats[:, 0, 0]))
    assert np.abs(yaw).max() <= kind.yaw and np.ptp(yaw) >= 1.7 * kind.yaw
    if "tray" in task:
        for arm, mount in enumerate(DUAL):
            reach = replace(kind.reach, base=mount.base)
            assert all(reach.holds(point[:2]) for point in _handles(now)[:, arm])
    else:
        # the right hand, which reaches 53 cm, cannot touch it anywhere
        along = np.stack([-np.sin(np.deg2rad(yaw)), np.cos(np.deg2rad(yaw))], axis=1)
        ends = [now.objects[:, 0, :2] + side * BAR.half[1] * along for side in (-1, 1)]
        for share in np.linspace(0, 1, 9):
            point = share * ends[0] + (1 - share) * ends[1]
            assert (np.hypot(*(point - DUAL[RIGHT].base[:2]).T) > 0.529).all()


@pytest.mark.parametrize("name", ["lift_tray_d2", "handover_d2"])
def test_the_widest_distribution_covers_60_percent_of_the_reachable_area(name):
    task = find(name)
    area, everywhere = task.tray if "tray" in name else task.bar, Area((-0.5, 0.5), (-0.55, 0.55))
    whole, rng = replace(task, reach=REACHABLE), np.random.default_rng(0)
    reachable = inside = 0
    for _ in range(8000):
        point, yaw = everywhere.draw(rng), np.deg2rad(rng.uniform(-task.yaw, task.yaw))
        if whole.reaches(point, yaw):
            reachable += 1
            in_area = area.x[0] <= point[0] <= area.x[1] and area.y[0] <= point[1] <= area.y[1]
            inside += in_area and task.reaches(point, yaw)
    assert reachable > 300 and inside / reachable > 0.6


@pytest.mark.parametrize("task", ["lift_tray_d0", "handover_d0"])
def test_set_state_restores_held_objects(task):
    env, expert = _after_expert_steps(task, 40)
    state, actions = env.state(), _actions(env, 12)
    once = [env.step(action) for action in actions]
    env.set_state(state)
    for action, before in zip(actions, once, strict=True):
        again = env.step(action)
        np.testing.assert_array_equal(before.observation["state"], again.observation["state"])
        np.testing.assert_array_equal(before.reward, again.reward)


def test_number_of_threads_changes_nothing():
    envs = [_tabletop(4, 9, "handover_d2", threads=threads)[0] for threads in (1, 2)]
    for action in _actions(envs[0], 20):
        one, other = (env.step(action) for env in envs)
        np.testing.assert_array_equal(one.observation["state"], other.observation["state"])


@pytest.mark.parametrize("task", ["lift_tray_d0", "handover_d0"])
def test_two_armed_tasks_are_gymnasium_envs(task):
    register()
    env = gymnasium.make(f"sparring/{task}", control_mode="delta_ee")
    check_env(env.unwrapped, skip_render_check=True)
    assert env.action_space.shape == (14,)
    env.close()
