"""robosuite: tasks of one or two arms on a table, e.g. `env.name=robosuite:Lift`.

`create` makes envs of any task that is registered with robosuite, for other adapters (mimicgen.py). It runs with
robosuite 1.5.2 and 1.4.1."""

import contextlib
import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from sparring.envs.sims.arguments import choice
from sparring.envs.sims.mujoco import Views, pose, restore_state, saved_state, seeded, without_gl
from sparring.errors import UserError

INSTRUCTIONS = {
    "Lift": "lift the cube",
    "Stack": "put the red cube onto the green cube",
    "NutAssembly": "put the square nut and the round nut onto their pegs",
    "NutAssemblySingle": "put the nut onto its peg",
    "NutAssemblySquare": "put the square nut onto the square peg",
    "NutAssemblyRound": "put the round nut onto the round peg",
    "PickPlace": "put all objects into their bins",
    "PickPlaceSingle": "put the object into its bin",
    "PickPlaceMilk": "put the milk into its bin",
    "PickPlaceBread": "put the bread into its bin",
    "PickPlaceCereal": "put the cereal into its bin",
    "PickPlaceCan": "put the can into its bin",
    "Door": "open the door",
    "Wipe": "wipe the table clean",
    "ToolHang": "put the frame into the stand and hang the tool on it",
    "TwoArmLift": "lift the pot with both arms and keep it level",
    "TwoArmPegInHole": "put the peg into the hole",
    "TwoArmHandover": "pick up the hammer with one arm and hand it to the other",
    "TwoArmTransport": "put the trash into the bin and carry the hammer to the other table",
}
_LIMIT = 500  # steps of an episode
_PICTURE = 256  # side of a video frame, pixels
_PHYSICS_STEP = 0.002  # seconds
_COLLISION = (0,)  # group of the shapes that only collide
# observed twice, or accelerations, which are mostly noise
_LEFT_OUT = ("joint_pos", "joint_acc", "eef_quat_site")
# their objects hold what changes during an episode; the others hold names, meshes and indices
_STATEFUL = (
    *("robosuite.robots", "robosuite.controllers", "robosuite.models.grippers"),
    *("robosuite.utils.buffers", "robosuite.utils.ik_utils", "robosuite.utils.traj_utils"),
)
_FORCES = ("ee_force_bias", "ee_torque_bias")


def make(name: str, **kwargs: Any) -> "Robosuite":
    if name not in INSTRUCTIONS:
        raise UserError(f"env.name=robosuite:{name} is unknown; expected {', '.join(INSTRUCTIONS)}")
    return create(name, INSTRUCTIONS[name], _LIMIT, **kwargs)


def create(
    task: str,
    instruction: str,
    limit: int,
    robots: list[str] | str | None = None,
    controller: str | None = None,
    cameras: list[str] | str = (),  # type: ignore[assignment]
    image_size: int = 64,
    depth: bool = False,
    state: Literal["full", "robot"] = "full",
    reward: Literal["dense", "sparse"] = "dense",
    control_freq: float = 20,
) -> "Robosuite":
    choice("state", state, ("full", "robot"))
    choice("reward", reward, ("dense", "sparse"))
    _check_frequency(control_freq)
    suite = import_robosuite()
    robots = robots or (["Panda", "Panda"] if task.startswith("TwoArm") else ["Panda"])
    robots = [robots] if isinstance(robots, str) else list(robots)
    if strange := [robot for robot in robots if robot not in suite.ALL_ROBOTS]:
        known = ", ".join(sorted(suite.ALL_ROBOTS))
        raise UserError(f"env.kwargs.robots: '{strange[0]}' is unknown; robosuite has {known}")
    with _seeded(0):  # sizes that are drawn once, with the model, are always the same
        inner = _make_inner(suite, task, robots, controller, reward == "dense", control_freq)
    views = Views(lambda: _simulation(inner), cameras, image_size, depth, hidden=_COLLISION)
    has_expert = not is_old(suite) and (task, robots, controller or "OSC_POSE") == ("Lift", ["Panda"], "OSC_POSE")
    kind = _Lift if has_expert else _Wipe if task == "Wipe" else Robosuite
    return kind(inner, instruction, limit, views, state == "full", reward == "sparse")


def import_robosuite() -> Any:
    logging.getLogger("robosuite_logs").addFilter(_is_error)
    try:
        with without_gl():
            import robosuite
    except ModuleNotFoundError as error:
        how = "see docs/simulators.md for the commands that install robosuite 1.5.2"
        raise UserError(f"robosuite needs the package {error.name}; {how}") from None
    return robosuite


def _is_error(record: logging.LogRecord) -> bool:
    """robosuite gives advice on import and at each reset. A logger adds the same filter once."""
    return record.levelno >= logging.ERROR


