"""Observations -> features."""

import math

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.keypoints import KeypointEncoder
from sparring.policies.language import InstructionEncoder
from sparring.policies.points import PointEncoder

STATE = ("observation", "state")
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
        self.convolutions = nn.Sequential(*layers)
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, 3 * cameras, *image_size)).numel()
        self.linear = nn.Linear(flat, features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 [B, 3 * cameras, H, W] -> [B, features]; with two cameras an update is 1.4 times as fast in this layout,
        # with one it makes no difference. The weights' layout made none that lasted
        images = images.contiguous(memory_format=torch.channels_last).float().mul_(1 / 255)
        return torch.relu(self.linear(self.convolutions(images).flatten(1)))

    def _shapes(self, layers: int):
        shapes = self.kernels_and_strides
        return shapes[:layers] + shapes[-1:] * (layers - len(shapes))


class ObservationEncoder(nn.Module):
    """Image, point and language features beside the normalised state: `[B, size]`.

    Its parts are there where the env shows what they read (and, of images and language, where the config wants them).
    """

    def __init__(self, config, spec):
        super().__init__()
        shown = spec.observation
        self.cameras = [name for name in shown if name.startswith("image/")] if config.use_images else []
        self.images = _image_encoder(config, spec, self.cameras) if self.cameras else None
        self.points = PointEncoder(config, spec) if "points" in shown else None
        self.language = _language_encoder(config, spec) if config.language_features else None
        state_size = math.prod(shown["state"][0]) if "state" in shown else 0
        self.has_state = bool(state_size)
        self.normalizer = RunningNormalizer(state_size) if state_size and config.normalize_observations else None
        self.dropout = nn.Dropout(config.dropout)
        self.frozen = config.freeze_encoder
        if self.frozen:
            self.requires_grad_(False)
        # whether a second pass over the same observations is worth avoiding
        self.is_costly = self.images is not None or self.points is not None

        # what each part reads, and how many features it gives
        parts = [
            (self.cameras, config.image_features),
            (["points"] if self.points is not None else [], config.point_features),
            (["state"] if state_size else [], state_size),
            (["task"] if self.language is not None else [], config.language_features),
        ]
        self.in_keys = [("observation", *name.split("/")) for names, _ in parts for name in names]
        self.size = sum(size for names, size in parts if names)
        if not self.in_keys:
            raise UserError(
                f"the policy reads nothing of what the env shows ({', '.join(shown)}); set policy.use_images=true, or "
                "let the env show a state or points"
            )

    def forward(self, td: TensorDict) -> torch.Tensor:
        state = td[STATE] if self.has_state else None
        parts = []
        if self.images is not None:
            views = [td[("observation", *name.split("/"))] for name in self.cameras]
            parts.append(self.dropout(self.images(torch.cat(views, 1) if len(views) > 1 else views[0])))
        if self.points is not None:
            parts.append(self.dropout(self.points(td["observation", "points"], state)))
        if state is not None:
            parts.append(self.normalizer(state) if self.normalizer is not None else state)
        if self.language is not None:
            parts.append(self.language(td["observation", "task"]))
        features = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return features.detach() if self.frozen else features

    def update_normalizer(self, td: TensorDict, sum_over_processes) -> None:
        if self.normalizer is not None:
            self.normalizer.update(td[STATE], sum_over_processes)


def _image_encoder(config, spec, cameras: list[str]) -> ImageEncoder | KeypointEncoder:
    sizes = {spec.observation[name][0][1:] for name in cameras}
    if len(sizes) > 1:
        raise UserError(f"cameras of different sizes {sorted(sizes)} cannot be stacked; make them alike")
    kind = {"flat": ImageEncoder, "keypoints": KeypointEncoder}[config.image_encoder]
    return kind(len(cameras), tuple(sizes.pop()), config.channels, config.image_features)


def _language_encoder(config, spec) -> InstructionEncoder:
    if "task" not in spec.observation:
        raise UserError(
            f"policy.language_features={config.language_features}, but this env gives no instructions "
            "(observation/task); set it to 0"
        )
    return InstructionEncoder(spec.instructions, config.language_features)
