"""Point clouds in demonstrations: recorded as observed, read completely or in part."""

import json

import numpy as np
import pytest

from sparring.data import statistics
from sparring.data.demonstrations import Demonstrations
from sparring.demos.plan import Plan
from sparring.demos.record import record
from sparring.demos.show import summary
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.errors import UserError

ENV = TabletopConfig(task="lift_d0", cameras=("head",), image_size=32, points=24, object_state="hidden", threads=1)
POINTS = "observation.points"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Three episodes of four steps."""
    output = tmp_path_factory.mktemp("points") / "lift"
    record(Plan(ENV, max_episode_steps=4, keep_failures=True), 3, output, quiet=True)
    return output


@pytest.mark.parametrize("points", [None, 24, 7])
def test_recorded_clouds_equal_the_observations(recorded, points):
    """Fewer points than recorded equal those of an env with fewer points."""
    demos, count = Demonstrations(recorded, points=points), points or 24
    env = Tabletop(ENV.model_copy(update={"points": count}), 1, 4)
    for episode in range(3):
        observation, td = env.reset(EpisodeSeeds(0, first_env=episode)), demos.episode(episode)
        assert td["observation", "points"].shape == (4, count, 6)
        for t in range(4):
            assert np.array_equal(td["observation", "points"][t], observation["points"][0])
            observation = env.step(td["action"][t].numpy()[None]).observation
    assert demos.points == count and demos.numbers(POINTS).shape == (12, count, 6)
    env.close()


def test_points_can_be_left_out(recorded):
    assert "points" not in Demonstrations(recorded, points=0).episode(0)["observation"]


def test_the_files_describe_the_points(recorded):
    info = json.loads((recorded / "meta/info.json").read_text())
    assert info["features"][POINTS] == {"dtype": "float32", "shape": [24, 6], "names": ["points", "x_y_z_r_g_b"]}
    assert "points     24 a step: x, y, z, r, g, b" in list(summary(Demonstrations(recorded)))
    statistics, clouds = json.loads((recorded / "meta/stats.json").read_text())[POINTS], Demonstrations(recorded)
    every_point = clouds.numbers(POINTS).reshape(-1, 6)
    np.testing.assert_allclose(statistics["mean"], every_point.mean(0), rtol=1e-5)
    np.testing.assert_allclose(statistics["max"], every_point.max(0))
    assert statistics["count"] == [12]


def test_statistics_of_many_clouds_keep_the_extremes():
    clouds = np.random.default_rng(0).uniform(size=(5003, 2, 3)).astype(np.float32)
    clouds[4001, 1] = 9, -9, 9
    found = statistics.point_statistics(clouds)
    assert (found["max"][0], found["min"][1], found["count"][0]) == (9, -9, 5003)
    np.testing.assert_allclose(found["q50"], 0.5, atol=0.05)


def test_more_points_than_recorded_are_refused(recorded):
    with pytest.raises(UserError, match="points per step: expected 25, found 24"):
        Demonstrations(recorded, points=25)


def test_a_dataset_without_points_is_refused(tmp_path):
    record(Plan(ENV.model_copy(update={"points": 0}), max_episode_steps=2, keep_failures=True), 1, tmp_path, quiet=True)
    with pytest.raises(UserError, match="points per step: expected 24, found none"):
        Demonstrations(tmp_path, points=24)
    assert Demonstrations(tmp_path).points == 0
