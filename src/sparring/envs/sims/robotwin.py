"""RoboTwin 2.0: tasks of two arms in SAPIEN, e.g. `env.name=robotwin:beat_block_hammer`.

RoboTwin is a repository, not a package. This module is written against its commit cf47ab5 and has not been run with it
(docs/simulators.md). RoboTwin reads files relative to its folder and renders on one GPU per process, so its robots run
in worker processes; each worker has its folder and its GPU before it imports anything of RoboTwin."""

import contextlib
import functools
import importlib
import json
import os
import random
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from gymnasium import spaces

from sparring.envs.sims.arguments import check_depth, choice
from sparring.envs.sims.replay import ReplayedEnv, pose_from_extrinsics
from sparring.envs.workers import WORKER
from sparring.errors import UserError

_MODES = ("qpos", "delta_qpos", "ee")
_ATTEMPTS = 50  # start states of one seed: RoboTwin refuses those in which objects do not come to rest
_ARMS = ("left", "right")
_GPUS = Path("/proc/driver/nvidia/gpus")


def make(
    name: str,
    root: str | None = None,
    task_config: str = "demo_clean",
    cameras: list[str] | str = ("head_camera", "left_camera", "right_camera"),  # type: ignore[assignment]
    depth: bool = False,
    control_mode: Literal["qpos", "delta_qpos", "ee"] = "qpos",
    delta: float = 0.1,
    settings: dict | None = None,
) -> "RoboTwin":
    """`delta`: the largest joint displacement of an action of delta_qpos, radians. `settings` replace those of the task
    config; only `ee` loads the motion planner."""
    choice("control_mode", control_mode, _MODES)
    check_depth(depth, cameras)
    folder = _resolved(root or os.environ.get("ROBOTWIN_ROOT", ""))
    if not (folder / "envs" / "_base_task.py").is_file():
        clone = (
            "git clone https://github.com/RoboTwin-Platform/RoboTwin, and set env.kwargs.root or ROBOTWIN_ROOT to it"
        )
        raise UserError(f"'{folder}' is not the folder of RoboTwin; {clone}")
    tasks = sorted(path.stem for path in (folder / "envs").glob("[a-z]*.py"))
    if name not in tasks:
        raise UserError(f"env.name=robotwin:{name} is unknown; RoboTwin has {', '.join(tasks)}")
    _choose_gpu()
    sys.path[:] = [str(folder), *(os.path.abspath(path) for path in sys.path if path != str(folder))]
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(None):
            task = getattr(importlib.import_module(f"envs.{name}"), name)
            config = Path(importlib.import_module("envs._GLOBAL_CONFIGS").CONFIGS_PATH)
    except ImportError as error:
        how = "install RoboTwin's requirements (docs/simulators.md); it imports CuRobo also where no planner is needed"
        raise UserError(f"RoboTwin cannot be imported: {error}; {how}") from None
    arguments = _arguments(config, name, task_config) | (settings or {})
    arguments |= {"need_plan": control_mode == "ee", "render_freq": 0, "save_data": False}
    arguments["data_type"] = {"rgb": True, "depth": depth}
    limit = yaml.safe_load((config / "_eval_step_limit.yml").read_text()).get(name, 1000)
    described = json.loads((folder / "description" / "task_instruction" / f"{name}.json").read_text())
    instruction = described["full_description"].replace("<", "").replace(">", "")
    if control_mode != "ee":
        _without_planner(importlib.import_module("envs.robot.robot"))
    cameras = [cameras] if isinstance(cameras, str) else list(cameras)
    return RoboTwin(task(), arguments, limit, instruction, cameras, depth, control_mode, float(delta))


@functools.cache
def _resolved(root: str) -> Path:
    """Remembered: the first robot of a worker changes the folder to which a relative path belongs."""
    return Path(root).expanduser().resolve()


