"""Run by test_point_clouds.py: the Triton kernel, in Triton's interpreter on the CPU, against the numba kernel."""

import numpy as np
import torch

from sparring.envs import points, points_gpu


def main() -> None:
    rng = np.random.default_rng(0)
    points_gpu._BLOCK = 32  # several blocks a cloud
    torch.Tensor.is_cuda = property(lambda tensor: True)
    launches, sampler = [], points_gpu.farthest_on_gpu
    points_gpu.farthest_on_gpu = lambda *inputs: launches.append(inputs) or sampler(*inputs)
    for count in (1, 7, 90):
        # whole centimetres: many distances are equal
        depth = rng.integers(0, 6, (4, 2, 6, 8)).astype(np.float32) / 100
        depth[1, :, 2:], depth[2] = 0, 0  # few points and none
        intrinsics = np.array([[[100, 0, 4], [0, 100, 3], [0, 0, 1]]] * 2, np.float64)
        poses = np.tile(np.eye(4), (4, 2, 1, 1))
        poses[:, 1, :3, 3] = 0.01, -0.02, 0.03
        colors = rng.integers(0, 256, (4, 2, 6, 8, 3), dtype=np.uint8)
        for low, high in ((None, None), ([-0.005, -0.01, 0.0], [0.01, 0.01, 0.05])):
            expected = points.point_clouds(depth, intrinsics, poses, count, colors, low, high, poses[:, 1])
            given = [torch.from_numpy(x) for x in (depth, intrinsics, poses)]
            got = points.point_clouds(*given, count, torch.from_numpy(colors), low, high, torch.from_numpy(poses[:, 1]))
            np.testing.assert_array_equal(got.numpy(), expected)
            assert not expected[2].any() and expected[0].any()
    assert len(launches) == 6


if __name__ == "__main__":
    main()
