"""Encoders: map images, point clouds, instructions and state to features."""

import math
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec, entry_of, images_of
from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.configs import EncoderConfig
from sparring.policies.instructions import ByteTokenizer, Instructions

STATE = ("observation", "state")
_ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "silu": nn.SiLU}
_LONGEST_TEXT = 256  # maximum bytes of an instruction
POINT_SCALE = 4.0  # metres -> about 1 at the edge of a table, as in observation/state


def mlp(inputs: int, hidden: tuple[int, ...], activation: str) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        linear = nn.Linear(inputs, width)
        nn.init.orthogonal_(linear.weight, math.sqrt(2))
        nn.init.zeros_(linear.bias)
        layers += [linear, _ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers)


def self_attention(projected: torch.Tensor, heads: int) -> torch.Tensor:
    """Attention of queries, keys and values [B, T, 3W] -> [B, T, W]. Not a fused kernel: with few tokens those are
    slower on a CPU, and their rounding depends on the batch size."""
    # [B, T, 3W] -> three of [B, heads, T, W / heads]
    queries, keys, values = projected.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    weights = (queries @ keys.mT * keys.shape[-1] ** -0.5).softmax(-1)
    return (weights.to(values.dtype) @ values).transpose(1, 2).flatten(2)


class ObservationEncoder(nn.Module):
    """Concatenates image, point and language features and the normalised state: `[B, size]`."""

    def __init__(self, config: EncoderConfig, spec: EnvSpec):
        super().__init__()
        self.spec, entries = spec, spec.observation
        self.cameras = [name for name in entries if name.startswith("image/")] if config.use_images else []
        self.images = _image_encoder(config, spec, self.cameras) if self.cameras else None
        self.points = _PointEncoder(config, spec) if "points" in entries else None
        features = config.language_features
        if features and not {"task", "instruction"} & set(entries):
            why = "this env has no instructions (observation/task or observation/instruction); set it to 0"
            raise UserError(f"policy.language_features={features}: {why}")
        self.language = InstructionEncoder(spec, features) if features else None
        state_size = math.prod(entries["state"][0]) if "state" in entries else 0
        self.has_state = bool(state_size)
        self.normalizer = RunningNormalizer(state_size) if state_size and config.normalize_observations else None
        self.dropout = nn.Dropout(config.dropout)
        self.frozen = config.freeze_encoder
        if self.frozen:
            self.requires_grad_(False)
        self.is_costly = self.images is not None or self.points is not None

        parts: list[tuple[list[str], int]] = [
            (self.cameras, getattr(self.images, "features", 0)),
            (["points"] if self.points is not None else [], config.point_features),
            (["state"] if state_size else [], state_size),
            ([self.language.texts.source or ""] if self.language is not None else [], config.language_features),
        ]
        self.in_keys = [("observation", *name.split("/")) for names, _ in parts for name in names]
        self.size = sum(size for names, size in parts if names)
        if not self.in_keys:
            advice = "set policy.use_images=true, or use an env with a state or points"
            raise UserError(f"the policy reads none of the env's observations ({', '.join(entries)}); {advice}")

    def forward(self, td: TensorDict) -> torch.Tensor:
        state = entry_of(td, self.spec, "state") if self.has_state else None
        parts = []
        if self.images is not None:
            views = images_of(td, self.spec, self.cameras)
            parts.append(self.dropout(self.images(views if isinstance(self.images, _MixedSizes) else _stacked(views))))
        if self.points is not None:
            parts.append(self.dropout(self.points(entry_of(td, self.spec, "points"), state)))
        if state is not None:
            parts.append(self.normalizer(state) if self.normalizer is not None else state)
        if self.language is not None:
            parts.append(self.language(td))
        features = torch.cat(parts, -1) if len(parts) > 1 else parts[0]
        return features.detach() if self.frozen else features


