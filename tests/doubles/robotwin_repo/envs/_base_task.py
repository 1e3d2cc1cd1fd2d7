from types import SimpleNamespace

import numpy as np

import envs

from .robot import Robot
from .utils.create_actor import UnStableError


class Camera:
    def get_observer_rgb(self):
        return np.full((24, 32, 3), 9, np.uint8)


class Base_Task:
    """Two arms of one joint and a gripper each. The task is solved when both joints are beyond 1."""

    opened, closed = 0, 0

    def _init_task_env_(self, table_xy_bias=(0, 0), table_height_bias=0, **kwags):
        assert kwags["left_embodiment_config"] == {"arms": 2} and kwags["dual_arm_embodied"]
        np.random.seed(kwags["seed"])
        self.start, self.need_plan = np.random.rand(), kwags["need_plan"]
        self.data_type, self.step_lim, self.arguments = kwags["data_type"], None, kwags
        self.eval_success, self.looked, self.updated = False, 0, 0
        self.opened += 1
        print("a line for each set-up")
        if kwags["seed"] % 2:
            raise UnStableError("objects do not come to rest")
        self.load_robot(**kwags)
        self.cameras = Camera()

    def load_robot(self, **kwags):
        if not hasattr(self, "robot"):
            self.robot = Robot(SimpleNamespace(), True, **kwags)
            self.robot.set_planner(SimpleNamespace())
        self.robot.q = [self.start, 0.0, -self.start, 1.0]

    def _update_render(self):
        self.updated += 1

    def get_obs(self):
        self.looked += 1
        shown = {}
        for number, camera in enumerate(("left_camera", "right_camera", "head_camera")):
            shown[camera] = {"intrinsic_cv": np.diag([20.0, 20.0, 1.0]), "extrinsic_cv": np.eye(4)[:3]}
            shown[camera]["rgb"] = np.full((12, 16, 3), 10 * number, np.uint8)
            if self.data_type.get("depth", False):
                shown[camera]["depth"] = np.full((12, 16), 1250.0)
        return {"observation": shown}

    def get_arm_pose(self, arm_tag):
        return [float(envs.GPU or -1), 0, 0, 1, 0, 0, 0]

    def close_env(self, clear_cache=False):
        self.closed += 1

    def take_action(self, action, action_type="qpos"):
        assert action.shape == ((4,) if action_type == "qpos" else (16,))
        print("a line for each step")
        planner = self.robot.left_mplib_planner if action_type == "qpos" else self.robot.left_planner
        self.robot.q = planner.TOPP(action)[-4:].tolist()
        self.eval_success = self.robot.q[0] > 1 and self.robot.q[2] > 1
