"""Domain randomisation: each part can be switched, is seeded, and is restored from a state."""

import numpy as np
import pytest

from sparring.envs.backend import EpisodeSeeds, drawn
from sparring.envs.configs import DOMAINS, TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.errors import UserError


def _env(num_envs=4, seed=0, max_episode_steps=6, **config):
    config = {"task": "push_d0", "threads": 1, "cameras": ("head",), "image_size": 32} | config
    env = Tabletop(TabletopConfig(**config), num_envs, max_episode_steps)
    return env, env.reset(EpisodeSeeds(seed, total_envs=num_envs))


def _random_steps(env, steps=10):
    rng, seen = np.random.default_rng(0), []
    for _ in range(steps):
        step = env.step(rng.uniform(-1, 1, (env.num_envs, 1, env.spec.action_dim)))
        seen.append((step.observation, step.reward))
    return seen


def test_all_names_every_switch_and_a_bare_name_is_a_list():
    assert TabletopConfig(domain_randomization="all").domain_randomization == DOMAINS
    assert TabletopConfig(domain_randomization="light").domain_randomization == ("light",)
    with pytest.raises(ValueError, match="camera_pose"):
        TabletopConfig(domain_randomization=("lights",))


@pytest.mark.parametrize("switch", ["appearance", "background", "light", "camera_pose"])
def test_an_appearance_changes_the_image_and_nothing_else(switch):
    (plain, before), (varied, after) = _env(), _env(domain_randomization=(switch,))
    np.testing.assert_array_equal(before["state"], after["state"])
    differs = (before["image/head"] != after["image/head"]).any(axis=(1, 2, 3))
    assert differs.all()
    # each robot has its own
    assert len({image.tobytes() for image in after["image/head"]}) == 4
    for (one, reward), (other, same) in zip(_random_steps(plain), _random_steps(varied), strict=True):
        np.testing.assert_array_equal(one["state"], other["state"])
        np.testing.assert_array_equal(reward, same)


def test_appearances_change_between_episodes_and_not_within_one():
    env, first = _env(task="reach_d0", domain_randomization=("background",), max_episode_steps=3)
    corner = [first["image/head"][:, :, 0, 0]]
    corner += [observation["image/head"][:, :, 0, 0] for observation, _ in _random_steps(env, 4)]
    np.testing.assert_array_equal(corner[0], corner[2])
    assert (corner[2] != corner[3]).any(axis=1).all()


def test_friction_changes_how_a_cube_slides_and_not_the_initial_state():
    def travel(**config):
        env, seen = _env(2, task="push_d0", cameras=(), max_episode_steps=1000, **config)
        start = env.situation().objects[:, 0].copy()
        # an initial velocity, then no contact
        env._world._groups[0].physics.state[:, 1 + env._world._groups[0].physics.model.nq + 8] = 1.0
        for _ in range(20):
            env.step(np.zeros((2, 1, env.spec.action_dim)))
        return seen["state"], np.linalg.norm(env.situation().objects[:, 0] - start, axis=1)

    (plain_state, plain), (state, varied) = travel(), travel(domain_randomization=("friction",))
    np.testing.assert_array_equal(plain_state, state)
    # v^2 / (2 mu g) = 8.5 cm at the usual 0.6
    assert plain == pytest.approx(0.085, abs=0.02) and (np.abs(varied / plain - 1) > 0.02).all()
    assert (varied < plain / 0.6).all() and (varied > plain / 1.5).all()


def test_clutter_is_visible_and_changes_no_initial_state():
    (_, before), (env, after) = _env(), _env(domain_randomization=("clutter",))
    np.testing.assert_array_equal(before["state"], after["state"])
    assert (before["image/head"] != after["image/head"]).any(axis=(1, 2, 3)).all()
    # 3 free bodies in addition to the cube
    assert env._world._groups[0].physics.model.nq == 8 + 4 * 7


@pytest.mark.parametrize("cameras", [(), ("head",)])
def test_all_domains_together_replay_from_a_saved_state(cameras):
    kwargs = {"domain_randomization": "all", "task": ("push_d0", "stack_d0"), "cameras": cameras}
    env, _ = _env(**kwargs)
    _random_steps(env, 4)
    state, later = env.state(), _random_steps(env, 8)
    other, _ = _env(seed=5, **kwargs)
    other.set_state(state)
    for (one, reward), (two, same) in zip(later, _random_steps(other, 8), strict=True):
        np.testing.assert_array_equal(reward, same)
        for name in one:
            np.testing.assert_array_equal(one[name], two[name])


