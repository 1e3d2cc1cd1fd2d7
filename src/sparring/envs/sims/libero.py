"""LIBERO: 130 tasks of a Franka arm with instructions, e.g. `env.name=libero:libero_spatial/0`.

Written for hf-libero 0.1.4, LeRobot's package of LIBERO, which runs on robosuite 1.4. The package has no scenes, so
this module has been run with stand-ins for them only (docs/simulators.md)."""

import atexit
import contextlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from gymnasium import spaces

from sparring.envs.sims.arguments import choice
from sparring.envs.sims.mujoco import Views, pose, seeded, without_gl
from sparring.envs.sims.replay import ReplayedEnv
from sparring.errors import UserError

# suite -> steps of an episode: more than its longest demonstration has
_SUITES = {"libero_spatial": 280, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
_CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}
_PATHS = {
    "benchmark_root": ".",
    "bddl_files": "bddl_files",
    "init_states": "init_files",
    "datasets": "../datasets",
    "assets": "assets",
}
_SETTLING = 10  # steps without motion at the start, in which objects come to rest
_COLLISION = (0,)  # the group of geoms that are for collisions only
_PICTURE = 256  # side of a video frame, pixels
_NO_MOTION = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)


def make(
    name: str,
    cameras: list[str] | str = ("agentview", "wrist"),  # type: ignore[assignment]
    image_size: int = 256,
    depth: bool = False,
    mirror: bool = False,
    state: Literal["robot", "full"] = "robot",
    start: Literal["suite", "random"] = "suite",
    controller: str = "OSC_POSE",
) -> "Libero":
    """`mirror`: left and right are exchanged, as in the datasets that rotate LIBERO's upside-down images by 180
    degrees (OpenVLA, HuggingFaceVLA/libero)."""
    suite, _, number = name.partition("/")
    if suite not in _SUITES or not number.isdigit():
        raise UserError(
            f"env.name=libero:{name}; expected SUITE/NUMBER, e.g. libero_spatial/0, of {', '.join(_SUITES)}"
        )
    choice("state", state, ("robot", "full"))
    choice("start", start, ("suite", "random"))
    return Libero(suite, int(number), cameras, image_size, depth, mirror, state == "full", start == "suite", controller)


