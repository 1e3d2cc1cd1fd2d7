"""LIBERO's adapter, on a double of hf-libero whose signatures are those of its published source."""

import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from sim_signatures import parameters

from sparring.contract import text_of
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import GymConfig
from sparring.envs.gym import GymRobot
from sparring.envs.gym_batch import SerialBackend
from sparring.envs.sims import libero

DOUBLE = Path(__file__).parents[1] / "doubles" / "libero_package"
# of hf_libero-0.1.4-py3-none-any.whl (SHA-256 207f76e2...): file -> function -> parameters
SIGNATURES = {
    "libero/libero/__init__.py": {"get_libero_path": ["query_key"], "get_assets_path": []},
    "libero/libero/benchmark/__init__.py": {
        "get_benchmark": ["benchmark_name"],
        "Benchmark.__init__": ["self", "task_order_index"],
        "Benchmark.get_num_tasks": ["self"],
        "Benchmark.get_task": ["self", "i"],
        "Benchmark.get_task_init_states": ["self", "i"],
    },
    "libero/libero/envs/env_wrapper.py": {
        "ControlEnv.__init__": [
            *("self", "bddl_file_name", "robots", "controller", "gripper_types", "initialization_noise"),
            *("use_camera_obs", "has_renderer", "has_offscreen_renderer", "render_camera", "render_collision_mesh"),
            *("render_visual_mesh", "render_gpu_device_id", "control_freq", "horizon", "ignore_done", "hard_reset"),
            *("camera_names", "camera_heights", "camera_widths", "camera_depths", "camera_segmentations", "renderer"),
            *("renderer_config", "**kwargs"),
        ],
        "ControlEnv.reset": ["self"],
        "ControlEnv.step": ["self", "action"],
        "ControlEnv.set_init_state": ["self", "init_state"],
        "ControlEnv.check_success": ["self"],
        "ControlEnv.close": ["self"],
    },
}


class Drawn:
    """Draws a picture whose left half is bright, and near."""

    def __init__(self, model, height, width, hidden):
        assert hidden == (0,)
        self.model, self.size = model, (height, width)

    def draw(self, data, camera):
        assert data is self.model  # of the double: not the data of another model
        pixels = np.zeros((*self.size, 3), np.uint8)
        pixels[:, : self.size[1] // 2] = {"agentview": 200, "robot0_eye_in_hand": 100}[camera]
        return pixels, pixels[..., 0] / np.float32(100)

    def close(self):
        pass


@pytest.fixture(autouse=True)
def forget():
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "libero"]:
        del sys.modules[name]


