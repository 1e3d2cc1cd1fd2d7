"""N copies of one MuJoCo model advanced together by `mujoco.rollout`, over threads.

A row of `state` is all that a robot's future depends on: each rollout starts from it with no warm start, so the result
is the same in any process and with any number of threads.
"""

import copy

import numpy as np

from sparring.envs.tabletop.scene import SUBSTEPS, load_mujoco


class Physics:
    """`state` is `[N, nstate]`; `qpos(rows)` and `qvel(rows)` read from it.

    `touched` is `[N]`: did any of the model's sensors, which all sense touch, answer in the last control step?
    """

    def __init__(self, model, num_envs: int, threads: int):
        mujoco = load_mujoco()
        full = mujoco.mjtState.mjSTATE_FULLPHYSICS.value
        self.model = model
        self._control_spec = mujoco.mjtState.mjSTATE_CTRL.value
        # one thread: rollout runs on the caller's
        threads = min(threads, num_envs)
        self._rollout = mujoco.rollout.Rollout(nthread=threads if threads > 1 else 0)
        # one for all, until a robot gets a friction of its own
        self._models = [model] * num_envs
        self._own_models = False
        self._data = [mujoco.MjData(model) for _ in range(threads)]

        mujoco.mj_resetData(model, self._data[0])
        self._initial = np.empty(mujoco.mj_stateSize(model, full))
        mujoco.mj_getState(model, self._data[0], self._initial, full)
        self.state = np.tile(self._initial, (num_envs, 1))
        # FULLPHYSICS begins with time, qpos, qvel
        self._qpos = slice(1, 1 + model.nq)
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
        """Put one robot at rest in this pose."""
        self.state[row] = self._initial
        self.state[row, self._qpos] = qpos

    def set_friction(self, row: int, factor: float) -> None:
        """From now on everything about this robot rubs so many times as much."""
        if not self._own_models:
            self._models = [copy.copy(self.model) for _ in self._models]
            self._own_models = True
        self._models[row].geom_friction[:, 0] = factor * self.model.geom_friction[:, 0]

    def advance(self, rows: np.ndarray, control: np.ndarray) -> None:
        """One control step of the robots `rows` `[n]` under motor targets `[n, nu]`."""
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
            # it refuses an array without columns
            sensordata=sensed if sensed.size else None,
            skip_checks=True,
        )
        self.state[rows] = trajectory[:, -1]
        self.touched[rows] = sensed.any(axis=(1, 2))

    def close(self) -> None:
        if self._rollout is not None:
            self._rollout.close()
            self._rollout = None
