"""Encoders: images, point clouds, instructions and state to features."""

import difflib
import fnmatch
import math
import re
from collections.abc import Iterable

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import RunningNormalizer

# ---- Parts of a network by patterns of their names.


def matching(names: Iterable[str], patterns: Iterable[str], key: str) -> list[str]:
    """Those of `names` that a pattern means, in their order; every pattern must mean one, or the user is told.

    A pattern is a name or the end of one (from a dot on), where * and ? stand for anything, or a regex of the whole
    name; what is inside of a part that it means is meant too. `key`: the setting they come from.
    """
    names = list(names)
    # a part has a name that is the beginning of others'
    parts = list(dict.fromkeys(part for name in names for part in _path(name)))
    meant: set[str] = set()
    for pattern in patterns:
        found = {part for part in parts if means(pattern, part)}
        if not found:
            raise UserError(f"{key}: '{pattern}' matches no part of the model{_nearest(pattern, parts)}")
        meant |= found
    return [name for name in names if not meant.isdisjoint(_path(name))]


def weights_meant(model: nn.Module, patterns: Iterable[str], key: str) -> list[nn.Parameter]:
    weights = dict(model.named_parameters())
    return [weights[name] for name in matching(weights, patterns, key)]


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """The weights that the patterns of policy.frozen mean stay as they are."""
    for weight in weights_meant(model, patterns, "policy.frozen"):
        weight.requires_grad_(False)


def _path(name: str) -> list[str]:
    """'a.b.c' -> 'a', 'a.b', 'a.b.c'."""
    steps = name.split(".")
    return [".".join(steps[:count]) for count in range(1, len(steps) + 1)]


def means(pattern: str, name: str) -> bool:
    """Whether `name` itself is meant, not only something around it."""
    # with a dot before both, a glob that means a name or the end of one from a dot on
    if fnmatch.fnmatchcase(f".{name}", f"*.{pattern}") or fnmatch.fnmatchcase(name, pattern):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:  # a glob such as *.q_proj is no regex
        return False


def _nearest(pattern: str, parts: list[str]) -> str:
    # by whole names and by their ends: q_prj is near to q_proj
    ends = {part.rpartition(".")[2]: part for part in parts} | {part: part for part in parts}
    close = difflib.get_close_matches(pattern, ends, n=1) or difflib.get_close_matches(
        pattern.split(".")[-1], ends, n=1
    )
    return f"; nearest: {close[0]}" if close else f"; it has {', '.join(p for p in parts if '.' not in p)}"


# ---- Where things are in pictures: each channel of a CNN as a distribution over places, of which the mean is kept
# (spatial softmax; Levine et al., 2016). Few numbers, so few demonstrations suffice.


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


# ---- Point clouds -> features, whatever the order of the points (a PointNet).


# metres -> about 1 at the edge of a table, as in observation/state
_SCALE = 4.0


class PointEncoder(nn.Module):
    """Each point through the same small MLP, the maximum over points, and one more layer: `[B, features]`.

    In the gripper's frame a point is told by where it is from the hand (from each hand where there are two), so what
    is learned at one place of the table holds at all others. Only the position is taken off: the state that an env
    shows does not tell how the hand is turned about its fingers' axis.
    """

    def __init__(self, config, spec):
        super().__init__()
        colours = spec.observation["points"][0][1] - 3
        self.hands = 0
        if config.point_frame == "gripper":
            if not spec.hand_entries:
                raise UserError(
                    "policy.point_frame=gripper, but this env does not say where in observation/state its hands are "
                    "(EnvSpec.hand_entries); set policy.point_frame=world"
                )
            self.hands = len(spec.hand_entries) // 3
            self.register_buffer("hand_entries", torch.tensor(spec.hand_entries), persistent=False)
            self.hand_scale = spec.hand_scale
        layers: list[nn.Module] = []
        inputs = 3 * max(self.hands, 1) + colours
        for width in config.point_channels:
            layers += [nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU()]
            inputs = width
        self.each_point = nn.Sequential(*layers)
        self.output = nn.Sequential(nn.Linear(inputs, config.point_features), nn.LayerNorm(config.point_features))

    def forward(self, points: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
        # [B, P, 6], [B, S] -> [B, features]; the state is asked for in the gripper's frame only, as the env gave it
        places, colours = points[..., :3], points[..., 3:]
        if self.hands:
            # [B, 1, 3 R]
            hands = (state[:, self.hand_entries] / self.hand_scale)[:, None]
            places = places.repeat(1, 1, self.hands) - hands
        return self.output(self.each_point(torch.cat([_SCALE * places, colours], -1)).amax(1))


# ---- Instructions -> features, byte by byte: no vocabulary, so weights fit any instruction.


_LONGEST = 256


class InstructionEncoder(nn.Module):
    """An embedding of each byte and of its place, one convolution, the mean over the text: `[B, features]`.

    The instructions of an env are few, so all of them are encoded, once per call however large the batch is, and
    `observation/task` picks. Their bytes follow from the env, not from a checkpoint: other tasks, other words, same
    weights.
    """

    def __init__(self, instructions: tuple[str, ...], features: int):
        super().__init__()
        texts = [text.encode() for text in instructions]
        longest = max(texts, key=len)
        if len(longest) > _LONGEST:
            raise UserError(
                f"the instruction {longest.decode()[:40]!r}... has {len(longest)} bytes, at most {_LONGEST} can be "
                "read; shorten it, or set policy.language_features=0"
            )
        # [I, L], 0 after the end of a text
        table = torch.zeros(len(texts), max(len(longest), 1), dtype=torch.int64)
        for row, text in zip(table, texts, strict=True):
            row[: len(text)] = torch.tensor(list(text), dtype=torch.int64)
        self.register_buffer("table", table, persistent=False)
        lengths = torch.tensor([len(text) for text in texts])
        self.register_buffer("inside", (torch.arange(table.shape[1]) < lengths[:, None]).float(), persistent=False)
        self.bytes = nn.Embedding(256, features)
        self.places = nn.Embedding(_LONGEST, features)
        self.neighbours = nn.Conv1d(features, features, kernel_size=5, padding=2)
        self.output = nn.Sequential(nn.Linear(features, features), nn.LayerNorm(features))

    def forward(self, task: torch.Tensor) -> torch.Tensor:
        # [B] -> [B, features]
        return self.all()[task]

    def all(self) -> torch.Tensor:
        """`[I, features]`, of every instruction."""
        inside = self.inside[..., None]
        # [I, L, F]; what is past the end is zero before the convolution and not counted after it
        letters = (self.bytes(self.table) + self.places.weight[: self.table.shape[1]]) * inside
        words = torch.nn.functional.silu(self.neighbours(letters.mT).mT) * inside
        return self.output(words.sum(1) / inside.sum(1).clamp_min(1))


# ---- Observations -> features.


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