@pytest.fixture
def package(monkeypatch, tmp_path):
    """hf-libero's double, with scenes but without a config file."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    monkeypatch.setattr("sparring.envs.sims.mujoco.Cameras", Drawn)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("LIBERO asked on standard input"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "none"))
    (tmp_path / "scenes").mkdir()
    monkeypatch.setenv("DOUBLE_ASSETS", str(tmp_path))
    return tmp_path


def robot(name="libero_spatial/1", **kwargs) -> GymRobot:
    return GymRobot(GymConfig(name=f"libero:{name}", kwargs=kwargs))


def moved(by) -> np.ndarray:
    return np.array([by, 0, 0, 0, 0, 0, 1], np.float32)


@pytest.mark.parametrize(("file", "name"), [(file, name) for file, found in SIGNATURES.items() for name in found])
def test_the_double_has_the_signatures_of_hf_libero(file, name):
    assert parameters(DOUBLE / file, name) == SIGNATURES[file][name]


@pytest.mark.sims
def test_the_signatures_are_those_of_the_installed_hf_libero(monkeypatch, tmp_path):
    found = importlib.util.find_spec("libero")
    if found is None:
        pytest.skip("needs LIBERO: docs/simulators.md")
    root = Path(next(iter(found.submodule_search_locations))).parent
    for file, functions in SIGNATURES.items():
        assert {name: parameters(root / file, name) for name in functions} == functions
    # it is imported with our config file, and reads nothing from standard input
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("LIBERO asked on standard input"))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "none"))
    libero._configure()
    from libero.libero import benchmark, get_libero_path

    for suite, tasks in {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10}.items():
        assert benchmark.get_benchmark(suite)().get_num_tasks() == tasks and suite in libero._SUITES
    one = benchmark.get_benchmark("libero_spatial")()
    assert one.get_task_init_states(0).shape[0] == 50
    task = one.get_task(0)
    assert task.language.startswith("pick up the black bowl")
    assert Path(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file).is_file()


def test_observations_instructions_and_limits(package):
    one = robot(image_size=16)
    assert one.spec.max_episode_steps == 280 and one.spec.control_hz == 20 and one.spec.action_dim == 7
    assert one.spec.observation["state"] == ((8,), "float32")
    one.reset(0)
    # ten steps without motion, a turn of 90 degrees about z, two fingers
    expected = [0, 10, 0, 0, 0, np.pi / 2, 0.04, -0.04]
    np.testing.assert_allclose(one._observation["state"], expected)
    backend = SerialBackend(GymConfig(name="libero:libero_10/2", kwargs={"cameras": "wrist", "state": "full"}), 1)
    shown = backend.reset(EpisodeSeeds(0))
    assert text_of(shown["instruction"][0]) == "do task 2" and backend.spec.max_episode_steps == 520
    assert shown["state"].shape == (1, 9) and set(shown) == {"state", "instruction", "image/wrist"}


def test_episodes_start_from_the_states_of_the_suite(package):
    one = robot(state="full", cameras=[])
    starts = []
    for seed in (1, 2, 3, 1):
        one.reset(seed)
        starts.append(float(one._observation["state"][-1]))
    assert all(100 <= start < 150 for start in starts) and starts[0] == starts[3] and len(set(starts)) == 3
    other = robot(state="full", cameras=[], start="random")
    before = np.random.get_state()[1].copy()
    other.reset(1)
    assert 0 <= other._observation["state"][-1] < 1
    assert (np.random.get_state()[1] == before).all()  # LIBERO's use of the global generator leaves no trace


def test_success_ends_the_episode(package):
    one, reward = robot(cameras=[]), np.zeros(1)
    one.reset(0)
    assert one.step([moved(0.5)], reward) == (1, False, False, False) and reward[0] == 0
    assert one.step([moved(0.6)], reward) == (1, True, False, True) and reward[0] == 1


def test_a_restored_state_continues_the_episode(package):
    one = robot(cameras=[], state="full")
    one.reset(4)
    one.step([moved(0.25), moved(0.5)], np.zeros(2))
    saved, state = one.state(), one._observation["state"]
    other = robot(cameras=[], state="full")
    other.set_state(saved)
    assert other.step([moved(0.125)], np.zeros(1)) == (1, False, False, False)
    assert other._observation["state"][0] == state[0] + 0.125 and (other._observation["state"][1:] == state[1:]).all()
    assert other._elapsed == 3


def test_cameras_are_the_right_way_round(package):
    for mirror in (False, True):
        one = robot(image_size=8, mirror=mirror, depth=True)
        one.reset(0)
        arrays = {key: np.zeros((1, *shape), dtype) for key, (shape, dtype) in one.spec.observation.items()}
        one.write(arrays, 0)
        for camera, bright in (("agentview", 200), ("wrist", 100)):
            left, right = arrays[f"image/{camera}"][0, 0, 0, [0, 7]]
            assert (left, right) == ((0, bright) if mirror else (bright, 0))
            left, right = arrays[f"depth/{camera}"][0, 0, 0, [0, 7]]
            assert (left, right) == ((0, bright / 100) if mirror else (bright / 100, 0))
        assert one.render().shape == (256, 256, 3)


def test_cameras_of_a_former_model_are_closed(package, monkeypatch):
    closed = []
    monkeypatch.setattr(Drawn, "close", lambda self: closed.append(self.model))
    one, models = robot(cameras=[]), []
    for seed in range(3):
        one.reset(seed)  # makes a new model, as LIBERO does
        one.render()
        one.render()
        models.append(one.env._simulation[0])
    assert closed == models[:2] and len(set(map(id, models))) == 3


def test_mirrored_cameras_see_the_same_points(package):
    import mujoco

    camera = '<camera name="agentview" pos="0 0 2" fovy="60"/>'
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{camera}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    for mirror, column in ((False, 7), (True, 0)):
        env = robot(image_size=8, mirror=mirror, cameras=[]).env
        env.inner.sim.model._model, env.inner.sim.data._data = model, data
        intrinsics, pose = env.camera_model("agentview")
        # a pixel at the right edge, one metre away: x = 3.5 pixels / focal length
        ray = np.linalg.inv(intrinsics) @ [column + 0.5, 4, 1]
        seen = pose @ np.append(ray, 1)
        np.testing.assert_allclose(seen[:3], [3.5 / (4 / np.tan(np.pi / 6)), 0, 1], atol=1e-9)


def test_a_config_file_of_the_user_is_kept(package, monkeypatch):
    own = package / "own"
    own.mkdir()
    (own / "config.yaml").write_text(yaml.safe_dump({"bddl_files": "/my/tasks"}))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(own))
    assert robot(cameras=[]).env.inner.bddl == "/my/tasks/libero_spatial/task_1.bddl"
    assert os.environ["LIBERO_CONFIG_PATH"] == str(own)


def test_without_a_config_file_it_gets_one_of_this_process(package):
    assert robot(cameras=[]).env.inner.bddl == f"{DOUBLE}/libero/libero/bddl_files/libero_spatial/task_1.bddl"
    assert not (package / "none").exists() and not (package / ".libero").exists()


def test_missing_scenes_are_named(package, monkeypatch):
    monkeypatch.setenv("DOUBLE_ASSETS", "/nowhere")
    with pytest.raises(ValueError, match="LIBERO's package has no scenes, and there are none in '/nowhere'; download"):
        robot()


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("libero_spatial", {}, "libero:libero_spatial; expected SUITE/NUMBER, e.g. libero_spatial/0"),
        ("libero_100/0", {}, "libero:libero_100/0; expected SUITE/NUMBER"),
        ("libero_spatial/3", {}, "libero_spatial has tasks 0 to 2"),
        ("libero_spatial/0", {"cameras": ["head"]}, "'head' is unknown; this env has agentview, wrist"),
        ("libero_spatial/0", {"state": "images"}, "state='images'; expected robot or full"),
    ],
)
def test_wrong_names_and_arguments_are_refused(package, name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        robot(name, **kwargs)


def test_without_the_package_the_error_names_it():
    if importlib.util.find_spec("libero") is not None:
        pytest.skip("LIBERO is installed")
    with pytest.raises(ValueError, match="LIBERO needs the package libero; docs/simulators.md"):
        robot()
