"""Simulation of N robots: physics and rendering. Robots with equal scenes share one model and one batch."""

import copy
from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np

from sparring.envs.backend import Arrays, Picture
from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.scene import ARM_JOINTS, FINGERS, SCREEN, SUBSTEPS, Scene, load_mujoco
from sparring.envs.tabletop.tasks.base import Start
from sparring.errors import UserError

_ARM = ARM_JOINTS + FINGERS


class World:
    def __init__(
        self, scenes: list[Scene], threads: int, video_renderer: str = "builtin", possible: Sequence[Scene] = ()
    ):
        """`scenes[i]` is the scene of robot i. Arrays have room for the objects of all these and `possible` scenes."""
        if video_renderer == "mujoco":
            from sparring.envs.tabletop.render.mujoco import windowless_gl

            try:
                windowless_gl()
            except UserError as error:
                raise UserError(f"env.video_renderer=mujoco: {error}; or set env.video_renderer=builtin") from None
        kinds = list(dict.fromkeys(scenes))
        self._group = np.array([kinds.index(scene) for scene in scenes])
        self._local = np.zeros(len(scenes), np.int64)
        self._groups = []
        for number, scene in enumerate(kinds):
            mine = np.flatnonzero(self._group == number)
            self._local[mine] = np.arange(len(mine))
            self._groups.append(_Group(scene, len(mine), threads, video_renderer))
        self.num_objects = max(len(scene.objects) for scene in (*kinds, *possible))
        self.num_mechanisms = max(len(scene.mechanisms) for scene in (*kinds, *possible))
        self._arms = _ARM * len(kinds[0].arms)  # all robots have the same number of arms

    def objects(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions `[n, K, 3]` relative to the table's centre, quaternions `[n, K, 4]` and velocities `[n, K, 3]`."""
        n, k = len(rows), self.num_objects
        poses, velocity = np.zeros((n, k, 7)), np.zeros((n, k, 3))
        for group, at, local in self._split(rows):
            mine = len(group.poses)
            poses[at, :mine] = group.physics.qpos(local)[:, group.poses]
            velocity[at, :mine] = group.physics.qvel(local)[:, group.velocities]
        return poses[:, :, :3], poses[:, :, 3:], velocity

    def mechanisms(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Joints of the objects: positions `[n, m]` as parts of their travel, and speeds; zero for missing joints."""
        position, speed = np.zeros((2, len(rows), self.num_mechanisms))
        for group, at, local in self._split(rows) if self.num_mechanisms else ():
            mine = len(group.travel)
            position[at, :mine] = group.physics.qpos(local)[:, group.mechanisms] / group.travel
            speed[at, :mine] = group.physics.qvel(local)[:, group.mechanism_speeds] / group.travel
        return position, speed

    def arms(self, rows: np.ndarray, speeds: bool = False) -> np.ndarray:
        """`[n, R, 8]`: positions or speeds of the six joints and two fingers of each arm."""
        arms = np.empty((len(rows), self._arms))
        for group, at, local in self._split(rows):
            physics = group.physics
            arms[at] = (physics.qvel if speeds else physics.qpos)(local)[:, : self._arms]
        return arms.reshape(len(rows), -1, _ARM)

    def place(self, row: int, start: Start, clutter: np.ndarray) -> None:
        group, local = self._of(row)
        qpos = group.physics.model.qpos0.copy()
        qpos[: self._arms] = start.arm.ravel()
        qpos[group.poses] = start.objects
        qpos[group.clutter] = clutter
        qpos[group.mechanisms] = start.mechanisms * group.travel
        group.physics.place(local, qpos)

    def advance(self, rows: np.ndarray, control: np.ndarray) -> None:
        for group, at, local in self._split(rows):
            group.physics.advance(local, control[at])

    def touched(self, rows: np.ndarray) -> np.ndarray:
        out = np.zeros(len(rows), bool)
        for group, at, local in self._split(rows):
            out[at] = group.physics.touched[local]
        return out

    def set_friction(self, row: int, factor: float) -> None:
        group, local = self._of(row)
        group.physics.set_friction(local, factor)

    def set_appearance(self, row: int, rng: np.random.Generator, switches: Collection[str]) -> None:
        group, local = self._of(row)
        drawn = group.renderer().random_appearance(rng, switches)
        for all_rows, mine in zip(group.own_appearance(), drawn, strict=True):
            all_rows[local] = mine

    @property
    def has_screen(self) -> bool:
        return all(group.has_screen for group in self._groups)

    def set_noise(self, rows: np.ndarray, numbers: np.ndarray) -> None:
        for group, at, local in self._split(rows):
            group.own_appearance().noise[local] = numbers[at]

    def views(
        self,
        rows: np.ndarray,
        goal: np.ndarray,
        cameras: tuple[str, ...],
        size: int,
        kinds: tuple[str, ...] = ("rgb",),
        points: int = 0,
    ) -> Arrays:
        """`Renderer.views` of these robots: "rgb/<camera>", "depth/<camera>", "segmentation/<camera>", "points"."""
        views: Arrays = {}
        for group, at, local in self._split(rows):
            qpos, look = group.render_inputs(local)
            drawn = group.renderer().views(qpos, goal[at], cameras, size, look, kinds, points)
            if len(local) == len(rows):
                return drawn
            for name, pixels in drawn.items():
                views.setdefault(name, np.empty((len(rows), *pixels.shape[1:]), pixels.dtype))[at] = pixels
        return views

    @property
    def cameras(self) -> tuple[str, ...]:
        model = self._groups[0].physics.model
        return tuple(model.camera(i).name for i in range(model.ncam))

    @property
    def draws_later(self) -> bool:
        """False for MuJoCo's renderer: it works in one thread only, so `picture` draws at once."""
        return self._groups[0].video_renderer == "builtin"

    def picture(self, row: int, goal: np.ndarray) -> Picture:
        group, local = self._of(row)
        qpos, look = group.render_inputs([local])
        draw = partial(group.painter().picture, qpos, goal, look)
        return draw if self.draws_later else draw()

    def state(self) -> np.ndarray:
        rows = np.arange(len(self._group))
        state = np.zeros((len(rows), max(group.physics.state.shape[1] for group in self._groups)))
        for group, at, _ in self._split(rows):
            state[at, : group.physics.state.shape[1]] = group.physics.state
        return state

    def set_state(self, state: np.ndarray) -> None:
        for group, at, _ in self._split(np.arange(len(self._group))):
            group.physics.state[:] = state[at, : group.physics.state.shape[1]]

    def close(self) -> None:
        for group in self._groups:
            group.close()

    def _of(self, row: int) -> tuple["_Group", int]:
        return self._groups[self._group[row]], self._local[row]

    def _split(self, rows: np.ndarray) -> Iterator[tuple["_Group", np.ndarray | slice, np.ndarray]]:
        """Yield (group, positions in `rows`, rows of its physics) for each group that has any of these robots."""
        if len(self._groups) == 1:
            yield self._groups[0], slice(None), rows
            return
        numbers = self._group[rows]
        for number, group in enumerate(self._groups):
            at = np.flatnonzero(numbers == number)
            if len(at):
                yield group, at, self._local[rows[at]]


class _Group:
    """The robots with one scene."""

    appearance = None  # an Appearance with a row for each robot of the group; None: the standard one for all

    def __init__(self, scene: Scene, num_envs: int, threads: int, video_renderer: str):
        self._scene, self._num_envs, self._threads, self.video_renderer = scene, num_envs, threads, video_renderer
        self.physics = _Physics(scene.compile(), num_envs, threads)
        self._renderer = self._painter = None
        model = self.physics.model
        self.has_screen = any(model.geom(i).name == SCREEN for i in range(model.ngeom))
        objects, clutter = [thing.name for thing in scene.objects], [thing.name for thing in scene.clutter]
        # indices of the objects' poses [k, 7] in qpos and of their velocities [k, 3] in qvel
        positions, speeds = _addresses(model, objects)
        self.poses, self.velocities = positions[:, None] + np.arange(7), speeds[:, None] + np.arange(3)
        self.clutter = _addresses(model, clutter)[0][:, None] + np.arange(7)
        # indices [m] of the joints inside the objects, and their travel
        self.mechanisms, self.mechanism_speeds = _addresses(model, scene.mechanisms)
        self.travel = np.array([model.joint(name).range[1] for name in scene.mechanisms])

    def renderer(self):
        if self._renderer is None:
            from sparring.envs.tabletop.render.renderer import Renderer

            model = self.physics.model
            self._renderer = Renderer(model, Kinematics(model), self._threads, self._scene.marker)
        return self._renderer

    def painter(self):
        if self.video_renderer == "builtin":
            return self.renderer()
        if self._painter is None:
            from sparring.envs.tabletop.render.mujoco import MujocoRenderer

            self._painter = MujocoRenderer(self.physics.model, self._scene.marker)
        return self._painter

    def render_inputs(self, rows) -> tuple:
        """Joint positions and appearance of robots."""
        return self.physics.qpos(rows), None if self.appearance is None else self.appearance.rows(rows)

    def own_appearance(self):
        if self.appearance is None:
            self.appearance = self.renderer().standard_appearance(self._num_envs)
        return self.appearance

    def close(self) -> None:
        self.physics.close()
        for renderer in (self._renderer, self._painter):
            if renderer is not None:
                renderer.close()
        self._renderer = self._painter = None


def _addresses(model, joints: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    found = [model.joint(name) for name in joints]
    positions, speeds = [joint.qposadr[0] for joint in found], [joint.dofadr[0] for joint in found]
    return np.array(positions, np.int64), np.array(speeds, np.int64)


class _Physics:
    """N copies of one MuJoCo model, advanced by `mujoco.rollout`. A row of `state` `[N, nstate]` determines a robot's
    future in any process and thread (no warm start). `touched` `[N]`: a sensor detected contact in the last step."""

    def __init__(self, model, num_envs: int, threads: int):
        mujoco = load_mujoco()
        full = mujoco.mjtState.mjSTATE_FULLPHYSICS.value
        self.model = model
        self._control_spec = mujoco.mjtState.mjSTATE_CTRL.value
        threads = min(threads, num_envs)
        self._rollout = mujoco.rollout.Rollout(nthread=threads if threads > 1 else 0)
        self._models = [model] * num_envs  # shared until a robot gets its own friction
        self._own_models = False
        self._data = [mujoco.MjData(model) for _ in range(threads)]

        mujoco.mj_resetData(model, self._data[0])
        self._initial = np.empty(mujoco.mj_stateSize(model, full))
        mujoco.mj_getState(model, self._data[0], self._initial, full)
        self.state = np.tile(self._initial, (num_envs, 1))
        self._qpos = slice(1, 1 + model.nq)  # FULLPHYSICS begins with time, qpos, qvel
        self._qvel = slice(1 + model.nq, 1 + model.nq + model.nv)
        self._control = np.empty((num_envs, SUBSTEPS, model.nu))
        self._trajectory = np.empty((num_envs, SUBSTEPS, len(self._initial)))
        self._sensed = np.zeros((num_envs, SUBSTEPS, model.nsensordata))
        self.touched = np.zeros(num_envs, bool)

    def qpos(self, rows) -> np.ndarray:
        return self.state[rows, self._qpos]

    def qvel(self, rows) -> np.ndarray:
        return self.state[rows, self._qvel]

    def place(self, row: int, qpos: np.ndarray) -> None:
        self.state[row] = self._initial
        self.state[row, self._qpos] = qpos

    def set_friction(self, row: int, factor: float) -> None:
        if not self._own_models:
            self._models = [copy.copy(self.model) for _ in self._models]
            self._own_models = True
        self._models[row].geom_friction[:, 0] = factor * self.model.geom_friction[:, 0]

    def advance(self, rows: np.ndarray, control: np.ndarray) -> None:
        """Advance the robots `rows` `[n]` by one control step with motor targets `[n, nu]`."""
        n = len(rows)
        self._control[:n] = control[:, None]
        trajectory, sensed = self._trajectory[:n], self._sensed[:n]
        self._rollout.rollout(
            [self._models[row] for row in rows] if self._own_models else self._models[:n],
            self._data,
            self.state[rows],
            self._control[:n],
            control_spec=self._control_spec,
            nstep=SUBSTEPS,
            state=trajectory,
            sensordata=sensed if sensed.size else None,
            skip_checks=True,
        )
        self.state[rows] = trajectory[:, -1]
        self.touched[rows] = sensed.any(axis=(1, 2))

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.close()
            self._rollout = None
