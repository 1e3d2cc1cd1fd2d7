"""Buttons, drawers, toys and clutter: objects that are more than a box."""

from dataclasses import replace

import numpy as np
import pytest

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop import observe
from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.envs.tabletop.scene import Scene
from sparring.envs.tabletop.tasks import mechanisms as drawer
from sparring.envs.tabletop.tasks import registry as tasks
from sparring.envs.tabletop.tasks.base import Situation
from sparring.envs.tabletop.tasks.explore import TOYS, _footprint, _Zone, place_clutter, with_clutter
from sparring.envs.tabletop.tasks.manipulate import REACHABLE
from sparring.envs.tabletop.tasks.mechanisms import _cap_top, _knob_now
from sparring.envs.tabletop.tasks.registry import find
from sparring.errors import UserError

FIXTURES = [f"{name}_d{d}" for name in ("drawer", "button") for d in range(3)]


def _tabletop(task, num_envs=4, max_episode_steps=None, seed=0, **config):
    env = Tabletop(
        TabletopConfig(**{"threads": 1, "control_mode": "delta_ee_pos", "task": task} | config),
        num_envs,
        max_episode_steps,
    )
    return env, env.reset(EpisodeSeeds(seed, total_envs=num_envs))


def _go(env, target, grip, steps):
    """Move all hands towards points `[N, 3]`."""
    for _ in range(steps):
        move = np.clip(0.7 * (target - env.situation().hand) / 0.02, -1, 1)
        step = env.step(np.concatenate([move, np.full((env.num_envs, 1), grip)], axis=1)[:, None])
    return step


def _nq(env):
    return env._world._groups[0].physics.model.nq


def _idle(env, steps):
    for _ in range(steps):
        step = env.step(np.zeros((env.num_envs, 1, env.spec.action_dim)))
    return step


def _block(state, name, objects=1):
    place = observe.layout(objects=objects, mechanisms=1)[name]
    return state[:, place] / observe.scales(objects=objects, mechanisms=1)[place]


def test_a_button_is_pressed_by_the_hand_and_springs_back():
    env, _ = _tabletop("button_d1", 8, max_episode_steps=1000)
    task, at_rest = find("button_d1"), _cap_top(env.situation())
    np.testing.assert_allclose(env.situation().mechanisms, 0, atol=1e-9)
    _go(env, at_rest + [0, 0, 0.04], -1, 25)
    assert not task.score(env.situation())[1].any()
    # the fingertips are 7 mm below the hand's site: pressing it 4 mm down is not enough
    _go(env, at_rest + [0, 0, 0.007 - 0.004], -1, 12)
    pressed = env.situation().mechanisms[:, 0]
    assert (pressed > 0.1).all() and (pressed < 0.6).all()
    assert not task.score(env.situation())[1].any()
    _go(env, at_rest + [0, 0, 0.007 - 0.013], -1, 12)
    reward, satisfied = task.score(env.situation())
    assert satisfied.all() and (reward == 1).all()
    # the finger is where the cap is
    np.testing.assert_allclose(env.situation().hand[:, 2] - _cap_top(env.situation())[:, 2], 0.007, atol=1.5e-3)
    _go(env, at_rest + [0, 0, 0.05], -1, 15)
    np.testing.assert_allclose(env.situation().mechanisms, 0, atol=0.02)
    # the box did not move
    np.testing.assert_allclose(_cap_top(env.situation()), at_rest, atol=1e-3)


@pytest.mark.parametrize("opening", [0.0, 0.3, 0.8, 1.0])
def test_a_drawer_stays_where_it_is_left(opening):
    env, _ = _tabletop("drawer_d2", 4, max_episode_steps=1000)
    for row in range(4):
        start = find("drawer_d2").start(np.random.default_rng(row))
        env._world.place(row, start._replace(mechanisms=np.array([opening])), np.empty((0, 7)))
    before = env.situation()
    _idle(env, 50)
    now = env.situation()
    np.testing.assert_allclose(now.mechanisms, opening, atol=0.005)
    np.testing.assert_allclose(now.mechanism_speeds, 0, atol=1e-3)
    np.testing.assert_allclose(now.objects, before.objects, atol=5e-4)
    assert (find("drawer_d2").score(now)[1] == (opening >= 0.7)).all()


