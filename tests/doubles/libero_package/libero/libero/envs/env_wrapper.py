from types import SimpleNamespace

import numpy as np


class ControlEnv:
    """A hand on a line: the first entry of an action moves it, and at 1 the task is solved. The object stands where the
    initial state says, or where numpy's global generator does."""

    def __init__(
        self,
        bddl_file_name,
        robots=("Panda",),
        controller="OSC_POSE",
        gripper_types="default",
        initialization_noise=None,
        use_camera_obs=True,
        has_renderer=False,
        has_offscreen_renderer=True,
        render_camera="frontview",
        render_collision_mesh=False,
        render_visual_mesh=True,
        render_gpu_device_id=-1,
        control_freq=20,
        horizon=1000,
        ignore_done=False,
        hard_reset=True,
        camera_names=("agentview", "robot0_eye_in_hand"),
        camera_heights=128,
        camera_widths=128,
        camera_depths=False,
        camera_segmentations=None,
        renderer="mujoco",
        renderer_config=None,
        **kwargs,
    ):
        assert not use_camera_obs and not has_offscreen_renderer and ignore_done
        self.bddl, self.controller = bddl_file_name, controller
        self.env = SimpleNamespace(action_spec=(-np.ones(7), np.ones(7)))
        self.hard_reset = hard_reset
        self._make_simulation()

    def _make_simulation(self):
        model = object()
        self.sim = SimpleNamespace(model=SimpleNamespace(_model=model), data=SimpleNamespace(_data=model))

    def reset(self):
        if self.hard_reset:
            self._make_simulation()
        self.hand, self.object, self.idle = 0.0, np.random.rand(), 0
        return self._found()

    def set_init_state(self, init_state):
        (self.object,) = init_state
        return self._found()

    def step(self, action):
        print("stepped")
        self.hand += action[0]
        self.idle += list(action) == [0, 0, 0, 0, 0, 0, -1]
        return self._found(), float(self.check_success()), self.check_success(), {}

    def check_success(self):
        return self.hand >= 1

    def close(self):
        pass

    def _found(self):
        # a turn by 90 degrees about z, then the fingers
        half = np.sqrt(0.5)
        return {
            "robot0_eef_pos": np.array([self.hand, self.idle, 0.0]),
            "robot0_eef_quat": np.array([0, 0, half, half]),
            "robot0_gripper_qpos": np.array([0.04, -0.04]),
            "object-state": np.array([self.object]),
        }
