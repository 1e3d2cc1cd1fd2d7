class MplibPlanner:
    def __init__(
        self,
        urdf_path,
        srdf_path,
        move_group,
        robot_origion_pose,
        robot_entity,
        planner_type="mplib_RRT",
        scene=None,
    ):
        assert (urdf_path, srdf_path, planner_type) == ("arms.urdf", None, "mplib_RRT") and scene is not None
        self.TOPP = lambda path: path

    def plan_grippers(self, now_val, target_val):
        raise NotImplementedError