def _check_frequency(hz: Any) -> None:
    """robosuite cuts the period of an action to whole physics steps, and runs another frequency than it says."""
    if isinstance(hz, bool) or not isinstance(hz, int | float) or not 0 < hz <= 1 / _PHYSICS_STEP:
        raise UserError(f"env.kwargs.control_freq={hz!r}; expected actions per second, above 0 and at most 500")
    steps = 1 / hz / _PHYSICS_STEP
    if abs(steps - int(steps)) > 1e-9:
        near = ", ".join(f"{500 / count:g}" for count in (int(steps) + 1, int(steps)))
        why = "a period must be a whole number of physics steps of 2 ms"
        raise UserError(f"env.kwargs.control_freq={hz!r}: {why}; the nearest are {near}")


def _simulation(inner: Any) -> tuple[Any, Any]:
    return inner.sim.model._model, inner.sim.data._data


def _make_inner(
    suite: Any, task: str, robots: list[str], controller: str | None, dense: bool, control_freq: float
) -> Any:
    chosen: dict[str, Any] = {}
    if controller is not None:
        chosen["controller_configs"] = _controllers(suite, controller, robots)
    if not is_old(suite):
        chosen["seed"] = 0
    try:
        return suite.make(
            task,
            robots=robots,
            control_freq=control_freq,
            reward_shaping=dense,
            use_camera_obs=False,  # its own pictures are drawn at each step
            has_offscreen_renderer=False,
            renderer="mujoco",
            hard_reset=False,  # building the model takes 0.3 s
            ignore_done=True,
            **chosen,
        )
    except (AssertionError, ValueError) as error:
        given = f"robots={robots}, controller={controller}, control_freq={control_freq}"
        raise UserError(f"robosuite refuses {task} with {given}: {error}") from None


def is_old(suite: Any) -> bool:
    """Before 1.5: other controller files, and the global random generators of Python and numpy."""
    return not hasattr(suite, "load_composite_controller_config")


def _controllers(suite: Any, name: str, robots: list[str]) -> list[dict]:
    """The parameters of a named controller for each robot, as robosuite ships them."""
    if is_old(suite):
        parts, whole = list(suite.ALL_CONTROLLERS), []
    else:
        shipped = Path(suite.__file__).parent / "controllers" / "config" / "default" / "composite"
        parts = list(suite.ALL_PART_CONTROLLERS)
        whole = [key for key in suite.ALL_COMPOSITE_CONTROLLERS if (shipped / f"{key.lower()}.json").is_file()]
    if name not in parts + whole:
        raise UserError(f"env.kwargs.controller={name!r} is unknown; robosuite has {', '.join(parts + whole)}")
    if is_old(suite):
        return [suite.load_controller_config(default_controller=name) for _ in robots]
    if name in whole:
        return [suite.load_composite_controller_config(controller=name) for _ in robots]
    from robosuite.controllers.composite.composite_controller_factory import refactor_composite_controller_config
    from robosuite.models.robots.robot_model import REGISTERED_ROBOTS

    # arms get this controller, other parts keep the robot's own
    part = suite.load_part_controller_config(default_controller=name)
    return [refactor_composite_controller_config(part, robot, REGISTERED_ROBOTS[robot].arms) for robot in robots]


@contextlib.contextmanager
def _seeded(seed: int, inner: Any = None) -> Iterator[None]:
    """robosuite 1.5 has a generator of its own; 1.4 draws from the global ones."""
    with seeded(seed):
        if hasattr(inner, "rng"):  # in place: its samplers hold it too
            inner.rng.bit_generator.state = np.random.default_rng(seed).bit_generator.state
        yield


