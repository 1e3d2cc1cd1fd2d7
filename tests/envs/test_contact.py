"""`Step.contact`: who touched an object, and which pixels are the screen's."""

import numpy as np
import pytest
from doubles import counting_env

from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.env import make_env
from sparring.envs.tabletop.backend import Tabletop
from sparring.envs.tabletop.experts import Expert
from sparring.envs.tabletop.render.renderer import OBJECTS, SCREEN_LABEL


def table(task, num_envs=2, **settings) -> Tabletop:
    env = Tabletop(TabletopConfig(task=task, control_mode="delta_ee_pos", threads=1, **settings), num_envs)
    env.reset(EpisodeSeeds(0, total_envs=num_envs))
    return env


def test_an_expert_touches_the_cube_from_when_it_grips_it_on():
    env = table("lift_d0")
    expert, told, apart = Expert(env), [], []
    for _ in range(40):
        now = env.situation()
        apart.append(np.linalg.norm(now.hand - now.objects[:, 0], axis=1))
        told.append(env.step(expert()).contact)
    told, apart = np.array(told), np.array(apart)
    assert not told[apart > 0.1].any()
    # once the cube is up, nothing but the fingers holds it
    assert told[-10:].all() and env.situation().objects[:, 0, 2].min() > 0.06
    env.close()


def test_things_that_touch_each_other_or_the_table_are_no_contact():
    env = table("stack_d0")
    still = np.zeros((2, 1, env.spec.action_dim))
    # the cubes fall onto the table in the first steps; the hand hangs above them
    assert not any(env.step(still).contact.any() for _ in range(10))
    env.close()


def test_a_touch_anywhere_in_the_chunk_counts_and_each_robot_has_its_own():
    one, chunked = table("lift_d0"), table("lift_d0")
    expert, actions, told = Expert(one), [], []
    for _ in range(40):
        action = expert()
        # the second robot stays where it is
        action[1] = 0
        actions.append(action)
        told.append(one.step(action).contact)
    steps = np.array(told).reshape(5, 8, 2)
    chunks = np.concatenate(actions, axis=1)
    whole = [chunked.step(chunks[:, 8 * k : 8 * k + 8]).contact for k in range(5)]
    assert np.array_equal(np.array(whole), steps.any(axis=1))
    # a chunk in which the touch began: not all of its steps
    assert any(0 < part[:, 0].sum() < 8 for part in steps)
    assert not steps[:, :, 1].any() and steps[:, :, 0].any()


def test_robots_of_different_scenes_are_told_apart():
    alone, mixed = table("lift_d0", 1), table(("lift_d0", "reach_d0"), 2)
    expert = Expert(mixed)
    told = []
    for _ in range(40):
        action = expert()
        told.append(mixed.step(action).contact)
        assert told[-1][0] == alone.step(action[:1]).contact[0]
    # reach has nothing to touch
    assert np.array(told).any(axis=0).tolist() == [True, False]


@pytest.mark.parametrize("task", ["handover_d0", "explore"])
def test_every_arm_and_every_thing_has_a_sensor(task):
    env = table(task, 1)
    things, arms = len(env.robot_tasks()[0].scene.objects), len(env.mounts)
    assert env._world._groups[0].physics.model.nsensordata == things * arms
    env.close()


def test_a_backend_that_does_not_tell_tells_of_no_contact():
    env = counting_env()
    root = env.reset(0)
    env.step(root.set("action", root["observation", "state"][:, :1, None]))
    assert env.last.contact.tolist() == [False, False]


def test_the_screen_has_a_number_of_its_own():
    config = TabletopConfig(task="explore", cameras=("head",), segmentation=True, noise_screen=True, threads=1)
    env = make_env(config, 1)
    first = env.reset(0)["observation"]
    seen, picture = first["segmentation", "head"][0, 0].numpy(), first["image", "head"][0].numpy()
    screen = seen == SCREEN_LABEL
    assert 20 < screen.sum() < 400
    # static: its pixels differ wildly, those of the table do not
    assert picture[:, screen].std() > 3 * picture[:, seen == 1].std(axis=1).mean() > 0
    assert set(np.unique(seen)) <= {0, 1, 2, *range(OBJECTS, OBJECTS + 6), SCREEN_LABEL}
    env.close()
