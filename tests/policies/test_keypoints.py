"""Keypoints: the position of the brightest pixel of an image, in -1..1."""

import pytest
import torch
from torch import nn

from sparring.errors import UserError
from sparring.policies.encoders import _KeypointEncoder as KeypointEncoder


def make_brightness_encoder() -> KeypointEncoder:
    """One channel for each of two cameras, with a weight so large that the softmax picks the brightest pixel."""
    encoder = KeypointEncoder(2, (65, 65), (1,), 4)
    for (convolution,) in encoder.cameras:
        nn.init.zeros_(convolution.weight)
        nn.init.zeros_(convolution.bias)
        convolution.weight.data[0, 0, 2, 2] = 1000.0
    # [right, down] of both cameras, unchanged
    encoder.linear = nn.Identity()
    return encoder


def test_the_keypoint_is_the_brightest_pixel():
    images = torch.zeros(1, 6, 65, 65, dtype=torch.uint8)
    # the map has 31 x 31 cells, at pixels 2, 4, ..., 62
    images[0, 0, 2 + 2 * 15, 2 + 2 * 30] = 255
    images[0, 3, 2, 2 + 2 * 15] = 255
    points = torch.cat([each.flatten(2).softmax(-1) for each in maps_of(make_brightness_encoder(), images)], 1)
    assert points.max() > 0.99
    # ReLU sets coordinates left of or above the centre to 0
    features = make_brightness_encoder()(images)
    torch.testing.assert_close(features, torch.tensor([[1.0, 0.0, 0.0, 0.0]]), atol=1e-3, rtol=0)
    images.zero_()
    images[0, 0, 2 + 2 * 24, 2 + 2 * 18] = 255
    images[0, 3, 2 + 2 * 21, 2] = 255
    expected = torch.tensor([[18 / 15 - 1, 24 / 15 - 1, 0.0, 21 / 15 - 1]])
    torch.testing.assert_close(make_brightness_encoder()(images), expected, atol=1e-3, rtol=0)


def maps_of(encoder, images):
    return [net(x) for net, x in zip(encoder.cameras, (images.float() / 255).chunk(2, 1), strict=True)]


def test_images_that_are_too_small_are_refused():
    with pytest.raises(UserError, match="16x16 pixels are too small for the 3 convolutions"):
        KeypointEncoder(1, (16, 16), (8, 8, 8), 4)
    assert KeypointEncoder(1, (32, 32), (8, 8, 8), 4)(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2, 4)
