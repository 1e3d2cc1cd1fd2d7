"""The physics and the pictures of N robots whose scenes may differ.

Robots with equal scenes form a group with one model and one physics batch. Rows are the env's, in any order; arrays of
joint positions and speeds are as wide as the largest scene needs, zero where a robot's own scene ends.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sparring.envs.backend import Arrays
from sparring.envs.tabletop.arm import ARM_JOINTS, FINGERS
from sparring.envs.tabletop.kinematics import Kinematics
from sparring.envs.tabletop.physics import Physics
from sparring.envs.tabletop.scene import Scene

_ARM = ARM_JOINTS + FINGERS


class Objects(NamedTuple):
    """The free bodies of n robots; all zero where a robot has fewer than K."""

    # [n, K, 3] from the table's centre, [n, K, 4] (w, x, y, z), [n, K, 3]
    pos: np.ndarray
    quat: np.ndarray
    velocity: np.ndarray


class World:
    def __init__(self, scenes: list[Scene], threads: int):
        """`scenes[i]` is what robot i has before it."""
        kinds = list(dict.fromkeys(scenes))
        self._group = np.array([kinds.index(scene) for scene in scenes])
        self._local = np.zeros(len(scenes), np.int64)
        self._groups = []
        for number, scene in enumerate(kinds):
            mine = np.flatnonzero(self._group == number)
            self._local[mine] = np.arange(len(mine))
            self._groups.append(_Group(scene, len(mine), threads))
        self.num_objects = max(len(scene.objects) for scene in kinds)
        # all robots have equally many arms
        self._arms = _ARM * len(kinds[0].arms)
        self._widths = (self._arms + 7 * self.num_objects, self._arms + 6 * self.num_objects)

    def qpos(self, rows: np.ndarray) -> np.ndarray:
        if len(self._groups) == 1:
            return self._groups[0].physics.qpos(rows)
        out = np.zeros((len(rows), self._widths[0]))
        for group, at, local in self._split(rows):
            out[at, : group.physics.model.nq] = group.physics.qpos(local)
        return out

    def qvel(self, rows: np.ndarray) -> np.ndarray:
        if len(self._groups) == 1:
            return self._groups[0].physics.qvel(rows)
        out = np.zeros((len(rows), self._widths[1]))
        for group, at, local in self._split(rows):
            out[at, : group.physics.model.nv] = group.physics.qvel(local)
        return out

    def objects(self, rows: np.ndarray) -> Objects:
        n, k = len(rows), self.num_objects
        # [n, 8 R + 7 K] -> [n, K, 7]
        poses = self.qpos(rows)[:, self._arms :].reshape(n, k, 7)
        speeds = self.qvel(rows)[:, self._arms :].reshape(n, k, 6)
        return Objects(poses[:, :, :3], poses[:, :, 3:], speeds[:, :, :3])

    def arms(self, rows: np.ndarray) -> np.ndarray:
        """`[n, R, 8]`: six joints and two fingers of each arm."""
        return self.qpos(rows)[:, : self._arms].reshape(len(rows), -1, _ARM)

    def arm_speeds(self, rows: np.ndarray) -> np.ndarray:
        return self.qvel(rows)[:, : self._arms].reshape(len(rows), -1, _ARM)

    def place(self, row: int, arms: np.ndarray, objects: np.ndarray) -> None:
        """Put one robot at rest with its arms at `[R, 8]` and its objects at poses `[k, 7]`."""
        physics = self._groups[self._group[row]].physics
        physics.place(self._local[row], np.concatenate([arms.ravel(), objects.ravel()]))

    def advance(self, rows: np.ndarray, control: np.ndarray) -> None:
        if len(self._groups) == 1:
            return self._groups[0].physics.advance(rows, control)
        for group, at, local in self._split(rows):
            group.physics.advance(local, control[at])

    def images(self, rows: np.ndarray, goal: np.ndarray, cameras: tuple[str, ...], size: int) -> Arrays:
        """Camera -> uint8 `[n, 3, size, size]`."""
        images = {name: np.empty((len(rows), 3, size, size), np.uint8) for name in cameras}
        for group, at, local in self._split(rows):
            drawn = group.renderer().images(group.physics.qpos(local), goal[at], cameras, size)
            if len(at) == len(rows):
                return drawn
            for name in cameras:
                images[name][at] = drawn[name]
        return images

    def picture(self, row: int, goal: np.ndarray) -> np.ndarray:
        group = self._groups[self._group[row]]
        return group.renderer().picture(group.physics.qpos([self._local[row]]), goal)

    def state(self) -> np.ndarray:
        """`[N, width]`: all that the physics of each robot depends on."""
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

    def _split(self, rows: np.ndarray) -> Iterator[tuple["_Group", np.ndarray, np.ndarray]]:
        """(group, places in `rows`, rows of that group's physics) of each group that has any."""
        of = self._group[rows]
        for number, group in enumerate(self._groups):
            at = np.flatnonzero(of == number)
            if len(at):
                yield group, at, self._local[rows[at]]


class _Group:
    def __init__(self, scene: Scene, num_envs: int, threads: int):
        self._scene, self._threads = scene, threads
        self.physics = Physics(scene.compile(), num_envs, threads)
        self._renderer = None

    def renderer(self):
        """Built when the first picture is asked for."""
        if self._renderer is None:
            from sparring.envs.tabletop.render import Renderer

            model = self.physics.model
            self._renderer = Renderer(model, Kinematics(model), self._threads, self._scene.marker)
        return self._renderer

    def close(self) -> None:
        self.physics.close()
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
