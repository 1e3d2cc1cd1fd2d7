"""ManiSkill: tasks of many robots in SAPIEN, e.g. `env.name=maniskill:PickCube-v1`, one env on the CPU per robot.

Actions and states are torch tensors of one row inside of ManiSkill, and numpy arrays outside of this module."""

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sparring.envs.sims.replay import ReplayedEnv, pose_from_extrinsics
from sparring.errors import UserError

INSTRUCTIONS = {
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
REWARDS = {"dense": "normalized_dense", "sparse": "sparse"}
AT_SUCCESS = ("truncate", "terminate", "continue")
VULKAN = (
    "ManiSkill needs Vulkan, even without cameras: the driver of a GPU, or Mesa 24.3 or later for the CPU "
    "(apt install -t bookworm-backports mesa-vulkan-drivers on Debian 12)"
)
_PICTURE = 256  # side of a video frame, pixels


def make(
    name: str,
    cameras: list[str] | str = (),  # type: ignore[assignment]
    image_size: int = 64,
    depth: bool = False,
    state: Literal["full", "robot"] = "full",
    reward: Literal["dense", "sparse"] = "dense",
    control_mode: str | None = None,
    at_success: Literal["truncate", "terminate", "continue"] | None = None,
) -> "ManiSkill":
    at_success = at_success or ("terminate" if reward == "sparse" else "truncate")
    for key, value, known in (
        ("state", state, ("full", "robot")),
        ("reward", reward, tuple(REWARDS)),
        ("at_success", at_success, AT_SUCCESS),
    ):
        if value not in known:
            raise UserError(f"env.kwargs.{key}={value!r}; expected {', '.join(known)}")
    cameras, size, full = [cameras] if isinstance(cameras, str) else list(cameras), int(image_size), state == "full"
    inner, limit = _make_inner(name, size, "state" if full else "none", reward, control_mode)
    if wrong := [camera for camera in cameras if camera not in inner.scene.sensors]:
        raise UserError(f"env.kwargs.cameras: '{wrong[0]}' is unknown; {name} has {', '.join(inner.scene.sensors)}")
    if depth and not cameras:
        raise UserError(f"env.kwargs.depth=true without cameras; {name} has {', '.join(inner.scene.sensors)}")
    return ManiSkill(inner, limit, INSTRUCTIONS.get(name), cameras, size, depth, full, at_success)


def _make_inner(name: str, size: int, obs_mode: str, reward: str, control_mode: str | None) -> tuple[Any, int | None]:
    try:
        import sapien
        from mani_skill.utils import download_asset, registration
    except ModuleNotFoundError as error:
        how = "docs/simulators.md has the commands that install it"
        raise UserError(f"ManiSkill needs the package {error.name}; {how}") from None
    if name not in registration.REGISTERED_ENVS:
        known = ", ".join(sorted(registration.REGISTERED_ENVS))
        raise UserError(f"env.name=maniskill:{name} is unknown; ManiSkill has {known}")

    def refuse(message: str) -> bool:
        how = f"python -m mani_skill.utils.download_asset {name}"
        raise UserError(f"{message.partition('. Would')[0]}; download: {how}")

    download_asset.prompt_yes_no = refuse  # it would wait for an answer on standard input
    try:
        device = "sapien_cuda" if sapien.Device("cuda").can_render() else "sapien_cpu"
    except RuntimeError:  # no such device
        device = "sapien_cpu"
    pixels = {"width": size, "height": size}
    try:
        env = gymnasium.make(
            name,
            num_envs=1,
            obs_mode=obs_mode,
            reward_mode=REWARDS[reward],
            control_mode=control_mode,
            render_mode="rgb_array",
            sim_backend="physx_cpu",
            render_backend=device,
            sensor_configs=pixels,
            human_render_camera_configs={"width": _PICTURE, "height": _PICTURE},
        )
    except NotImplementedError as error:
        given = f"env.kwargs.reward={reward}" if "reward" in str(error) else "env.kwargs.state=robot"
        raise UserError(f"{name} has no {given}: {error}") from None
    except AssertionError as error:
        if "supported modes" not in str(error):
            raise
        raise UserError(f"env.kwargs.control_mode: {error}") from None
    except RuntimeError as error:
        if "rendering device" not in str(error):
            raise
        raise UserError(f"{VULKAN}; SAPIEN said: {error}") from None
    return env.unwrapped, registration.REGISTERED_ENVS[name].max_episode_steps


class ManiSkill(ReplayedEnv):
    """Success: the task was solved at some step of the episode. `at_success` is what then happens: the episode is
    truncated (the critic estimates what would follow, as in ManiSkill's own PPO), terminated, or continues to the time
    limit. A failure, which some tasks know, terminates it."""

    def __init__(
        self,
        inner: Any,
        limit: int | None,
        instruction: str | None,
        cameras: list[str],
        image_size: int,
        depth: bool,
        full: bool,
        at_success: str,
    ):
        super().__init__()
        self.inner, self.max_episode_steps, self.instruction = inner, limit, instruction
        self._cameras, self._depth, self._full, self._at_success = cameras, depth, full, at_success
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": inner.control_freq}
        self._succeeded = False
        self._pictures: dict[str, dict[str, np.ndarray]] = {}  # camera -> what it shows in the current state
        space = inner.single_action_space
        # robot -> its space; a single robot has the name ""
        self._robots = dict(space.spaces) if isinstance(space, spaces.Dict) else {"": space}
        low, high = (np.concatenate([getattr(each, end) for each in self._robots.values()]) for end in ("low", "high"))
        self.action_space = spaces.Box(low, high, dtype=np.float32)
        state = self._read_state(inner.get_obs(), inner.get_info())
        shown: dict[str, spaces.Space] = {"state": spaces.Box(-np.inf, np.inf, state.shape, np.float32)}
        if instruction is not None:
            shown["instruction"] = spaces.Text(64)
        shown |= {camera: spaces.Box(0, 255, (image_size, image_size, 3), np.uint8) for camera in cameras}
        if depth:
            pixels = spaces.Box(0, np.inf, (image_size, image_size, 1), np.float32)
            shown["depth"] = spaces.Dict(dict.fromkeys(cameras, pixels))
        self.observation_space = spaces.Dict(shown)

    def begin(self, seed: int) -> dict[str, Any]:
        self._succeeded = False
        return self._observed(*self.inner.reset(seed=seed))

    def advance(self, action: np.ndarray) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        parts = np.split(action, np.cumsum([len(space.low) for space in self._robots.values()])[:-1])
        given = parts[0] if len(parts) == 1 else dict(zip(self._robots, parts, strict=True))
        seen, reward, _, _, info = self.inner.step(given)
        solved = bool(info.get("success", False))
        self._succeeded |= solved
        terminated = bool(info.get("fail", False)) or solved and self._at_success == "terminate"
        truncated = solved and self._at_success == "truncate"
        return self._observed(seen, info), float(reward), terminated, truncated, {"success": self._succeeded}

    def render(self) -> np.ndarray:
        return self.inner.render_rgb_array()[0].numpy()

    def close(self) -> None:
        self.inner.close()

    def camera_model(self, camera: str) -> tuple[np.ndarray, np.ndarray]:
        """(intrinsics `[3, 3]` in pixels, pose `[4, 4]` of the camera in the world). The camera has x to the right, y
        down and z forward."""
        found = self.inner.scene.sensors[camera].get_params()
        pose = pose_from_extrinsics(found["extrinsic_cv"][0].numpy())
        return found["intrinsic_cv"][0].numpy().astype(np.float64), pose

    def gripper_pose(self) -> np.ndarray:
        """`[4, 4]`: pose in the world of the point between the fingers, of the first robot if there are several."""
        agent = self.inner.agent
        agent = agent.agents[0] if hasattr(agent, "agents") else agent
        if not hasattr(agent, "tcp"):
            raise UserError(f"the robot {agent.uid} has no gripper")
        return agent.tcp.pose.to_transformation_matrix()[0].numpy().astype(np.float64)

    def _read_state(self, seen: Any, info: dict) -> np.ndarray:
        """`seen`: ManiSkill's observation, which holds the objects. Without them it is asked for the robot's part."""
        if self._full:
            return seen[0].numpy()
        from mani_skill.utils.common import flatten_state_dict

        return flatten_state_dict(self.inner._get_obs_state_dict(info), use_torch=True)[0].numpy()

    def _observed(self, seen: Any, info: dict) -> dict[str, Any]:
        self._pictures = {}
        shown: dict[str, Any] = {"state": self._read_state(seen, info)}
        if self.instruction is not None:
            shown["instruction"] = self.instruction
        shown |= {camera: lambda camera=camera: self._draw(camera)["rgb"] for camera in self._cameras}
        if self._depth:
            shown["depth"] = {camera: lambda camera=camera: self._draw(camera)["depth"] for camera in self._cameras}
        return shown

    def _draw(self, camera: str) -> dict[str, np.ndarray]:
        if camera not in self._pictures:
            for thing in self.inner._hidden_objects:  # goals, which only videos show
                thing.hide_visual()
            self.inner.scene.update_render(update_sensors=True, update_human_render_cameras=False)
            sensor = self.inner.scene.sensors[camera]
            sensor.capture()
            drawn = sensor.get_obs(rgb=True, depth=self._depth, position=False, segmentation=False)
            # millimetres -> metres
            depth = {"depth": drawn["depth"][0].numpy().astype(np.float32) / 1000} if self._depth else {}
            self._pictures[camera] = {"rgb": drawn["rgb"][0].numpy()} | depth
        return self._pictures[camera]