class Libero(ReplayedEnv):
    """Reward 1 and the end of the episode at success. Episodes start from the suite's initial states, drawn by seed."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(
        self,
        suite: str,
        number: int,
        cameras: list[str] | str,
        image_size: int,
        depth: bool,
        mirror: bool,
        full: bool,
        from_suite: bool,
        controller: str,
    ):
        super().__init__()
        benchmark, wrapper, folder = _import_libero()
        self._mirror, self._full = mirror, full
        turns = {camera: (1, -1) for camera in _CAMERAS} if mirror else None
        # each reset makes a new model
        self._views = Views(lambda: self._simulation, cameras, image_size, depth, _COLLISION, _CAMERAS, turns)
        with _quiet(), seeded(0):
            tasks = benchmark.get_benchmark(suite)()
            if not number < tasks.get_num_tasks():
                raise UserError(f"env.name=libero:{suite}/{number}; {suite} has tasks 0 to {tasks.get_num_tasks() - 1}")
            task = tasks.get_task(number)
            self._starts = tasks.get_task_init_states(number) if from_suite else None  # [50, simulation state]
            self.inner = wrapper.ControlEnv(
                bddl_file_name=str(folder / task.problem_folder / task.bddl_file),
                controller=controller,
                # its own pictures are drawn at each step
                use_camera_obs=False,
                has_offscreen_renderer=False,
                ignore_done=True,
            )
        self.instruction, self.max_episode_steps = task.language, _SUITES[suite]
        low, high = self.inner.env.action_spec
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
        state = self.begin(0)["state"]
        shown: dict[str, spaces.Space] = {"instruction": spaces.Text(256)}
        shown["state"] = spaces.Box(-np.inf, np.inf, state.shape, np.float64)
        self.observation_space = spaces.Dict(shown | self._views.spaces())

    def begin(self, seed: int) -> dict[str, Any]:
        with _quiet(), seeded(seed):
            found = self.inner.reset()
            if self._starts is not None:
                chosen = np.random.default_rng(seed).integers(len(self._starts))
                found = self.inner.set_init_state(self._starts[chosen])
            for _ in range(_SETTLING):
                found, *_ = self.inner.step(np.resize(_NO_MOTION, len(self.inner.env.action_spec[0])))
        return self._observed(found)

    def advance(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        found, reward, _, _ = self.inner.step(action)
        success = bool(self.inner.check_success())
        return self._observed(found), float(reward), success, False, {"success": success}

    def render(self) -> np.ndarray:
        return self._views.draw("agentview", _PICTURE)[0]

    def camera_model(self, camera: str) -> tuple[np.ndarray, np.ndarray]:
        """(intrinsics [3, 3] in pixels, pose [4, 4] of the camera in the world), as points.point_clouds has them."""
        intrinsics, matrix = self._views.camera_model(camera)
        return intrinsics * [[-1, 1, 1], [1, 1, 1], [1, 1, 1]] if self._mirror else intrinsics, matrix

    def gripper_pose(self) -> np.ndarray:
        """[4, 4]: the point between the fingers."""
        site = self._simulation[1].site("gripper0_grip_site")
        return pose(site.xpos, site.xmat.reshape(3, 3))

    def close(self) -> None:
        self._views.close()
        self.inner.close()

    def _observed(self, found: dict[str, np.ndarray]) -> dict[str, Any]:
        hand, turn = found["robot0_eef_pos"], _rotation_vector(found["robot0_eef_quat"])
        parts = [hand, turn, found["robot0_gripper_qpos"]]
        state = np.concatenate([*parts, found["object-state"]] if self._full else parts)
        return {"state": state, "instruction": self.instruction, **self._views.observed()}

    @property
    def _simulation(self) -> tuple[Any, Any]:
        return self.inner.sim.model._model, self.inner.sim.data._data


def _rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """`quaternion`: x, y, z, w. The angle is above pi for w < 0, as in LIBERO's datasets."""
    length = np.linalg.norm(quaternion[:3])
    angle = 2 * np.arctan2(length, quaternion[3])
    return np.zeros(3) if length == 0 else quaternion[:3] * angle / length


def _import_libero() -> tuple[Any, Any, Path]:
    """(its benchmarks, its envs, folder of its tasks)."""
    _configure()
    try:
        with without_gl(), _quiet():  # robosuite sets MUJOCO_GL
            from libero.libero import benchmark, get_assets_path, get_libero_path
            from libero.libero.envs import env_wrapper
    except ModuleNotFoundError as error:
        how = "docs/simulators.md has the commands that install it"
        raise UserError(f"LIBERO needs the package {error.name}; {how}") from None
    with _quiet():
        assets = Path(get_assets_path())  # downloads them if they are not there
    if not (assets / "scenes").is_dir():
        download = "hf download lerobot/libero-assets --repo-type dataset --local-dir ~/.cache/libero/assets"
        raise UserError(f"LIBERO's package has no scenes, and there are none in '{assets}'; download them: {download}")
    return benchmark, env_wrapper, Path(get_libero_path("bddl_files"))


def _configure() -> None:
    """LIBERO waits for answers on standard input if it finds no config file: write one for this process."""
    given = os.environ.get("LIBERO_CONFIG_PATH", os.path.expanduser("~/.libero"))
    found = importlib.util.find_spec("libero")
    if found is None or not found.submodule_search_locations or os.path.exists(os.path.join(given, "config.yaml")):
        return
    root = Path(next(iter(found.submodule_search_locations))) / "libero"
    folder = tempfile.mkdtemp(prefix="libero-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    paths = {name: str((root / path).resolve()) for name, path in _PATHS.items()}
    Path(folder, "config.yaml").write_text(yaml.safe_dump(paths))
    os.environ["LIBERO_CONFIG_PATH"] = folder


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """LIBERO prints what it does."""
    with contextlib.redirect_stdout(None):
        yield
