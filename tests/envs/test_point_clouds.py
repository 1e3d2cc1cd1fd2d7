"""`point_clouds` of depth images, compared with positions computed by hand and a brute-force sampler."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from sparring.envs.points import point_clouds

# a camera that sees 4 x 6 pixels; its focal length is 2 pixels
INTRINSICS = np.array([[[2.0, 0, 3], [0, 2, 2], [0, 0, 1]]])
HERE = np.eye(4)[None, None]


def depth_of(pixels: dict[tuple[int, int], float], height=4, width=6) -> np.ndarray:
    depth = np.zeros((1, 1, height, width), np.float32)
    for (row, column), metres in pixels.items():
        depth[0, 0, row, column] = metres
    return depth


def scene(rng, n=3, cameras=2, height=10, width=12):
    """Depth, intrinsics, poses and colours of random cameras."""
    depth = rng.uniform(0.3, 2, (n, cameras, height, width)).astype(np.float32)
    depth[rng.random(depth.shape) < 0.2] = 0
    intrinsics = np.array([[[11.0, 0.3, 6], [0, 12, 5], [0, 0, 1]]]) * np.ones((cameras, 1, 1))
    poses = np.tile(np.eye(4), (n, cameras, 1, 1))
    poses[..., :3, :3], poses[..., :3, 3] = np.linalg.qr(rng.normal(size=(n, cameras, 3, 3)))[0], rng.normal(size=3)
    return depth, intrinsics, poses, rng.integers(0, 256, (*depth.shape, 3), dtype=np.uint8)


def plain(depth, intrinsics, poses, count, colors, low, high, frame):
    """Pixel after pixel with matrices, then the definition of farthest-point sampling."""
    clouds = []
    for i in range(len(depth)):
        found = []
        for c, row, column in np.argwhere(depth[i] > 0).tolist():
            ray = np.linalg.inv(intrinsics[c]) @ [column + 0.5, row + 0.5, 1]
            position = (poses[i, c] @ [*(ray * depth[i, c, row, column]), 1])[:3]
            if (position > low).all() and (position < high).all():
                found.append((position, colors[i, c, row, column] / 255))
        xyz, middle = np.array([position for position, _ in found]), (np.array(low) + high) / 2
        chosen = [int(((xyz - middle) ** 2).sum(1).argmin())]
        while len(chosen) < min(count, len(xyz)):
            chosen.append(int(((xyz[:, None] - xyz[chosen]) ** 2).sum(2).min(1).argmax()))
        back = np.linalg.inv(frame[i])
        rows = [np.concatenate([back[:3, :3] @ xyz[k] + back[:3, 3], found[k][1]]) for k in chosen]
        clouds.append([rows[p % len(rows)] for p in range(count)])
    return np.array(clouds)


def test_pixels_are_back_projected_to_their_positions():
    depth = depth_of({(0, 0): 2, (3, 5): 4})
    # pixel centres: (0.5 - 3) / 2, (0.5 - 2) / 2 and (5.5 - 3) / 2, (3.5 - 2) / 2, times the depth
    near, far = [-2.5, -1.5, 2], [5, 3, 4]
    cloud = point_clouds(depth, INTRINSICS, HERE, 2)
    assert cloud.shape == (1, 2, 3) and cloud.dtype == np.float32
    assert sorted(cloud[0].tolist()) == [near, far]
    # a camera at (1, 2, 3) that looks along x, with y of the image downwards
    pose = np.array([[[[0, 0, 1, 1], [-1, 0, 0, 2], [0, -1, 0, 3], [0, 0, 0, 1.0]]]])
    cloud = point_clouds(depth, INTRINSICS, pose, 2)
    assert sorted(cloud[0].tolist()) == [[3, 4.5, 4.5], [5, -3, 0]]
    # intrinsics of each robot
    assert (point_clouds(depth, 2 * INTRINSICS[None], pose, 2) != cloud).any()


def test_zero_negative_and_infinite_depths_are_no_measurements():
    depth = depth_of({(0, 0): np.nan, (0, 1): np.inf, (0, 2): -1, (1, 2): 3, (1, 3): -np.inf})
    assert point_clouds(depth, INTRINSICS, HERE, 3).tolist() == [[[-0.75, -0.75, 3]] * 3]


def test_the_crop_box_is_in_the_world_and_the_frame_is_applied_after_it():
    depth = depth_of({(0, 0): 2, (3, 5): 4, (1, 2): 1})  # at (-2.5, -1.5, 2), (5, 3, 4), (-0.25, -0.25, 1)
    low, high = [-3, -2, 1.5], [3, 2, 2.5]
    assert point_clouds(depth, INTRINSICS, HERE, 1, low=low, high=high).tolist() == [[[-2.5, -1.5, 2]]]
    # a gripper at (-2, -1, 0), turned by 90 degrees about z: its x axis is the world's y axis
    frame = np.array([[[0, -1, 0, -2], [1, 0, 0, -1], [0, 0, 1, 0], [0, 0, 0, 1.0]]])
    cloud = point_clouds(depth, INTRINSICS, HERE, 1, low=low, high=high, frame=frame)
    assert cloud.tolist() == [[[-0.5, 0.5, 2]]]
    # bounds are outside the box
    assert not point_clouds(depth, INTRINSICS, HERE, 1, low=[-3, -2, 2], high=high).any()


def test_the_first_point_is_the_nearest_to_the_middle():
    depth = depth_of({(0, 0): 2, (3, 5): 4, (1, 2): 1})
    assert point_clouds(depth, INTRINSICS, HERE, 1, low=[0, 0, 0], high=[9, 9, 9])[0, 0].tolist() == [5, 3, 4]
    # without a box, the middle of the points: (1.25, 0.75, 2.5)
    assert point_clouds(depth, INTRINSICS, HERE, 1)[0, 0].tolist() == [-0.25, -0.25, 1]
    # without a limit in z only: (0, 0, 2.5)
    box = {"low": [-9, -9, 0], "high": [9, 9, np.inf]}
    assert point_clouds(depth, INTRINSICS, HERE, 1, **box)[0, 0].tolist() == [-0.25, -0.25, 1]


def test_few_points_are_repeated_and_an_empty_cloud_is_zeros():
    depth = np.concatenate([depth_of({(0, 0): 2, (3, 5): 4, (1, 2): 1}), depth_of({})])
    colors = np.full((2, 1, 4, 6, 3), [255, 0, 51], np.uint8)
    clouds = point_clouds(
        depth, INTRINSICS, np.tile(HERE, (2, 1, 1, 1)), 8, colors, frame=np.tile(np.eye(4), (2, 1, 1))
    )
    assert clouds.shape == (2, 8, 6) and len(np.unique(clouds[0], axis=0)) == 3
    np.testing.assert_array_equal(clouds[0], clouds[0, [0, 1, 2, 0, 1, 2, 0, 1]])
    np.testing.assert_allclose(clouds[0, :, 3:], [[1, 0, 0.2]] * 8, rtol=1e-6)
    assert not clouds[1].any()


@pytest.mark.parametrize("seed", range(3))
def test_clouds_agree_with_a_plain_implementation(seed):
    rng = np.random.default_rng(seed)
    depth, intrinsics, poses, colors = scene(rng)
    frame = poses[:, 1] @ np.linalg.inv(poses[:, 0])
    low, high = poses[0, 0, :3, 3] - [1.0, 1.2, 0.9], poses[0, 0, :3, 3] + [0.8, 1.0, 1.1]
    inputs = (depth, intrinsics, poses, 40, colors, low, high, frame)
    clouds = point_clouds(*inputs)
    np.testing.assert_allclose(clouds, plain(*inputs), rtol=1e-5, atol=1e-6)
    assert all(len(np.unique(cloud, axis=0)) == 40 for cloud in clouds)


@settings(max_examples=40, deadline=None)
@given(
    arrays(np.float32, (2, 1, 3, 4), elements=st.sampled_from([0, -1, np.nan, np.inf, 0.5, 1, 2])), st.integers(1, 9)
)
def test_points_are_pixels_and_each_is_chosen_before_any_is_repeated(depth, count):
    intrinsics, poses = np.array([[[4.0, 0, 2], [0, 4, 1.5], [0, 0, 1]]]), np.tile(HERE, (2, 1, 1, 1))
    clouds = point_clouds(depth, intrinsics, poses, count)
    for cloud, pixels in zip(clouds, depth[:, 0], strict=True):
        rows, columns = np.nonzero((pixels > 0) & (pixels < np.inf))
        z = pixels[rows, columns]
        possible = {*zip(((columns - 1.5) / 4 * z).tolist(), ((rows - 1) / 4 * z).tolist(), z.tolist(), strict=True)}
        chosen = {tuple(point) for point in cloud.tolist()}
        assert chosen <= (possible or {(0.0, 0.0, 0.0)})
        assert len(chosen) == min(count, max(len(possible), 1))
        # the distance of a point to those before it never grows
        gaps = [((cloud[k] - cloud[:k]) ** 2).sum(1).min() for k in range(1, len(chosen))]
        assert all(later <= earlier * 1.000001 for earlier, later in zip(gaps, gaps[1:], strict=False))


def test_tensors_give_the_same_points_as_arrays():
    depth, intrinsics, poses, colors = scene(np.random.default_rng(5))
    for frame in (None, poses[:, 1]):
        expected = point_clouds(depth, intrinsics, poses, 30, colors, [-2, -2, -2], [2, 2, 2], frame)
        tensors = [None if x is None else torch.from_numpy(x) for x in (depth, intrinsics, poses, colors, frame)]
        cloud = point_clouds(*tensors[:3], 30, tensors[3], [-2, -2, -2], torch.full((3,), 2), tensors[4])
        assert cloud.dtype == torch.float32
        np.testing.assert_array_equal(cloud.numpy(), expected)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_interpreted_kernel_chooses_the_same_points():
    program = Path(__file__).parents[1] / "doubles" / "interpreted_points.py"
    environment = os.environ | {"TRITON_INTERPRET": "1"}  # read when triton is imported: needs a new process
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("n", "size", "count"), [(1, 16, 40), (5, 96, 512), (64, 84, 1024)])
def test_on_a_gpu_the_same_points_are_chosen(n, size, count):
    rng = np.random.default_rng(n)
    depth, intrinsics, poses, colors = scene(rng, n, 2, size, size)
    intrinsics[:, :2] *= size / 12
    depth[0] = np.round(depth[0], 1)  # ties
    depth[-1, :, 3:] = 0  # few points
    frame = poses[:, 1]
    for low, high in ((None, None), (poses[0, 0, :3, 3] - 0.9, poses[0, 0, :3, 3] + 1.1)):
        expected = point_clouds(depth, intrinsics, poses, count, colors, low, high, frame)
        tensors = [torch.from_numpy(x).cuda() for x in (depth, intrinsics, poses, colors, frame)]
        cloud = point_clouds(*tensors[:3], count, tensors[3], low, high, tensors[4])
        assert cloud.is_cuda
        np.testing.assert_array_equal(cloud.cpu().numpy(), expected)