def _image_encoder(config: EncoderConfig, spec: EnvSpec, cameras: list[str]) -> nn.Module:
    kind: Any = {"flat": _ImageEncoder, "keypoints": _KeypointEncoder}[config.image_encoder]
    groups: dict[tuple[int, int], list[int]] = {}  # (H, W) -> cameras; only images of one size can be stacked
    for index, name in enumerate(cameras):
        height, width = spec.observation[name][0][1:]
        groups.setdefault((height, width), []).append(index)
    encoders = [kind(len(group), size, config.channels, config.image_features) for size, group in groups.items()]
    return encoders[0] if len(encoders) == 1 else _MixedSizes(encoders, list(groups.values()))


class _MixedSizes(nn.Module):
    """Encodes cameras of different sizes: one encoder per size; concatenates their features."""

    def __init__(self, encoders: "list[_ImageEncoder | _KeypointEncoder]", groups: list[list[int]]):
        super().__init__()
        self.encoders, self.groups = nn.ModuleList(encoders), groups
        self.features = sum(encoder.features for encoder in encoders)

    def forward(self, views: list[torch.Tensor]) -> torch.Tensor:
        parts = zip(self.encoders, self.groups, strict=True)
        # one [B, 3, H, W] per camera -> [B, features]
        return torch.cat([encoder(_stacked([views[index] for index in group])) for encoder, group in parts], -1)


def _stacked(views: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(views, 1) if len(views) > 1 else views[0]


def _convolutions(
    inputs: int, image_size: tuple[int, int], channels: tuple[int, ...], shapes: tuple, min_side: int, hint: str
) -> list[nn.Module]:
    """Convolutions of `shapes` (kernel, stride), the last one repeated; raises if a map has a side < `min_side`."""
    layers: list[nn.Module] = []
    side = min(image_size)
    shapes = shapes[: len(channels)] + shapes[-1:] * (len(channels) - len(shapes))
    for width, (kernel, stride) in zip(channels, shapes, strict=True):
        side = (side - kernel) // stride + 1
        if side < min_side:
            small = f"{image_size[0]}x{image_size[1]} pixels are too small for the {len(channels)} convolutions"
            raise UserError(f"images of {small} of policy.channels; give fewer channels or larger images{hint}")
        layers += [nn.Conv2d(inputs, width, kernel, stride), nn.ReLU()]
        inputs = width
    return layers


class _ImageEncoder(nn.Module):
    def __init__(self, cameras: int, image_size: tuple[int, int], channels: tuple[int, ...], features: int):
        super().__init__()
        self.features = features
        shapes, hint = ((8, 4), (4, 2), (3, 1)), " (36 pixels suffice for 3)"
        self.convolutions = nn.Sequential(*_convolutions(3 * cameras, image_size, channels, shapes, 1, hint))
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, 3 * cameras, *image_size)).numel()
        self.linear = nn.Linear(flat, features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 [B, 3 * cameras, H, W] -> [B, features]; with two cameras channels_last makes an update 1.4x faster
        images = images.contiguous(memory_format=torch.channels_last).float().mul_(1 / 255)
        return torch.relu(self.linear(self.convolutions(images).flatten(1)))


class _KeypointEncoder(nn.Module):
    """A CNN per camera with a spatial softmax (Levine et al., 2016): few features, so it needs few demonstrations."""

    def __init__(self, cameras: int, image_size: tuple[int, int], channels: tuple[int, ...], features: int):
        super().__init__()
        self.features = features
        shapes = ((5, 2), (3, 2), (3, 1))  # smaller strides than the flat CNN: keypoints are as precise as the map
        # without the last ReLU: the map holds softmax logits, which may be negative
        layers = (_convolutions(3, image_size, channels, shapes, 2, "")[:-1] for _ in range(cameras))
        self.cameras = nn.ModuleList(nn.Sequential(*convolutions) for convolutions in layers)
        with torch.no_grad():
            rows, columns = self.cameras[0](torch.zeros(1, 3, *image_size)).shape[-2:]
        # coordinates of each pixel of the last map, in -1..1: [pixels, 2]
        y, x = torch.meshgrid(torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns), indexing="ij")
        self.coordinates = nn.Buffer(torch.stack([x.flatten(), y.flatten()], -1), persistent=False)
        self.linear = nn.Linear(2 * channels[-1] * cameras, features)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # uint8 [B, 3 * cameras, H, W] -> [B, features]
        views = [x.contiguous(memory_format=torch.channels_last) for x in images.float().mul_(1 / 255).split(3, 1)]
        # [B, K, h, w] -> [B, K, pixels] -> [B, K, 2]
        maps = [net(view).flatten(2) for net, view in zip(self.cameras, views, strict=True)]
        points = [each.softmax(-1) @ self.coordinates for each in maps]
        return torch.relu(self.linear(torch.cat(points, 1).flatten(1)))


