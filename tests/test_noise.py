import numpy as np
import torch

from sparring.noise import keyed_uniform


def test_number_depends_on_its_key_only():
    whole = keyed_uniform(3, np.arange(6), np.arange(10), 4)
    part = keyed_uniform(3, np.array([5, 2]), np.array([7]), 4)
    assert np.array_equal(part[0], whole[7, [5, 2]])
    assert np.array_equal(keyed_uniform(3, np.arange(6), np.arange(10), 2), whole[..., :2])


def test_keys_do_not_collide_or_mirror_each_other():
    numbers = keyed_uniform(0, np.arange(64), np.arange(64), 16)
    assert len(np.unique(numbers)) > 0.995 * numbers.size
    assert not np.array_equal(keyed_uniform(0, [1], [2], 8), keyed_uniform(0, [2], [1], 8))
    assert not np.array_equal(keyed_uniform(0, [1], [2], 8), keyed_uniform(1, [1], [2], 8))


def test_numbers_are_uniform_and_normal_after_the_inverse():
    numbers = keyed_uniform(1, np.arange(100), np.arange(100), 20)
    assert numbers.dtype == np.float32 and numbers.min() > 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.003 and abs(numbers.std() - 12**-0.5) < 0.003
    # neighbouring dims, envs and decisions are uncorrelated
    for axis in range(3):
        a, b = np.delete(numbers, 0, axis), np.delete(numbers, -1, axis)
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.01
    normal = torch.special.ndtri(torch.from_numpy(numbers))
    assert normal.isfinite().all()
    assert abs(normal.std().item() - 1) < 0.01 and abs(normal.pow(4).mean().item() - 3) < 0.1
