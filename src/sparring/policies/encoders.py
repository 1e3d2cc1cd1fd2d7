"""Observations -> features."""

import math

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import RunningNormalizer

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}


def mlp(inputs: int, hidden: tuple[int, ...], activation: str) -> nn.Sequential:
    """Hidden layers only; the output layer belongs to whoever knows what it means."""
    layers: list[nn.Module] = []
    for width in hidden:
        linear = nn.Linear(inputs, width)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers)


class ImageEncoder(nn.Module):
    """All cameras, stacked as channels, through one small CNN."""

    kernels_and_strides = ((8, 4), (4, 2), (3, 1))

    def __init__(self, cameras: int, image_size: tuple[int, int], channels: tuple[int, ...], features: int):
        super().__init__()
        layers: list[nn.Module] = []
        inputs, side = 3 * cameras, min(image_size)
        for width, (kernel, stride) in zip(channels, self._shapes(len(channels)), strict=True):
            if side < kernel:
                raise UserError(
                    f"images of {image_size[0]}x{image_size[1]} pixels are too small for the {len(channels)} "
                    "convolutions of policy.channels; give fewer channels or larger images (36 pixels suffice for 3)"
                )
            side = (side - kernel) // stride + 1
            layers += [nn.Conv2d(inputs, width, kernel, stride), nn.ReLU()]
            inputs = width
        # with two cameras an update is 1.3 times as fast in this layout; with one it makes no difference
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, 3 * cameras, *image_size)).numel()
        self.linear = nn.Linear(flat, features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 [B, 3 * cameras, H, W] -> [B, features]
        images = images.contiguous(memory_format=torch.channels_last).float().mul_(1 / 255)
        return torch.relu(self.linear(self.convolutions(images).flatten(1)))

    def _shapes(self, layers: int):
        shapes = self.kernels_and_strides
        return shapes[:layers] + shapes[-1:] * (layers - len(shapes))


class ObservationEncoder(nn.Module):
    """Normalised state beside image features: `[B, size]`."""

    def __init__(self, config, spec):
        super().__init__()
        self.cameras = [name for name in spec.observation if name.startswith("image/")]
        state_size = math.prod(spec.observation["state"][0]) if "state" in spec.observation else 0
        self.in_keys = [("observation", *name.split("/")) for name in self.cameras]
        self.in_keys += [("observation", "state")] if state_size else []
        self.normalizer = RunningNormalizer(state_size) if state_size and config.normalize_observations else None
        self.has_state = bool(state_size)
        self.images = None
        if self.cameras:
            sizes = {spec.observation[name][0][1:] for name in self.cameras}
            if len(sizes) > 1:
                raise UserError(f"cameras of different sizes {sorted(sizes)} cannot be stacked; make them alike")
            height, width = sizes.pop()
            self.images = ImageEncoder(len(self.cameras), (height, width), config.channels, config.image_features)
        self.size = state_size + (config.image_features if self.cameras else 0)

    def forward(self, td: TensorDict) -> torch.Tensor:
        parts = []
        if self.images is not None:
            views = [td[("observation", *name.split("/"))] for name in self.cameras]
            parts.append(self.images(torch.cat(views, 1) if len(views) > 1 else views[0]))
        if self.has_state:
            state = td["observation", "state"]
            parts.append(self.normalizer(state) if self.normalizer is not None else state)
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]

    def update_normalizer(self, td: TensorDict, sum_over_processes) -> None:
        if self.normalizer is not None:
            self.normalizer.update(td["observation", "state"], sum_over_processes)
