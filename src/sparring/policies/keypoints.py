"""Where things are in pictures: each channel of a CNN as a distribution over places, of which the mean is kept
(spatial softmax; Levine et al., 2016). Few numbers, so few demonstrations suffice."""

import torch
from torch import nn

from sparring.errors import UserError


class KeypointEncoder(nn.Module):
    """A CNN for each camera, its last channels read as points."""

    def __init__(self, cameras: int, image_size: tuple[int, int], channels: tuple[int, ...], features: int):
        super().__init__()
        # finer than what a flat CNN needs: a point can be told only as finely as the map is
        shapes = [(5, 2), *[(3, 2)] * (len(channels) > 1), *[(3, 1)] * (len(channels) - 2)]
        side = min(image_size)
        for kernel, stride in shapes:
            side = (side - kernel) // stride + 1
        if side < 2:
            raise UserError(
                f"images of {image_size[0]}x{image_size[1]} pixels are too small for the {len(channels)} convolutions "
                "of policy.channels; give fewer channels or larger images"
            )
        self.cameras = nn.ModuleList(_convolutions(channels, shapes) for _ in range(cameras))
        with torch.no_grad():
            rows, columns = self.cameras[0](torch.zeros(1, 3, *image_size)).shape[-2:]
        # where each place of the last map is, in -1..1: [places, 2]
        down, right = torch.meshgrid(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns), indexing="ij")
        self.register_buffer("places", torch.stack([right.flatten(), down.flatten()], -1), persistent=False)
        self.linear = nn.Linear(2 * channels[-1] * cameras, features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 [B, 3 * cameras, H, W] -> [B, features]
        pictures = images.float().mul_(1 / 255).chunk(len(self.cameras), 1)
        # [B, K, h, w] -> [B, K, places] -> [B, K, 2]
        maps = [
            net(x.contiguous(memory_format=torch.channels_last)) for net, x in zip(self.cameras, pictures, strict=True)
        ]
        points = [each.flatten(2).softmax(-1) @ self.places for each in maps]
        return torch.relu(self.linear(torch.cat(points, 1).flatten(1)))


def _convolutions(channels: tuple[int, ...], shapes: list[tuple[int, int]]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, width, (kernel, stride) in zip((3, *channels), channels, shapes, strict=False):
        layers += [nn.Conv2d(inputs, width, kernel, stride), nn.ReLU()]
    # the last map may be negative: it is a logarithm
    return nn.Sequential(*layers[:-1])