def test_the_drawer_opens_with_a_closed_hand_on_the_knob_only():
    env, _ = _tabletop("drawer_d0", 4, max_episode_steps=1000)
    knob = _knob_now(env.situation())
    _go(env, knob + [0, 0, 0.06], 1, 20)
    _go(env, knob, 1, 8)
    # open fingers around the knob do not touch it
    np.testing.assert_allclose(env.situation().mechanisms, 0, atol=1e-3)
    _go(env, knob, -1, 6)
    _go(env, env.situation().goal, -1, 20)
    assert (env.situation().mechanisms > 0.75).all()
    # the knob moved with the hand
    np.testing.assert_allclose(_knob_now(env.situation()), env.situation().hand, atol=8e-3)
    _go(env, env.situation().goal, 1, 8)
    _go(env, env.situation().goal + [0, 0, 0.08], 1, 12)
    assert (env.situation().mechanisms > 0.75).all() and find("drawer_d0").score(env.situation())[1].all()


def test_the_path_of_the_knob_is_in_reach_and_drawers_face_all_directions():
    task, yaws = find("drawer_d2"), []
    within = replace(REACHABLE, near=REACHABLE.near - 1e-3, far=REACHABLE.far + 1e-3, degrees=REACHABLE.degrees + 0.5)
    for seed in range(500):
        start = task.start(np.random.default_rng(seed))
        cabinet = np.repeat(start.objects, 21, axis=0)
        path = drawer._knobs(cabinet, np.linspace(0, drawer._DRAWER_TRAVEL, 21))
        assert all(within.holds(point[:2]) for point in path)
        assert np.abs(start.objects[0, :2]).max() < 0.5
        yaws.append(2 * np.arctan2(start.objects[0, 6], start.objects[0, 3]))
    counts, _ = np.histogram(np.mod(yaws, 2 * np.pi), 8, (0, 2 * np.pi))
    assert counts.min() > 20


def test_positions_of_knobs_equal_those_of_the_model():
    env, _ = _tabletop("drawer_d2", 3)
    qpos = env._world._groups[0].physics.qpos(np.arange(3))
    qpos[:, -1] = [0.0, 0.04, 0.1]
    group = env._world._groups[0]
    group.physics.state[:, 1 : 1 + qpos.shape[1]] = qpos
    kinematics, model = Kinematics(group.physics.model), group.physics.model
    # the grip is a little below the top of the knob, on its axis
    pos, _ = kinematics(qpos).frames(kinematics.geoms.pick([model.geom("knob").id]))
    np.testing.assert_allclose(pos[:, 0, :2], _knob_now(env.situation())[:, :2], atol=1e-9)


@pytest.mark.parametrize("task", FIXTURES)
def test_starts_are_unsolved_and_rewards_are_in_range(task):
    env, _ = _tabletop(task, 64)
    now, kind = env.situation(), find(task)
    reward, satisfied = kind.score(now)
    assert not satisfied.any() and (reward >= 0).all() and (reward < 0.45).all()
    for seed in range(3):
        rng = np.random.default_rng(seed)
        anywhere = Situation(*(rng.uniform(-0.5, 0.5, values.shape) for values in now))
        reward, satisfied = kind.score(anywhere._replace(mechanisms=rng.uniform(-0.1, 1.1, (64, 1))))
        assert reward.min() >= 0 and (reward[satisfied] == 1).all() and (reward[~satisfied] < 0.9).all()


def test_the_reward_grows_with_the_opening():
    for task in ("drawer_d0", "button_d0"):
        env, _ = _tabletop(task, 5)
        moved = np.array([[0.0], [0.2], [0.4], [0.6], [0.72]])
        # five copies of the first robot, so that the hand is equally far away
        same = Situation(*(np.repeat(values[:1], 5, axis=0) for values in env.situation()))
        reward, satisfied = find(task).score(same._replace(mechanisms=moved))
        assert satisfied.tolist() == [False] * 4 + [True]
        assert (np.diff(reward) > 0.01).all()