class Robosuite(gymnasium.Env):
    """Success: the task was solved at some step of the episode. With a sparse reward the episode ends there. It also
    ends where robosuite says so, as `Wipe` does when the arm collides."""

    def __init__(self, inner: Any, instruction: str, limit: int, views: Views, full: bool, sparse: bool):
        self.inner, self.instruction, self.max_episode_steps = inner, instruction, limit
        self._views, self._full, self._sparse = views, full, sparse
        self.camera_model = views.camera_model
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": inner.control_freq}
        self.render_mode = "rgb_array"
        self._seed, self._succeeded = 0, False
        low, high = inner.action_spec
        self.action_space = spaces.Box(low.astype(np.float32), high.astype(np.float32))
        shown: dict[str, spaces.Space] = {"instruction": spaces.Text(128)}
        shown["state"] = spaces.Box(-np.inf, np.inf, self._read_state().shape, np.float64)
        self.observation_space = spaces.Dict(shown | views.spaces())

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self._begin(int(self.np_random.integers(2**31)))
        self._state = self._read_state()
        return self._observed(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        _, reward, done, _ = self.inner.step(action)
        self._succeeded |= bool(self.inner._check_success())
        solved = self._sparse and self._succeeded
        self._state = self._read_state()
        reward = float(solved) if self._sparse else float(reward)
        return self._observed(), reward, solved or bool(done), False, {"success": self._succeeded}

    def render(self) -> np.ndarray:
        return self._views.draw("agentview", _PICTURE)[0]

    def close(self) -> None:
        self._views.close()

    def get_state(self) -> dict[str, Any]:
        saved = saved_state(*self._simulation, self._stateful())
        return {"seed": self._seed, "succeeded": self._succeeded, "state": self._state, "inner": saved}

    def set_state(self, saved: dict[str, Any]) -> None:
        self._begin(saved["seed"])  # what resets choose, such as the nut of NutAssemblySingle
        self._succeeded, self._state = saved["succeeded"], saved["state"]
        restore_state(*self._simulation, self._stateful(), saved["inner"])

    def gripper_pose(self) -> np.ndarray:
        """`[4, 4]`: pose in the world of the point between the fingers, of the first arm if there are several."""
        grippers = self.inner.robots[0].gripper
        gripper = next(iter(grippers.values())) if isinstance(grippers, dict) else grippers
        site = self._simulation[1].site(gripper.important_sites["grip_site"])
        return pose(site.xpos, site.xmat.reshape(3, 3))

    @property
    def _simulation(self) -> tuple[Any, Any]:
        return _simulation(self.inner)

    def _begin(self, seed: int) -> None:
        self._seed, self._succeeded = seed, False
        with _seeded(seed, self.inner):
            self.inner.reset()

    def _read_state(self) -> np.ndarray:
        import mujoco

        # positions and cameras belong to the joints before the last physics step
        for update in (mujoco.mj_kinematics, mujoco.mj_comPos, mujoco.mj_camlight):
            update(*self._simulation)
        # twice: its own observations are as old as the first physics step of an env step, and some of them are made of
        # others, as they were at the update before
        self.inner._update_observables(force=True)
        found = self.inner._get_observations(force_update=True)
        sensors = self.inner._observables
        names = [name for name in found if name in sensors and sensors[name].modality.endswith("_proprio")]
        names = [name for name in names if not name.endswith(_LEFT_OUT)]
        objects = [found["object-state"]] if self._full and "object-state" in found else []
        return np.concatenate([*(np.ravel(found[name]) for name in names), *objects]).astype(np.float64)

    def _stateful(self) -> list[Any]:
        """The env and the parts of it that have a state of their own, in a fixed order."""
        found, waiting = [self.inner], list(self.inner.robots)
        while waiting:
            one = waiting.pop(0)
            if isinstance(one, dict | list | tuple):
                waiting += one.values() if isinstance(one, dict) else one
            elif type(one).__module__.startswith(_STATEFUL) and not any(one is other for other in found):
                found.append(one)
                waiting += vars(one).values()
        return found

    def _observed(self) -> dict[str, Any]:
        return {"state": self._state, "instruction": self.instruction, **self._views.observed()}


class _Lift(Robosuite):
    """With a scripted expert, for one Panda with the controller OSC_POSE."""

    def expert_action(self) -> np.ndarray:
        """Move above the cube, down, close the gripper and lift, with the hand pointing down."""
        hand = self.gripper_pose()
        away = self._simulation[1].body(self.inner.cube.root_body).xpos - hand[:3, 3]
        grasps = self.inner._check_grasp(self.inner.robots[0].gripper, self.inner.cube)
        is_above = np.linalg.norm(away[:2]) < 0.025
        if grasps:
            move = np.array([0, 0, 0.1])
        else:
            move = away if is_above else away + [0, 0, 0.06]
        closes = grasps or (is_above and abs(away[2]) < 0.015)
        turn = np.cross(hand[:3, 2], [0, 0, -1])
        # 1 is 0.05 m or 0.5 rad
        return np.clip([*(30 * move), *(2 * turn), 1 if closes else -1], -1, 1).astype(np.float32)


class _Wipe(Robosuite):
    """It keeps a list of the markers that are wiped, and the forces on the hand before the first step."""

    def get_state(self) -> dict[str, Any]:
        wiped = [marker.root_body for marker in self.inner.wiped_markers]
        forces = {name: copy.deepcopy(getattr(self.inner, name)) for name in _FORCES}
        return super().get_state() | {"wiped": wiped, "forces": forces}

    def set_state(self, saved: dict[str, Any]) -> None:
        super().set_state(saved)
        markers = {marker.root_body: marker for marker in self.inner.model.mujoco_arena.markers}
        self.inner.wiped_markers = [markers[name] for name in saved["wiped"]]
        for name, value in saved["forces"].items():
            setattr(self.inner, name, value)
