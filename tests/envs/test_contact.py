"""`Step.contact`: which robots touched an object; and the segmentation label of the screen."""

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


def test_contact_is_reported_once_the_expert_grips_the_cube():
    env = table("lift_d0")
    expert, contact, distance = Expert(env), [], []
    for _ in range(40):
        now = env.situation()
        distance.append(np.linalg.norm(now.hand - now.objects[:, 0], axis=1))
        contact.append(env.step(expert()).contact)
    contact, distance = np.array(contact), np.array(distance)
    assert not contact[distance > 0.1].any()
    # once the cube is up, nothing but the fingers holds it
    assert contact[-10:].all() and env.situation().objects[:, 0, 2].min() > 0.06
    env.close()


def test_objects_that_touch_each_other_or_the_table_are_no_contact():
    env = table("stack_d0")
    still = np.zeros((2, 1, env.spec.action_dim))
    # the cubes fall onto the table in the first steps; the hand is above them
    assert not any(env.step(still).contact.any() for _ in range(10))
    env.close()


def test_contact_covers_all_steps_of_a_chunk_and_is_per_robot():
    one, chunked = table("lift_d0"), table("lift_d0")
    expert, actions, contact = Expert(one), [], []
    for _ in range(40):
        action = expert()
        # the second robot stays where it is
        action[1] = 0
        actions.append(action)
        contact.append(one.step(action).contact)
    steps = np.array(contact).reshape(5, 8, 2)
    chunks = np.concatenate(actions, axis=1)
    whole = [chunked.step(chunks[:, 8 * k : 8 * k + 8]).contact for k in range(5)]
    assert np.array_equal(np.array(whole), steps.any(axis=1))
    # a chunk in which the touch began: not all of its steps
    assert any(0 < part[:, 0].sum() < 8 for part in steps)
    assert not steps[:, :, 1].any() and steps[:, :, 0].any()


def test_contact_of_mixed_scenes_is_per_robot():
    alone, mixed = table("lift_d0", 1), table(("lift_d0", "reach_d0"), 2)
    expert = Expert(mixed)
    contact = []
    for _ in range(40):
        action = expert()
        contact.append(mixed.step(action).contact)
        assert contact[-1][0] == alone.step(action[:1]).contact[0]
    # reach has nothing to touch
    assert np.array(contact).any(axis=0).tolist() == [True, False]


@pytest.mark.parametrize("task", ["handover_d0", "explore"])
def test_each_pair_of_arm_and_object_has_a_sensor(task):
    env = table(task, 1)
    things, arms = len(env.robot_tasks()[0].scene.objects), len(env.mounts)
    assert env._world._groups[0].physics.model.nsensordata == things * arms
    env.close()


def test_a_backend_without_contact_reports_none():
    env = counting_env()
    root = env.reset(0)
    env.step(root.set("action", root["observation", "state"][:, :1, None]))
    assert env.last.contact.tolist() == [False, False]


def test_the_screen_has_its_own_label():
    config = TabletopConfig(task="explore", cameras=("head",), segmentation=True, noise_screen=True, threads=1)
    env = make_env(config, 1)
    first = env.reset(0)["observation"]
    labels, image = first["segmentation", "head"][0, 0].numpy(), first["image", "head"][0].numpy()
    screen = labels == SCREEN_LABEL
    assert 20 < screen.sum() < 400
    # noise: its pixels vary strongly, those of the table do not
    assert image[:, screen].std() > 3 * image[:, labels == 1].std(axis=1).mean() > 0
    assert set(np.unique(labels)) <= {0, 1, 2, *range(OBJECTS, OBJECTS + 6), SCREEN_LABEL}
    env.close()