def _choose_gpu() -> None:
    """Give this worker one of the visible GPUs. The processes of `--gpus` share them, and so do their workers."""
    if WORKER not in os.environ:
        why = "it changes the folder and the GPU of its process"
        raise UserError(f"RoboTwin needs env.vectorize=process: {why}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    gpus = [str(number) for number in range(count)] if visible is None else [one for one in visible.split(",") if one]
    rank, ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own = gpus[rank::ranks] or gpus
    if own:
        os.environ["CUDA_VISIBLE_DEVICES"] = own[int(os.environ[WORKER]) % len(own)]


def _arguments(config: Path, name: str, task_config: str) -> dict[str, Any]:
    """The arguments of `setup_demo`: the task config, and the files of its arms."""
    if not (config / f"{task_config}.yml").is_file():
        known = ", ".join(sorted(path.stem for path in config.glob("[!_]*.yml")))
        raise UserError(f"env.kwargs.task_config={task_config!r} is unknown; RoboTwin has {known}")
    arguments = yaml.safe_load((config / f"{task_config}.yml").read_text()) | {"task_name": name}
    robots = yaml.safe_load((config / "_embodiment_config.yml").read_text())
    chosen = arguments["embodiment"]  # one robot with two arms; or left robot, right robot, their distance
    arguments["dual_arm_embodied"] = len(chosen) == 1
    if len(chosen) == 3:
        arguments["embodiment_dis"] = chosen[2]
    for arm, robot in zip(_ARMS, (chosen[0], chosen[0] if len(chosen) == 1 else chosen[1]), strict=True):
        file = Path(robots[robot]["file_path"])
        if not (file / "config.yml").is_file():
            download = "bash scripts/_download_assets.sh in its folder downloads them"
            raise UserError(f"RoboTwin's assets are missing: no '{file / 'config.yml'}'; {download}")
        arguments[f"{arm}_robot_file"] = robots[robot]["file_path"]
        arguments[f"{arm}_embodiment_config"] = yaml.safe_load((file / "config.yml").read_text())
    return arguments


def _without_planner(module: Any) -> None:
    """Replace the method that starts CuRobo, whose kernels compile for minutes, by one that makes mplib's planner only:
    it turns joint targets into trajectories and moves the grippers."""

    def set_planner(robot: Any, scene: Any = None) -> None:
        robot.communication_flag = False
        for arm in _ARMS:
            names = ("urdf_path", "srdf_path", "move_group", "entity_origion_pose", "entity", "planner_type")
            planner = module.MplibPlanner(*(getattr(robot, f"{arm}_{name}") for name in names), scene)
            setattr(robot, f"{arm}_planner", planner)
            setattr(robot, f"{arm}_mplib_planner", planner)

    module.Robot.set_planner = set_planner


class RoboTwin(ReplayedEnv):
    """Reward 1 and the end of the episode at success. A qpos action is the target of joints and grippers (0 closed, 1
    open), left arm first; delta_qpos: a displacement of the joints, and the target of grippers; ee: poses of the hands
    (position, quaternion) and grippers."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 15}

    def __init__(
        self,
        inner: Any,
        arguments: dict[str, Any],
        limit: int,
        instruction: str,
        cameras: list[str],
        depth: bool,
        control_mode: str,
        delta: float,
    ):
        super().__init__()
        self.inner, self.max_episode_steps, self.instruction = inner, limit, instruction
        self._arguments, self._cameras, self._depth, self._mode = arguments, cameras, depth, control_mode
        self._unstable = importlib.import_module("envs.utils.create_actor").UnStableError
        self._episodes = 0
        self._seen: dict[str, dict[str, np.ndarray]] | None = None  # what the cameras show in the current state
        state = self.begin(0)["state"]
        sizes = {camera: found["rgb"].shape for camera, found in self._look().items()}
        if wrong := [camera for camera in cameras if camera not in sizes]:
            raise UserError(f"env.kwargs.cameras: '{wrong[0]}' is unknown; RoboTwin has {', '.join(sizes)}")
        # [A] each
        bounds = [self._arm_bounds(arm, delta) for arm in _ARMS]
        low, high = (np.concatenate([each[k] for each in bounds]) for k in (0, 1))
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
        shown: dict[str, spaces.Space] = {"instruction": spaces.Text(512)}
        shown["state"] = spaces.Box(-np.inf, np.inf, state.shape, np.float64)
        shown |= {camera: spaces.Box(0, 255, sizes[camera], np.uint8) for camera in cameras}
        if depth:
            shown |= {f"{camera}_depth": spaces.Box(0, np.inf, sizes[camera][:2], np.float32) for camera in cameras}
        self.observation_space = spaces.Dict(shown)

    def begin(self, seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        random.seed(seed)
        for _ in range(_ATTEMPTS):
            self.close()
            self._episodes += 1
            start = int(rng.integers(2**31))
            with contextlib.redirect_stdout(None), contextlib.suppress(self._unstable):
                self.inner.setup_demo(now_ep_num=0, seed=start, **self._arguments)
                return self._observed()
        raise RuntimeError(f"RoboTwin found no stable start state in {_ATTEMPTS} attempts, seed {seed}")

    def advance(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        given = action.astype(np.float64)
        if self._mode == "delta_qpos":
            now = np.array(self._joints())
            grippers = self._gripper_entries()
            given = np.where(grippers, given, now + given)
        with contextlib.redirect_stdout(None):  # it prints a line for each step
            self.inner.take_action(given, action_type="ee" if self._mode == "ee" else "qpos")
        success = bool(self.inner.eval_success)
        return self._observed(), float(success), success, False, {"success": success}

    def render(self) -> np.ndarray:
        self.inner._update_render()
        return self.inner.cameras.get_observer_rgb()

    def close(self) -> None:
        if self._episodes:
            self.inner.close_env(clear_cache=self._episodes % self._arguments.get("clear_cache_freq", 5) == 0)

    def camera_model(self, camera: str) -> tuple[np.ndarray, np.ndarray]:
        """(intrinsics [3, 3] in pixels, pose [4, 4] of the camera in the world), as points.point_clouds has them."""
        found = self._look()[camera]
        return np.array(found["intrinsic_cv"], np.float64), pose_from_extrinsics(np.array(found["extrinsic_cv"]))

    def gripper_pose(self, arm: Literal["left", "right"] = "left") -> np.ndarray:
        """`[4, 4]`: pose in the world of the point between the fingers."""
        found = np.array(getattr(self.inner.robot, f"get_{arm}_tcp_pose")())  # [7]: position, quaternion w, x, y, z
        w, axis = found[3], found[4:]
        cross = np.cross(np.eye(3), axis)  # cross @ v = axis x v
        pose = np.eye(4)
        pose[:3, :3], pose[:3, 3] = np.eye(3) + 2 * w * cross + 2 * cross @ cross, found[:3]
        return pose

    def _arm_bounds(self, arm: str, delta: float) -> tuple[np.ndarray, np.ndarray]:
        if self._mode == "ee":
            low, high = -np.ones(7), np.ones(7)
        else:
            joints = getattr(self.inner.robot, f"{arm}_arm_joints")
            low, high = np.array([joint.get_limits()[0] for joint in joints], np.float64).T
            low, high = (low, high) if self._mode == "qpos" else (np.full_like(low, -delta), np.full_like(high, delta))
        return np.append(low, 0.0), np.append(high, 1.0)

    def _joints(self) -> list[float]:
        robot = self.inner.robot
        return [*robot.get_left_arm_jointState(), *robot.get_right_arm_jointState()]

    def _gripper_entries(self) -> np.ndarray:
        """[A] bool: the last entry of each arm."""
        sizes = np.cumsum([len(getattr(self.inner.robot, f"{arm}_arm_joints")) + 1 for arm in _ARMS])
        return np.isin(np.arange(sizes[-1]), sizes - 1)

    def _look(self) -> dict[str, dict[str, np.ndarray]]:
        if self._seen is None:
            self._seen = self.inner.get_obs()["observation"]
        return self._seen

    def _observed(self) -> dict[str, Any]:
        self._seen = None
        poses = [*self.inner.get_arm_pose("left"), *self.inner.get_arm_pose("right")]
        shown: dict[str, Any] = {"state": np.array([*self._joints(), *poses]), "instruction": self.instruction}
        shown |= {camera: lambda camera=camera: self._look()[camera]["rgb"] for camera in self._cameras}
        if self._depth:
            shown |= {f"{camera}_depth": lambda camera=camera: self._metres(camera) for camera in self._cameras}
        return shown

    def _metres(self, camera: str) -> np.ndarray:
        return (self._look()[camera]["depth"] / 1000).astype(np.float32)
