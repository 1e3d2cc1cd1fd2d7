"""ManiSkill: tasks of many robots in SAPIEN, e.g. `env.name=maniskill:PickCube-v1`.

`ManiSkill` is one robot in ManiSkill's CPU simulator; maniskill_gpu.py steps many together on a GPU. Letters: N robots
(1 on the CPU), A action dims, S state dims."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sparring.envs.sims.arguments import camera_list, camera_spaces, check_depth, check_size, choice
from sparring.envs.sims.replay import ReplayedEnv, pose_from_extrinsics
from sparring.errors import UserError

_INSTRUCTIONS = {
    "AssemblingKits-v1": "put the object into its place in the kit",
    "LiftPegUpright-v1": "set the peg upright",
    "PegInsertionSide-v1": "insert the peg into the hole from the side",
    "PickClutterYCB-v1": "take the object out of the clutter to the goal",
    "PickCube-v1": "lift the cube to the goal",
    "PickCubeSO100-v1": "lift the cube to the goal",
    "PickCubeWidowXAI-v1": "lift the cube to the goal",
    "PickSingleYCB-v1": "lift the object to the goal",
    "PlaceSphere-v1": "put the sphere into the bin",
    "PlugCharger-v1": "plug the charger into the socket",
    "PokeCube-v1": "poke the cube with the peg",
    "PullCube-v1": "pull the cube to the goal",
    "PullCubeTool-v1": "pull the cube to the robot with the tool",
    "PushCube-v1": "push the cube to the goal",
    "PushT-v1": "push the T into its outline",
    "RollBall-v1": "roll the ball to the goal",
    "StackCube-v1": "put the red cube onto the green cube",
    "StackPyramid-v1": "build a pyramid of the three cubes",
    "TurnFaucet-v1": "turn on the faucet",
    "TwoRobotPickCube-v1": "hand the cube over and lift it to the goal",
    "TwoRobotStackCube-v1": "stack the cubes at the goal with both robots",
}
_REWARDS = {"dense": "normalized_dense", "sparse": "sparse"}
_VULKAN = (
    "ManiSkill needs Vulkan, even without cameras: the driver of a GPU, or Mesa 24.3 or later for the CPU "
    "(apt install -t bookworm-backports mesa-vulkan-drivers on Debian 12)"
)
_PICTURE = 256  # side of a video frame, pixels


@dataclass
class Task:
    """A task with the `env.kwargs` of its env. `at_success` is what happens when it is solved: the episode is truncated
    (the critic estimates what would follow, as in ManiSkill's own PPO), terminated, or continues to the time limit.
    None: terminated with a sparse reward, truncated with a dense one."""

    text_length: ClassVar[int] = 64  # the most characters of an instruction
    name: str
    cameras: list[str] | str = ()  # type: ignore[assignment]
    image_size: int = 64
    depth: bool = False
    state: Literal["full", "robot"] = "full"
    reward: Literal["dense", "sparse"] = "dense"
    control_mode: str | None = None
    at_success: Literal["truncate", "terminate", "continue"] | None = None

    def __post_init__(self):
        self.cameras = [self.cameras] if isinstance(self.cameras, str) else list(self.cameras)
        self.at_success = self.at_success or ("terminate" if self.reward == "sparse" else "truncate")
        choice("state", self.state, ("full", "robot"))
        choice("reward", self.reward, _REWARDS)
        choice("at_success", self.at_success, ("truncate", "terminate", "continue"))
        check_size(self.image_size)
        check_depth(self.depth, self.cameras)

    @property
    def instruction(self) -> str | None:
        return _INSTRUCTIONS.get(self.name)


def make(name: str, **kwargs: Any) -> "ManiSkill":
    return ManiSkill(Task(name, **kwargs))


class Simulation:
    """ManiSkill's env of a task: N robots stepped together, in torch tensors on its device."""

    def __init__(self, task: Task, num_envs: int = 1, on_gpu: bool = False):
        self.task = task
        self.inner, self.limit = _make_inner(task, num_envs, on_gpu)
        camera_list(task.cameras, self.inner.scene.sensors)
        space = self.inner.single_action_space
        # robot of an env -> its action space; a single robot has the name ""
        self._robots = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        low, high = (np.concatenate([getattr(each, end) for each in self._robots.values()]) for end in ("low", "high"))
        self.action_space = spaces.Box(low, high, dtype=np.float32)
        info = self.inner.get_info()
        self.reports_success = "success" in info  # some tasks have rewards only
        if task.reward == "sparse" and not self.reports_success:
            raise UserError(f"env.kwargs.reward=sparse: {task.name} reports no success; use dense")
        self.state = self._read_state(self.inner.get_obs(), info)  # [N, S]
        self._drawn: dict[str, dict[str, Any]] = {}  # camera -> its images in the current state

    def reset(self, seed: int | None, options: dict | None = None) -> None:
        self._drawn = {}
        self.state = self._read_state(*self.inner.reset(seed=seed, options=options))

    def step(self, action: Any) -> tuple[Any, Any, Any]:
        """Actions [N, A] -> (reward, solved, failed) `[N]`."""
        edges = np.cumsum([len(space.low) for space in self._robots.values()])
        parts = [action[:, end - len(space.low) : end] for end, space in zip(edges, self._robots.values(), strict=True)]
        given = parts[0] if len(parts) == 1 else dict(zip(self._robots, parts, strict=True))
        seen, reward, never, _, info = self.inner.step(given)
        self._drawn = {}
        self.state = self._read_state(seen, info)
        no = never & False
        return reward, info.get("success", no), info.get("fail", no)

    def draw(self, camera: str) -> dict[str, Any]:
        """`rgb` uint8 [N, H, W, 3] and, if asked for, `depth` float32 [N, H, W] in metres."""
        if camera not in self._drawn:
            for thing in self.inner._hidden_objects:  # goals, which only videos show
                thing.hide_visual()
            self.inner.scene.update_render(update_sensors=True, update_human_render_cameras=False)
            sensor = self.inner.scene.sensors[camera]
            sensor.capture()
            found = sensor.get_obs(rgb=True, depth=self.task.depth, position=False, segmentation=False)
            if self.task.depth:
                found["depth"] = found["depth"][..., 0].float() / 1000  # from millimetres
            self._drawn[camera] = found
        return self._drawn[camera]

    def _read_state(self, seen: Any, info: dict) -> Any:
        """`seen`: ManiSkill's observation, which holds the objects. Without them it is asked for the robot's part."""
        if self.task.state == "full":
            return seen
        from mani_skill.utils.common import flatten_state_dict

        return flatten_state_dict(self.inner._get_obs_state_dict(info), use_torch=True)


def _make_inner(task: Task, num_envs: int, on_gpu: bool) -> tuple[Any, int | None]:
    """(its env without wrappers, its time limit)."""
    try:
        import sapien
        from mani_skill.utils import download_asset, registration
    except ModuleNotFoundError as error:
        how = "docs/simulators.md has the commands that install it"
        raise UserError(f"ManiSkill needs the package {error.name}; {how}") from None
    if task.name not in registration.REGISTERED_ENVS:
        known = ", ".join(sorted(registration.REGISTERED_ENVS))
        raise UserError(f"env.name=maniskill:{task.name} is unknown; ManiSkill has {known}")

    def refuse(message: str) -> bool:
        how = f"python -m mani_skill.utils.download_asset {task.name}"
        raise UserError(f"{message.partition('. Would')[0]}; download: {how}")

    download_asset.prompt_yes_no = refuse  # it would wait for an answer on standard input
    try:
        device = "sapien_cuda" if sapien.Device("cuda").can_render() else "sapien_cpu"
    except RuntimeError:  # no such device
        device = "sapien_cpu"
    try:
        env = gymnasium.make(
            task.name,
            num_envs=num_envs,
            obs_mode="state" if task.state == "full" else "none",
            reward_mode=_REWARDS[task.reward],
            control_mode=task.control_mode,
            render_mode="rgb_array",
            sim_backend="physx_cuda" if on_gpu else "physx_cpu",
            render_backend=device,
            sensor_configs={"width": task.image_size, "height": task.image_size},
            human_render_camera_configs={"width": _PICTURE, "height": _PICTURE},
        )
    except NotImplementedError as error:
        given = f"env.kwargs.reward={task.reward}" if "reward" in str(error) else f"env.kwargs.state={task.state}"
        raise UserError(f"{task.name} has no {given}: {error}") from None
    except AssertionError as error:
        if "supported modes" not in str(error):
            raise
        raise UserError(f"env.kwargs.control_mode: {error}") from None
    except RuntimeError as error:
        if not any(part in str(error) for part in ("rendering device", "vk::")):
            raise
        raise UserError(f"{_VULKAN}; SAPIEN said: {error}") from None
    return env.unwrapped, registration.REGISTERED_ENVS[task.name].max_episode_steps


class ManiSkill(ReplayedEnv):
    """Success: the task was solved at some step of the episode. A failure, which some tasks know, terminates it."""

    def __init__(self, task: Task):
        super().__init__()
        self._task, self._simulation, self._succeeded = task, Simulation(task), False
        self.max_episode_steps = self._simulation.limit
        self.action_space = self._simulation.action_space
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": self._inner.control_freq}
        shown: dict[str, spaces.Space] = {}
        shown["state"] = spaces.Box(-np.inf, np.inf, self._simulation.state.shape[1:], np.float32)
        if task.instruction is not None:
            shown["instruction"] = spaces.Text(task.text_length)
        self.observation_space = spaces.Dict(shown | camera_spaces(task.cameras, task.image_size, task.depth))

    def begin(self, seed: int) -> dict[str, Any]:
        self._succeeded = False
        self._simulation.reset(seed)
        return self._observed()

    def advance(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        reward, solved, failed = map(float, self._simulation.step(action[None]))
        self._succeeded |= bool(solved)
        terminated = bool(failed or solved and self._task.at_success == "terminate")
        truncated = bool(solved and self._task.at_success == "truncate")
        info = {"success": self._succeeded} if self._simulation.reports_success else {}
        return self._observed(), reward, terminated, truncated, info

    def render(self) -> np.ndarray:
        return self._inner.render_rgb_array()[0].numpy()

    def close(self) -> None:
        self._inner.close()

    def camera_model(self, camera: str) -> tuple[np.ndarray, np.ndarray]:
        """(intrinsics [3, 3] in pixels, pose [4, 4] of the camera in the world), as points.point_clouds has them."""
        found = self._inner.scene.sensors[camera].get_params()
        pose = pose_from_extrinsics(found["extrinsic_cv"][0].numpy())
        return found["intrinsic_cv"][0].numpy().astype(np.float64), pose

    def gripper_pose(self) -> np.ndarray:
        """`[4, 4]`: pose in the world of the point between the fingers, of the first robot if there are several."""
        agent = self._inner.agent
        agent = agent.agents[0] if hasattr(agent, "agents") else agent
        if not hasattr(agent, "tcp"):
            raise UserError(f"the robot {agent.uid} has no gripper")
        return agent.tcp.pose.to_transformation_matrix()[0].numpy().astype(np.float64)

    @property
    def _inner(self) -> Any:
        return self._simulation.inner

    def _observed(self) -> dict[str, Any]:
        shown: dict[str, Any] = {"state": self._simulation.state[0].numpy()}
        if self._task.instruction is not None:
            shown["instruction"] = self._task.instruction

        def picture(camera: str, kind: str) -> Any:
            return lambda: self._simulation.draw(camera)[kind][0].numpy()

        shown |= {camera: picture(camera, "rgb") for camera in self._task.cameras}
        if self._task.depth:
            shown |= {f"{camera}_depth": picture(camera, "depth") for camera in self._task.cameras}
        return shown