class _PointEncoder(nn.Module):
    """A PointNet: `[B, features]`. With point_frame=gripper, points are relative to the position of each hand."""

    def __init__(self, config: EncoderConfig, spec: EnvSpec):
        super().__init__()
        colours = spec.observation["points"][0][1] - 3
        self.hands = 0
        if config.point_frame == "gripper":
            if not spec.hand_entries:
                why = "this env does not declare hand positions in observation/state (EnvSpec.hand_entries)"
                raise UserError(f"policy.point_frame=gripper: {why}; set policy.point_frame=world")
            self.hands = len(spec.hand_entries) // 3
            self.hand_entries = nn.Buffer(torch.tensor(spec.hand_entries), persistent=False)
            self.hand_scale = spec.hand_scale
        layers: list[nn.Module] = []
        inputs = 3 * max(self.hands, 1) + colours
        for width in config.point_channels:
            layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU()]
            inputs = width
        self.each_point = nn.Sequential(*layers)
        self.output = nn.Sequential(nn.Linear(inputs, config.point_features), nn.LayerNorm(config.point_features))

    def forward(self, points: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        # [B, P, 6], [B, S] -> [B, features]; the state (not normalised) is read with point_frame=gripper only
        positions, colours = points[..., :3], points[..., 3:]
        if self.hands:
            assert state is not None
            hands = (state[:, self.hand_entries] / self.hand_scale)[:, None]  # [B, 1, 3 R]
            positions = positions.repeat(1, 1, self.hands) - hands
        return self.output(self.each_point(torch.cat([POINT_SCALE * positions, colours], -1)).amax(1))


class InstructionEncoder(nn.Module):
    """Embeds each byte and its position, applies a convolution, averages over the text: `[B, features]`."""

    def __init__(self, spec: EnvSpec, features: int):
        super().__init__()
        self.texts = Instructions(spec, _bytes_of, _LONGEST_TEXT if "instruction" in spec.observation else None)
        self.bytes = nn.Embedding(256, features)
        self.places = nn.Embedding(_LONGEST_TEXT, features)
        self.neighbours = nn.Conv1d(features, features, kernel_size=5, padding=2)
        self.output = nn.Sequential(nn.Linear(features, features), nn.LayerNorm(features))

    def forward(self, td: TensorDict) -> torch.Tensor:
        # encodes each distinct instruction once and selects one per row: [B, features]
        ids, mask, index = self.texts.distinct(td)
        mask = mask.float()[..., None]
        # [I, L, F]; positions after the end are zero before the convolution and not counted after it
        embedded = (self.bytes(ids) + self.places.weight[: ids.shape[1]]) * mask
        mixed = torch.nn.functional.silu(self.neighbours(embedded.mT).mT) * mask
        return self.output(mixed.sum(1) / mask.sum(1).clamp_min(1))[index]


def _bytes_of(text: str) -> list[int]:
    row = ByteTokenizer()(text)
    if len(row) > _LONGEST_TEXT:
        why = f"at most {_LONGEST_TEXT} are supported; shorten it, or set policy.language_features=0"
        raise UserError(f"the instruction {text[:40]!r}... has {len(row)} bytes, {why}")
    return row
