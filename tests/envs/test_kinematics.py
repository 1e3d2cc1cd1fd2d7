"""Forward kinematics compared with mujoco's."""

import numpy as np
import pytest

from sparring.envs.tabletop.arm import Kinematics
from sparring.envs.tabletop.scene import ARM_JOINTS, HAND_SITE, HOME, Scene, load_mujoco

mujoco = load_mujoco()

# every joint kind, joints away from their body's origin, two joints on a body, a branch, turned frames
ODD_TREE = """
<mujoco>
  <worldbody>
    <body pos="0.1 0.2 0.3" euler="10 20 30">
      <joint type="slide" axis="1 2 3" ref="0.1"/>
      <joint type="hinge" axis="0 1 1" pos="0.05 -0.1 0.2" ref="20"/>
      <geom type="capsule" fromto="0 0 0 0.1 0.2 0.3" size="0.02"/>
      <body pos="0.2 0 0.1" quat="0.5 0.5 0.1 -0.7">
        <joint type="hinge" axis="1 0 0" pos="0 0.1 0"/>
        <geom size="0.05" pos="0 0 0.1"/>
        <site name="tip" pos="0.1 0.1 0.1" euler="0 40 0"/>
        <camera pos="0 0 1" euler="30 0 10"/>
      </body>
    </body>
    <body pos="1 1 1"><freejoint/><geom type="box" size="0.1 0.2 0.3" euler="45 0 0"/></body>
  </worldbody>
</mujoco>"""


def _models():
    return [Scene().compile(), mujoco.MjModel.from_xml_string(ODD_TREE)]


def _random_poses(model, n=5):
    # deliberately not normalised quaternions: mujoco normalises them too
    return np.random.default_rng(0).uniform(-1.5, 1.5, (n, model.nq))


@pytest.mark.parametrize("index", [0, 1])
def test_poses_agree_with_mujoco(index):
    model = _models()[index]
    kinematics, data, qpos = Kinematics(model), mujoco.MjData(model), _random_poses(model)
    poses = kinematics(qpos)
    ours = {name: poses.frames(getattr(kinematics, name + "s")) for name in ("geom", "site", "camera")}
    ours["body"] = poses.pos, poses.mat
    for i in range(len(qpos)):
        data.qpos[:] = qpos[i]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_camlight(model, data)
        for name, prefix in (("body", "x"), ("geom", "geom_x"), ("site", "site_x"), ("camera", "cam_x")):
            pos, mat = ours[name]
            np.testing.assert_allclose(pos[i], getattr(data, prefix + "pos"), atol=1e-9)
            np.testing.assert_allclose(mat[i].reshape(-1, 9), getattr(data, prefix + "mat"), atol=1e-9)


def test_jacobian_agrees_with_mujoco():
    model = Scene().compile()
    kinematics, data, qpos = Kinematics(model), mujoco.MjData(model), _random_poses(model)
    site = model.site(HAND_SITE).id
    poses = kinematics(qpos)
    hand, _ = poses.frames(kinematics.sites.pick([site]))
    ours = poses.jacobian(ARM_JOINTS, hand[:, 0])
    for i in range(len(qpos)):
        data.qpos[:] = qpos[i]
        mujoco.mj_forward(model, data)
        theirs = np.zeros((6, model.nv))
        mujoco.mj_jacSite(model, data, theirs[:3], theirs[3:], site)
        np.testing.assert_allclose(ours[i], theirs[:, :ARM_JOINTS], atol=1e-9)


def test_home_points_the_hand_straight_down():
    model = Scene().compile()
    kinematics = Kinematics(model)
    pos, mat = kinematics(np.array([[*HOME, 0.04, 0.04]])).frames(kinematics.sites)
    np.testing.assert_allclose(pos[0, 0], [-0.10, 0.0, 0.19], atol=1e-4)
    np.testing.assert_allclose(mat[0, 0], np.diag([-1.0, 1.0, -1.0]), atol=1e-4)


def test_ball_joint_is_refused():
    ball = "<mujoco><worldbody><body><joint type='ball'/><geom size='1'/></body></worldbody></mujoco>"
    with pytest.raises(ValueError, match="ball joint"):
        Kinematics(mujoco.MjModel.from_xml_string(ball))
