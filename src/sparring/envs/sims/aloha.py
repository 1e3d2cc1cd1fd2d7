"""ALOHA: two ViperX arms, from gym-aloha, e.g. `env.name=aloha:AlohaTransferCube-v0`."""

from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sparring.envs.sims.arguments import choice
from sparring.envs.sims.mujoco import Views, pose, restore_state, saved_state, without_gl
from sparring.errors import UserError

# name -> (gym-aloha's task, instruction)
TASKS = {
    "AlohaTransferCube-v0": ("transfer_cube", "pick up the cube with the right arm and hand it to the left arm"),
    "AlohaInsertion-v0": ("insertion", "pick up the socket and the peg and put the peg into the socket"),
}
_JOINTS = 16  # with two fingers an arm; policies have 14, one number for both fingers
_GRIPPERS = [6, 13]  # of the 14: 0 is closed, 1 open
_PICTURE = 256  # side of a video frame, pixels


def make(
    name: str,
    cameras: list[str] | str = (),  # type: ignore[assignment]
    image_size: int = 64,
    depth: bool = False,
    state: Literal["full", "robot"] = "full",
    reward: Literal["dense", "sparse"] = "dense",
) -> "Aloha":
    if name not in TASKS:
        raise UserError(f"env.name=aloha:{name} is unknown; expected {', '.join(TASKS)}")
    choice("state", state, ("full", "robot"))
    choice("reward", reward, ("dense", "sparse"))
    try:
        with without_gl():
            from gym_aloha.env import AlohaEnv
    except ModuleNotFoundError as error:
        how = "see docs/simulators.md for the commands that install gym-aloha 0.1.5"
        raise UserError(f"ALOHA needs the package {error.name}; {how}") from None
    task, instruction = TASKS[name]
    inner = AlohaEnv(task=task)
    # its own draws three images of 480 x 640 at each step
    inner._env.task.get_observation = lambda physics: {"images": {"top": np.zeros(0)}}
    physics = inner._env.physics
    views = Views(lambda: (physics.model.ptr, physics.data.ptr), cameras, image_size, depth)
    return Aloha(inner, instruction, views, state == "full", reward == "sparse")


class Aloha(gymnasium.Env):
    """Success ends the episode, as in gym-aloha, and so does a simulation that diverges. Its action space has -1 to 1
    rad, which some joints leave at the start of an episode; here it is the whole range of each joint."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}
    max_episode_steps = 300

    def __init__(self, inner: Any, instruction: str, views: Views, full: bool, sparse: bool):
        self.inner, self.instruction, self._views = inner, instruction, views
        self._full, self._sparse = full, sparse
        self.camera_model, self.render_mode = views.camera_model, "rgb_array"
        model, _ = self._simulation
        # [16, 2] -> [2, 14]
        low, high = np.delete(model.actuator_ctrlrange, [7, 15], 0).T.astype(np.float32)
        low[_GRIPPERS], high[_GRIPPERS] = 0, 1
        self.action_space = spaces.Box(low, high)
        size = len(_GRIPPERS) * 7 + (model.nq - _JOINTS if full else 0)
        shown: dict[str, spaces.Space] = {"instruction": spaces.Text(128)}
        shown["state"] = spaces.Box(-np.inf, np.inf, (size,), np.float64)
        self.observation_space = spaces.Dict(shown | views.spaces())

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.inner.reset(seed=int(self.np_random.integers(2**31)))
        return self._observed(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        from dm_control.rl.control import PhysicsError

        before = self.get_state()
        try:
            _, reward, solved, _, _ = self.inner.step(action)
        except PhysicsError:  # joint targets that jump can make the simulation diverge
            self.set_state(before)  # MuJoCo has reset it
            return self._observed(), 0.0, True, False, {"success": False}
        reward = float(solved) if self._sparse else float(reward)
        return self._observed(), reward, bool(solved), False, {"success": bool(solved)}

    def render(self) -> np.ndarray:
        return self._views.draw("angle", _PICTURE)[0]

    def close(self) -> None:
        self._views.close()

    def get_state(self) -> dict[str, Any]:
        return saved_state(*self._simulation, [])

    def set_state(self, saved: dict[str, Any]) -> None:
        restore_state(*self._simulation, [], saved)

    def gripper_pose(self) -> np.ndarray:
        """`[4, 4]`: pose in the world of the point between the fingers of the right arm."""
        hand = self._simulation[1].body("vx300s_right/camera_focus")
        return pose(hand.xpos, hand.xmat.reshape(3, 3))

    @property
    def _simulation(self) -> tuple[Any, Any]:
        physics = self.inner._env.physics
        return physics.model.ptr, physics.data.ptr

    def _observed(self) -> dict[str, Any]:
        """State: joints and gripper of the left arm (7), of the right arm (7); position and quaternion of objects."""
        physics, task = self.inner._env.physics, self.inner._env.task
        state = task.get_qpos(physics)
        if self._full:
            state = np.concatenate([state, task.get_env_state(physics)])
        return {"state": state, "instruction": self.instruction, **self._views.observed()}
