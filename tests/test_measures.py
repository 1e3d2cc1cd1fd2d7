"""Measures of pictures, world models and explorers, on cases that can be worked out by hand."""

import math

import numpy as np
import pytest
import torch

from sparring.measures.images import Seen, changed, objects, psnr, squared_error, ssim


def flat(value: int, size: int = 16) -> torch.Tensor:
    return torch.full((1, 3, size, size), value, dtype=torch.uint8)


def test_ssim_of_a_picture_with_itself_is_one():
    picture = torch.randint(0, 256, (2, 3, 24, 24), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.allclose(ssim(picture, picture), torch.ones(2, dtype=torch.double))


def test_ssim_of_two_plain_pictures_is_their_brightness_term():
    # no variance: (2 a b + C1) / (a^2 + b^2 + C1)
    a, b = 51 / 255, 204 / 255
    expected = (2 * a * b + 1e-4) / (a * a + b * b + 1e-4)
    assert float(ssim(flat(51), flat(204))[0]) == pytest.approx(expected, abs=1e-9)


def test_ssim_of_a_negative_is_below_zero():
    board = ((torch.arange(16)[:, None] + torch.arange(16)) % 2 * 255).to(torch.uint8).expand(1, 3, 16, 16)
    assert float(ssim(board, 255 - board)[0]) < -0.9


def test_ssim_in_one_window_by_hand():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 1, 3, 11, 11)).astype(np.uint8)
    offset = np.arange(11) - 5
    weight = np.exp(-(offset[:, None] ** 2 + offset**2) / (2 * 1.5**2))
    weight /= weight.sum()
    values = []
    for x, y in zip(a[0] / 255, b[0] / 255, strict=True):
        mx, my = (weight * x).sum(), (weight * y).sum()
        vx, vy = (weight * (x - mx) ** 2).sum(), (weight * (y - my) ** 2).sum()
        cov = (weight * (x - mx) * (y - my)).sum()
        values.append((2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert float(ssim(torch.from_numpy(a), torch.from_numpy(b))[0]) == pytest.approx(np.mean(values), abs=1e-9)


def test_psnr_by_hand():
    error = squared_error(flat(0), flat(51))
    assert float(error.mean()) == pytest.approx(0.04)
    assert psnr(0.04) == pytest.approx(13.979, abs=1e-3) and psnr(0.0) == math.inf


def test_a_pixel_has_changed_when_one_colour_did():
    before, after = flat(100), flat(100)
    after[0, 1, 2, 3], after[0, 0, 5, 5], after[0, 2, 7, 7] = 109, 108, 0
    assert changed(before, after).nonzero().tolist() == [[0, 2, 3], [0, 7, 7]]


def test_objects_are_neither_robot_nor_screen_nor_marker():
    numbers = torch.tensor([0, 1, 2, 3, 9, 254, 255, 253], dtype=torch.uint8).view(1, 1, 2, 4)
    assert objects(numbers).flatten().tolist() == [False, False, False, True, True, False, False, True]


def segmentation(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.uint8).view(1, 1, 1, len(numbers))


def test_hidden_objects_were_seen_before_and_are_not_now():
    seen, here = Seen(1), torch.tensor([True])
    # object 3 is seen by one camera; 4 has never been seen
    first = seen.hidden({"a": segmentation(3, 2), "b": segmentation(1, 1)}, {"a": segmentation(3, 4)}, here)
    assert first["a"].tolist() == [[[False, False]]]
    # nobody sees 3 now: both cameras' pixels of it in the next frame are of a hidden object, 4's are not
    now, after = {"a": segmentation(1, 2), "b": segmentation(1, 1)}, {"a": segmentation(3, 4), "b": segmentation(2, 3)}
    hidden = seen.hidden(now, after, here)
    assert hidden["a"].tolist() == [[[True, False]]] and hidden["b"].tolist() == [[[False, True]]]
    # one camera sees it: hidden from nobody, though the other does not show it
    hidden = seen.hidden({"a": segmentation(1, 3), "b": segmentation(1, 1)}, after, here)
    assert not hidden["a"].any() and not hidden["b"].any()
    # robot, scenery and screen are no objects, however they come and go
    hidden = seen.hidden({"a": segmentation(1, 1)}, {"a": segmentation(2, 254)}, here)
    assert not hidden["a"].any()
