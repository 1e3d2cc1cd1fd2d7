"""Meta-World through its adapter: observations, experts, success, cameras and exact states."""

import warnings

import numpy as np
import pytest

from sparring.check.spaces import gymnasium_findings
from sparring.cli.main import main
from sparring.contract import text_of
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.gym_batch import SerialBackend
from sparring.envs.sims.metaworld import INSTRUCTIONS, SETS
from sparring.envs.sims.mujoco import Views

pytest.importorskip("metaworld", reason="needs Meta-World: docs/simulators.md")


def robot(name, **kwargs) -> GymRobot:
    return GymRobot(GymConfig(name=f"metaworld:{name}", kwargs=kwargs))


def play(robot, steps):
    """(reward, success, state) of each step of the expert."""
    found, reward = [], np.zeros(1, np.float32)
    for _ in range(steps):
        _, _, _, success = robot.step([robot.env.expert_action()], reward)
        found.append((float(reward[0]), success, robot._observation["state"].tolist()))
    return found


def test_every_task_of_meta_world_has_an_instruction():
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS, MT10_V3

    assert set(INSTRUCTIONS) == set(ALL_V3_ENVIRONMENTS) == set(SETS["mt50"]) and set(SETS["mt10"]) == set(MT10_V3)
    assert len(set(INSTRUCTIONS.values())) == 50 and max(map(len, INSTRUCTIONS.values())) <= 64


@pytest.mark.parametrize("name", ["reach-v3", "push-v3", "door-open-v3", "drawer-open-v3"])
def test_experts_succeed_from_every_start(name):
    one = robot(name)
    for seed in range(3):
        one.reset(seed)
        assert any(success for _, success, _ in play(one, 120))
        # once solved, an episode counts as a success to its end
        assert one.step([np.ones(4, np.float32)], np.zeros(1))[3]


def test_starts_depend_on_the_seed_alone():
    one, other = robot("push-v3"), robot("push-v3")
    one.reset(3)
    first = one._observation["state"]
    play(one, 7)
    one.reset(4)
    assert not np.array_equal(one._observation["state"], first)
    other.reset(3)
    assert np.array_equal(other._observation["state"], first)


def test_observations_hold_the_goal_or_the_robot_alone():
    full, own = robot("reach-v3"), robot("reach-v3", state="robot")
    for each in (full, own):
        each.reset(1)
    state = full._observation["state"]
    assert state.shape == (39,) and (state[-3:] == full.env._env._target_pos).all() and state[-3:].any()
    assert own._observation["state"].tolist() == state[[0, 1, 2, 3, 18, 19, 20, 21]].tolist()
    backend = SerialBackend(GymConfig(name="metaworld:reach-v3"), 2)
    shown = backend.reset(EpisodeSeeds(0))
    assert [text_of(row) for row in shown["instruction"]] == ["move the hand to the goal"] * 2
    assert backend.spec.max_episode_steps == 500 and backend.spec.control_hz == 80


@pytest.mark.parametrize("name", ["pick-place-v3", "door-lock-v3", "mt10"])
def test_a_restored_state_continues_bit_identically(name):
    one = robot(name)
    one.reset(5)
    play(one, 20)
    saved = one.state()
    expected = play(one, 30)
    other = robot(name)
    other.set_state(saved)
    assert play(other, 30) == expected


def test_sets_draw_a_task_for_each_episode():
    one, seen = robot("mt10"), set()
    for seed in range(30):
        one.reset(seed)
        assert one._observation["instruction"] == INSTRUCTIONS[one.env.task]
        seen.add(one.env.task)
    assert len(seen) >= 8 and seen <= set(SETS["mt10"])


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("reach-v2", {}, "metaworld:reach-v2 is unknown; expected mt10, mt50 or assembly-v3"),
        ("reach-v3", {"cameras": ["head"]}, "'head' is unknown; this env has topview"),
        ("reach-v3", {"state": "images"}, "state='images'; expected full"),
        ("reach-v3", {"depth": True}, "depth=true needs env.kwargs.cameras"),
        ("reach-v3", {"image_size": 5000}, "image_size=5000; expected a whole number of pixels, 8 to 4096"),
        ("reach-v3", {"render_mode": "human"}, "unexpected keyword argument 'render_mode'"),
        ("reach-v3", {"view": 1}, "unexpected keyword argument 'view'"),
    ],
)
def test_wrong_names_and_arguments_are_refused(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        robot(name, **kwargs)


def test_only_the_frames_of_decisions_are_drawn():
    one = robot("reach-v3", cameras=["corner2", "gripperPOV"], image_size=48)
    drawn = []
    one.env._views.draw = lambda camera, size: (
        drawn.append(camera) or (np.full((size, size, 3), len(drawn), np.uint8), None)
    )
    arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in one.spec.observation.items()}
    one.reset(0)
    one.write(arrays, 0)
    one.step([np.zeros(4, np.float32)] * 4, np.zeros(4))
    one.write(arrays, 0)
    assert drawn == ["corner2", "gripperPOV"] * 2 and arrays["image/gripperPOV"].max() == 4


