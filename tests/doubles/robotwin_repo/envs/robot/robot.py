from types import SimpleNamespace

import numpy as np

from .planner import MplibPlanner

COMPILED = []  # a planner by CuRobo was made


class Robot:
    def __init__(self, scene, need_topp=False, **kwargs):
        for arm in ("left", "right"):
            vars(self).update({f"{arm}_urdf_path": "arms.urdf", f"{arm}_srdf_path": None, f"{arm}_move_group": "arm"})
            vars(self).update({f"{arm}_entity_origion_pose": None, f"{arm}_entity": None})
            vars(self)[f"{arm}_planner_type"] = "mplib_RRT"
            vars(self)[f"{arm}_arm_joints"] = [SimpleNamespace(get_limits=lambda: np.array([[-3.0, 2.0]]))]

    def set_planner(self, scene=None):
        COMPILED.append(True)
        self.left_planner = MplibPlanner("arms.urdf", None, "arm", None, None, scene=scene)

    def get_left_arm_jointState(self):
        return self.q[:2]

    def get_right_arm_jointState(self):
        return self.q[2:]

    def get_left_tcp_pose(self):
        # a quarter turn about z
        return [1, 2, 3, np.sqrt(0.5), 0, 0, np.sqrt(0.5)]

    def get_right_tcp_pose(self):
        return [-1, 2, 3, 1, 0, 0, 0]