@pytest.mark.parametrize("task", ["drawer_d0", "button_d0"])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_experts_succeed(task, noise):
    env = Tabletop(TabletopConfig(task=task, control_mode="delta_ee_pos", threads=1, reward="sparse"), 20)
    env.reset(EpisodeSeeds(5, "eval", total_envs=20))
    expert = Expert(env, noise)
    for _ in range(env.spec.max_episode_steps):
        step = env.step(expert())
    assert step.success.sum() >= 18 and (step.reward[:, 0] == step.success).all()


@pytest.mark.parametrize(
    "task", ["drawer_d2", "button_d2", "explore", ("button_d0", "reach_d0", "drawer_d1", "explore")]
)
def test_restored_states_replay_bit_identically(task):
    env, _ = _tabletop(task, 4, max_episode_steps=12)
    actions = np.random.default_rng(1).uniform(-1, 1, (30, 4, 1, 4))
    for action in actions[:5]:
        env.step(action)
    state = env.state()
    first = [env.step(action) for action in actions[5:]]
    other, _ = _tabletop(task, 4, max_episode_steps=12, seed=9, threads=2)
    other.set_state(state)
    for action, before in zip(actions[5:], first, strict=True):
        again = other.step(action)
        np.testing.assert_array_equal(again.observation["state"], before.observation["state"])
        np.testing.assert_array_equal(again.reward, before.reward)


def test_observations_have_the_position_and_speed_of_mechanisms():
    env, seen = _tabletop("button_d0", 3, max_episode_steps=200)
    assert seen["state"].shape[1] == 30 + 6 + 15 + 2
    top = _cap_top(env.situation())
    _go(env, top + [0, 0, 0.03], -1, 20)
    step = _go(env, top, -1, 3)
    now = env.situation()
    assert (now.mechanisms > 0.05).all()
    np.testing.assert_allclose(_block(step.observation["state"], "mechanism0"), now.mechanisms, atol=1e-6)
    np.testing.assert_allclose(_block(step.observation["state"], "mechanism0_speed"), now.mechanism_speeds, atol=1e-5)
    _, seen = _tabletop("button_d0", 3, object_state="hidden")
    assert seen["state"].shape[1] == 30


def test_tasks_with_and_without_mechanisms_can_be_mixed():
    env, seen = _tabletop(("lift_d0", "drawer_d1", "button_d0", "reach_d0"), 4)
    state = seen["state"]
    assert state.shape[1] == 30 + 6 + 15 + 2 and env.situation().mechanisms.shape == (4, 1)
    _, own = _tabletop("drawer_d1", 4)
    np.testing.assert_array_equal(state[1], own["state"][1])
    start = find("drawer_d1").start(np.random.default_rng(0))
    env._world.place(1, start._replace(mechanisms=np.array([0.5])), np.empty((0, 7)))
    np.testing.assert_array_equal(env.situation().mechanisms[:, 0], [0, 0.5, 0, 0])


def test_toys_lie_apart_in_reach_and_stay():
    env, _ = _tabletop("explore", 40, max_episode_steps=100)
    start = env.situation().objects[:, :, :2]
    radii = np.array([_footprint(toy) for toy in TOYS])
    gaps = np.linalg.norm(start[:, :, None] - start[:, None], axis=3) - radii[:, None] - radii
    assert gaps[:, ~np.eye(6, dtype=bool)].min() >= 0.01
    # spread over the reachable table
    assert np.ptp(start[:, :, 1]) > 0.8 and np.ptp(start[:, :, 0]) > 0.4
    _idle(env, 50)
    now = env.situation()
    np.testing.assert_allclose(now.objects[:, :, :2], start, atol=1e-3)
    np.testing.assert_allclose(now.objects[:, :, 2], np.broadcast_to([toy.half[2] for toy in TOYS], (40, 6)), atol=1e-3)