def test_the_noise_screen_changes_each_step_and_is_reproducible():
    def screen(**config):
        env, first = _env(2, task="explore", image_size=64, **config)
        still = [env.step(np.zeros((2, 1, 7))).observation["image/head"] for _ in range(3)]
        return [first["image/head"], *still]

    noisy, again, dark = screen(noise_screen=True), screen(noise_screen=True), screen()
    for one, two in zip(noisy, again, strict=True):
        np.testing.assert_array_equal(one, two)
    changed = [(one != two).mean() for one, two in zip(noisy[1:-1], noisy[2:], strict=True)]
    quiet = [(one != two).mean() for one, two in zip(dark[1:-1], dark[2:], strict=True)]
    assert min(changed) > 0.005 and min(changed) > 3 * max(quiet)


def test_frames_show_the_current_noise_and_are_restored_with_the_state():
    env, _ = _env(2, task="explore", noise_screen=True, domain_randomization=("light",))
    env.record([0])
    frames = [drawn(frame) for frame in env.step(np.zeros((2, 3, 7))).frames[0]]
    np.testing.assert_array_equal(frames[-1], env.render(0))
    assert (frames[0] != frames[1]).mean() > 0.005 and (frames[1] != frames[2]).mean() > 0.005
    other, _ = _env(2, seed=3, task="explore", noise_screen=True, domain_randomization=("light",))
    other.set_state(env.state())
    np.testing.assert_array_equal(other.render(1), env.render(1))


@pytest.mark.parametrize("switch", ["light", "camera_pose", "background"])
def test_clutter_does_not_change_the_other_domains(switch):
    looks = []
    for switches in ((switch,), (switch, "clutter")):
        env, _ = _env(domain_randomization=switches, task="reach_d0")
        look = env._world._groups[0].appearance
        looks.append((look.sun, look.light, look.camera_pos, look.camera_turn, look.background))
    for one, two in zip(*looks, strict=True):
        np.testing.assert_array_equal(one, two)


def test_clutter_does_not_move_the_camera():
    one, two = (
        _env(task="reach_d0", domain_randomization=s)[0]._world._groups[0].physics.model for s in ((), "clutter")
    )
    assert one.cam_fovy[0] == two.cam_fovy[0] and (one.cam_quat[0] == two.cam_quat[0]).all()


def test_explore_has_no_success_to_report():
    assert not _env(task="explore")[0].spec.reports_success
    assert _env(task=("explore", "push_d0"))[0].spec.reports_success


def test_a_state_of_another_task_is_refused():
    with pytest.raises(UserError, match=r"other tasks than env.task=\['lift_d0'\]"):
        _env(task="lift_d0")[0].set_state(_env(task="push_d0")[0].state())


def test_the_observation_covers_tasks_without_a_robot():
    alone, _ = _env(1, task=("lift_d0", "stack_d0"), cameras=())
    both, _ = _env(2, task=("lift_d0", "stack_d0"), cameras=())
    assert alone.spec.observation == both.spec.observation


def test_the_screen_needs_explore_and_depth_needs_cameras():
    with pytest.raises(UserError, match="only the task explore has a screen"):
        _env(noise_screen=True)
    with pytest.raises(UserError, match=r"env.cameras=\[\].* env.depth and env.points"):
        _env(cameras=(), depth=True, points=16)


def test_depth_segmentation_and_points_are_observations():
    env, seen = _env(2, cameras=("head", "wrist"), depth=True, segmentation=True, points=64)
    assert env.spec.observation["depth/head"] == ((1, 32, 32), "float32")
    assert {name: (value.shape[1:], value.dtype.name) for name, value in seen.items()} == env.spec.observation
    # the head camera is about a metre away, and the red cube is object 3
    assert 0.5 < np.median(seen["depth/head"]) < 2 and (seen["segmentation/wrist"] == 3).any()
    # the arm, the cube and the disc: above the table and within reach
    assert (seen["points"][..., 2] > 0).all() and (seen["points"][..., 3:] <= 1).all()
    cube, points = env.situation().objects[:, 0], seen["points"][..., :3]
    assert (np.linalg.norm(points - cube[:, None], axis=2).min(axis=1) < 0.03).all()