def test_sets_keep_the_cameras_of_one_task_alone(monkeypatch):
    made, closed = [], []

    class Drawn:
        def __init__(self, model, height, width, hidden):
            self.model = model
            made.append(model)

        def draw(self, data, camera):
            return np.zeros((48, 48, 3), np.uint8), np.zeros((48, 48))

        def close(self):
            closed.append(self.model)

    monkeypatch.setattr("sparring.envs.sims.mujoco.Cameras", Drawn)
    one, models = robot("mt10", cameras="topview", image_size=48), []
    for seed in range(6):
        one.reset(seed)
        one._observation["topview"]()
        models.append(one.env.model)
    changes = [model for k, model in enumerate(models) if k == 0 or model is not models[k - 1]]
    assert len(changes) > 2 and made == changes and closed == changes[:-1]


CORNERS = ["corner", "corner2", "corner3", "corner4"]


def test_cameras_draw_the_scene_upright():
    one = robot("drawer-open-v3", cameras=[*CORNERS, "topview"], image_size=64)
    one.reset(0)
    if one.render() is None:
        pytest.skip(one.no_picture)
    arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in one.spec.observation.items()}
    one.write(arrays, 0)
    corner = arrays["image/corner2"][0].astype(int)
    # the red robot stands at the left, and its base below its hand
    red = corner[0] - corner[1:].max(0) > 40
    assert red.sum() > 100 and red[:, :32].sum() > red[:, 32:].sum()
    assert arrays["image/topview"].std() > 20
    for camera in CORNERS:
        # the model's picture has its top at the bottom: the vertical axis of the camera points down
        model, data = one.env.model, one.env.data
        raw = one.env._views._drawn[64].draw(data, camera)[0].transpose(2, 0, 1)
        assert data.cam_xmat[model.camera(camera).id].reshape(3, 3)[2, 1] < -0.5
        assert np.array_equal(arrays[f"image/{camera}"][0], raw[:, ::-1, ::-1])
    one.close()


def test_check_finds_nothing_wrong_and_prints_the_roles(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.check.env._SECONDS", 20.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = main(["check", "metaworld:reach-v3", "rollout.max_episode_steps=80", f"--output={tmp_path}"])
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "role of 'state': Box [39] float64 -> state, 39 numbers" in printed
    assert "role of 'instruction'" in printed and "the same seed and actions give the same trajectories" in printed
    assert "in 4 of 4 with the expert" in printed and "no errors, no warnings, no notes" in printed


def test_check_compares_images_with_the_cameras_of_the_model(monkeypatch):
    one, draw = robot("reach-v3", cameras=["corner", "topview"]), Views.draw
    one.reset(0)
    if one.render() is None:
        pytest.skip(one.no_picture)
    seen = {
        (1, 1): ("ok", "it is the picture of the model's camera turned by 180 degrees; up is 0.96"),
        (-1, -1): (
            "warn",
            "upside down: it is the picture of the model's camera as drawn, and its up points down (-0.96)",
        ),
        (-1, 1): ("warn", "upside down: it is the picture of the model's camera with its columns in reverse"),
        (1, -1): ("warn", "mirrored: it is the picture of the model's camera with its rows in reverse"),
    }
    for (rows, columns), (severity, message) in seen.items():
        turn = (slice(None, None, rows), slice(None, None, columns))
        monkeypatch.setattr(Views, "draw", lambda *given, turn=turn: [drawn[turn] for drawn in draw(*given)])
        found = {finding.what: finding for finding in gymnasium_findings(one)}
        assert found["image/corner"].severity == severity and found["image/corner"].found.startswith(message)
        # a camera that looks straight down has no upper side, but can be mirrored
        assert found["image/topview"].severity == ("ok" if rows == columns else "warn")
    one.close()


def test_workers_give_the_same_results_as_one_process():
    from sparring.envs.workers import ProcessBackend

    config = GymConfig(name="metaworld:push-v3", workers=2)
    serial, workers = SerialBackend(config, 2, 6), ProcessBackend(config, 2, 6)
    try:
        seeds, rng = EpisodeSeeds(2, total_envs=2), np.random.default_rng(0)
        assert (serial.reset(seeds)["state"] == workers.reset(seeds)["state"]).all()
        for _ in range(4):
            action = rng.uniform(-1, 1, (2, 2, 4)).astype(np.float32)
            one, other = serial.step(action), workers.step(action)
            assert (one.observation["state"] == other.observation["state"]).all()
            assert (one.reward == other.reward).all() and one.ended.tolist() == other.ended.tolist()
    finally:
        workers.close()