def test_toys_start_just_above_the_table_and_do_not_jump():
    env, _ = _tabletop("explore", 100)
    half, start = np.array([toy.half[2] for toy in TOYS]), env.situation().objects[:, :, 2]
    np.testing.assert_allclose(start, np.broadcast_to(half + 1e-4, start.shape), atol=1e-12)
    # in exact contact with the table, the ellipsoid would move by 4 mm in the first step
    _idle(env, 1)
    np.testing.assert_allclose(env.situation().objects[:, :, 2], start, atol=6e-4)


def test_all_tasks_report_success_except_explore():
    assert find("explore").reports_success is False
    for task in ("push_d0", "lift_d0", "stack_d0", "drawer_d0", "button_d0", "handover_d0", "lift_tray_d0"):
        assert find(task).reports_success is True


def test_explore_has_no_reward_and_no_success():
    env, _ = _tabletop("explore", 4)
    total, done = 0, np.zeros(4, bool)
    for action in np.random.default_rng(0).uniform(-1, 1, (env.spec.max_episode_steps, 4, 1, 4)):
        step = env.step(action)
        total, done = total + step.reward.sum(), done | step.success
    assert env.spec.max_episode_steps == 100 and step.truncated.all() and total == 0 and not done.any()
    with pytest.raises(UserError, match="no expert for explore"):
        Expert(env)


@pytest.mark.parametrize(("task", "there"), [("explore", True), ("drawer_d0", False), ("lift_d0", False)])
def test_only_explore_has_a_screen(task, there):
    model = find(task).scene.compile()
    assert ("screen" in [model.geom(g).name for g in range(model.ngeom)]) == there


def _cluttered(monkeypatch, task, count):
    monkeypatch.setitem(tasks.TASKS, task, replace(find(task), scene=with_clutter(find(task).scene, count)))


@pytest.mark.parametrize("task", ["push_d2", "stack_d2", "drawer_d2", "reach_d1"])
def test_clutter_does_not_change_the_task(monkeypatch, task):
    plain, seen = _tabletop(task, 6)
    _cluttered(monkeypatch, task, 3)
    env, with_toys = _tabletop(task, 6)
    # same initial state, phrasing and observations
    for key, value in seen.items():
        np.testing.assert_array_equal(with_toys[key], value)
    assert env.spec.observation == plain.spec.observation
    # also one step later: the clutter touches nothing
    np.testing.assert_allclose(_idle(env, 1).observation["state"], _idle(plain, 1).observation["state"], atol=2e-3)
    assert _nq(env) == _nq(plain) + 21


@pytest.mark.parametrize("task", ["push_d2", "stack_d2", "drawer_d2", "button_d2"])
def test_clutter_keeps_away_from_the_task(task):
    scene = with_clutter(find(task).scene, 3)
    distances = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        start = find(task).start(rng)
        toys = place_clutter(rng, scene, start)[:, :2]
        way = _Zone(start.objects[0, :2], start.goal[:2], 0.0)
        distances += [way.room(toy) for toy in toys]
        others = [np.hypot(*(a - b)) for k, a in enumerate(toys) for b in toys[:k]]
        assert min(others) > 0.03
    assert min(distances) >= 0.09


def test_experts_succeed_with_clutter(monkeypatch):
    for task in ("lift_d1", "drawer_d1"):
        _cluttered(monkeypatch, task, 4)
        env = Tabletop(TabletopConfig(task=task, control_mode="delta_ee_pos", threads=1), 20)
        env.reset(EpisodeSeeds(2, "eval", total_envs=20))
        expert = Expert(env)
        for _ in range(env.spec.max_episode_steps):
            step = env.step(expert())
        assert step.success.mean() >= 0.9


def test_clutter_has_its_own_names_and_colours():
    scene = with_clutter(Scene(), 8)
    assert [thing.name for thing in scene.clutter] == [f"clutter{k}" for k in range(8)]
    assert scene.compile().nq == 8 + 7 * 8
    for toy in TOYS:
        red, green, blue = toy.rgb
        # no channel stands out alone, as it does in the tasks' red, blue and green
        assert not any(c > 1.6 * max(a, b) for c, a, b in ((red, green, blue), (green, red, blue), (blue, red, green)))
