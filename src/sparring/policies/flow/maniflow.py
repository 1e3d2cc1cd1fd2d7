"""Weights of ManiFlow's point-cloud policy for FlowPolicy; names and shapes as in its public source
(github.com/geyan21/ManiFlow_Policy, commit c631661).

Its features of points are those of our point encoder. Its action transformer is another network: it attends to every
point, takes a second time, has wider MLPs, and its velocity is that from noise to action. Only the parts with the same
role and shape are used there, as start values for imitation.
Letters: F features of a point, W width of the transformer."""

import re
from collections.abc import Mapping

import torch
from torch import nn

from sparring.errors import UserError
from sparring.policies.encoders import POINT_SCALE
from sparring.policies.weights import Weights, WeightsFit

_EXTRACTOR, _NORMALIZER = "obs_encoder.extractor.", "normalizer.params_dict.point_cloud."
_FIRST = "encoder.points.each_point.0."
# its name -> ours
_RENAMED = (
    (r"obs_encoder\.extractor\.mlp\.(\d+\.\w+)", r"encoder.points.each_point.\1"),
    (r"obs_encoder\.extractor\.final_projection\.(\d+\.\w+)", r"encoder.points.output.\1"),
    (r"model\.input_emb\.(\w+)", r"velocity.input.\1"),
    (r"model\.pos_emb", r"velocity.position"),
    (r"model\.blocks\.(\d+)\.self_attn\.in_proj_(\w+)", r"velocity.blocks.\1.queries_keys_values.\2"),
    (r"model\.blocks\.(\d+)\.self_attn\.out_proj\.(\w+)", r"velocity.blocks.\1.attended.\2"),
)


def is_maniflow(weights: Mapping[str, torch.Tensor]) -> bool:
    return "model.pos_emb" in weights and any(name.startswith("obs_encoder.") for name in weights)


def load_maniflow(policy: nn.Module, weights: Weights, source: str) -> str:
    """Load what fits, and return a report of it for the log. Raise if nothing of the point encoder fits."""
    _check_shapes(weights, source)
    expected = policy.state_dict()
    given = {name: each for name, each in _renamed(weights, expected).items() if name in expected}
    used = {name: tensor for name, (tensor, _) in given.items() if tensor.shape == expected[name].shape}
    encoder = [name for name in expected if name.startswith("encoder.points.")]
    own = [name for name in encoder if name not in used]
    advice = f"for its shapes, set {_settings(weights)}"
    if len(own) == len(encoder):
        raise UserError(
            f"'{source}' is a checkpoint of ManiFlow whose point encoder does not fit this policy; {advice}"
        )
    policy.load_state_dict(used, strict=False)
    if isinstance(target := getattr(policy, "target", None), nn.Module):
        target.load_state_dict(policy.velocity.state_dict())  # type: ignore[operator, union-attr]

    of_encoder = len(encoder) - len(own)
    lines = [
        f"{len(used)} of {len(weights)} tensors of a checkpoint of ManiFlow; the policy must now learn by imitation",
        f"point encoder: {of_encoder} of {len(encoder)} tensors" + (f"; new: {WeightsFit.some(own)}" if own else ""),
        f"action transformer: {len(used) - of_encoder} tensors, as start values",
    ]
    reshaped = [
        f"{name} {list(x.shape)}, here {list(expected[name].shape)}"
        for name, (x, _) in given.items()
        if name not in used
    ]
    if reshaped:
        lines.append(f"of another shape: {'; '.join(reshaped)}; {advice}")
    read = {given[name][1] for name in used} | {name for name in weights if name.startswith(_NORMALIZER)}
    parts = [re.sub(r"\.\d+\b", ".*", re.sub(r"\.(weight|bias)$", "", n)) for n in weights if n not in read]
    return "\n  ".join([*lines, f"not used: {', '.join(dict.fromkeys(parts))}"])


def _check_shapes(weights: Weights, source: str) -> None:
    """Raise if a tensor that is computed with has an impossible shape; others are compared with ours."""
    first = weights.get(f"{_EXTRACTOR}mlp.0.weight", torch.zeros(1, 3))
    features, inputs = first.shape if first.ndim == 2 else (0, 0)
    shapes = {
        f"{_EXTRACTOR}mlp.0.weight": (r"\d+, [36]", "[F, 3 or 6]"),
        f"{_EXTRACTOR}mlp.0.bias": (f"{features}", f"[{features}]"),
        f"{_EXTRACTOR}final_projection.0.weight": (r"\d+, \d+", "[features, F]"),
        "model.pos_emb": (r"1, \d+, \d+", "[1, horizon, width]"),
    }
    normalizer = [f"{_NORMALIZER}{name}" for name in ("scale", "offset", "input_stats.max")]
    shapes |= dict.fromkeys(normalizer, (f"{inputs}|6", f"[{inputs}]"))
    for name, (pattern, expected) in shapes.items():
        tensor = weights.get(name)
        if tensor is not None and not re.fullmatch(pattern, ", ".join(map(str, tensor.shape))):
            what = f"'{source}' is not a checkpoint of ManiFlow's policy of points: {name} has shape"
            raise UserError(f"{what} {list(tensor.shape)}, expected {expected}; download it again")
    scale, offset = normalizer[:2]
    if (scale in weights) != (offset in weights):
        lost = offset if scale in weights else scale
        raise UserError(f"'{source}' has the normaliser of points without {lost}; download it again")


def _renamed(weights: Weights, expected: Weights) -> dict[str, tuple[torch.Tensor, str]]:
    """Our name -> the tensor as our network needs it, and its name there."""
    given = {}
    for theirs, tensor in weights.items():
        for pattern, ours in _RENAMED:
            if re.fullmatch(pattern, theirs):
                given[re.sub(pattern, ours, theirs)] = tensor.float(), theirs
    if f"{_EXTRACTOR}mlp.9.weight" in weights:
        # the PointNet for colours has neither a norm nor an activation after its fourth layer, and ours has both
        given = {n: x for n, x in given.items() if not re.match(r"encoder\.points\.(each_point\.9|output)\.", n)}
    if "velocity.position" in given:
        position, theirs = given["velocity.position"]
        given["velocity.position"] = position[0], theirs  # [1, H, W] -> [H, W]
    first, offset = (given.get(f"{_FIRST}{kind}") for kind in ("weight", "bias"))
    if first is not None and offset is not None and f"{_FIRST}weight" in expected:
        inputs = expected[f"{_FIRST}weight"].shape[1]
        weight, bias = _of_metres(first[0], offset[0], weights, inputs)
        given |= {f"{_FIRST}weight": (weight, first[1]), f"{_FIRST}bias": (bias, offset[1])}
    return given


def _of_metres(weight: torch.Tensor, bias: torch.Tensor, weights: Weights, inputs: int) -> tuple[torch.Tensor, ...]:
    """The first layer, with weights `[F, 3 or 6]`, for the points of our encoder, which no normaliser scales. Colours
    that it did not read have the weight 0."""
    count = weight.shape[1]
    if f"{_NORMALIZER}scale" in weights:
        scale, offset = (weights[f"{_NORMALIZER}{name}"].float()[:count] for name in ("scale", "offset"))
        weight, bias = weight * scale, bias + weight @ offset
    highest = weights.get(f"{_NORMALIZER}input_stats.max", torch.ones(count))[3:]
    # its colours may be 0..255, ours are 0..1
    units = torch.tensor([1 / POINT_SCALE] * 3 + [255.0 if bool((highest > 1).any()) else 1.0] * 3)
    weight = weight * units[:count]
    return nn.functional.pad(weight, (0, 3)) if (count, inputs) == (3, 6) else weight, bias


def _settings(weights: Weights) -> str:
    """The settings with which the shapes of a policy agree with those of the checkpoint."""
    layers = [x for name, x in weights.items() if re.fullmatch(r"obs_encoder\.extractor\.mlp\.\d+\.weight", name)]
    channels = [str(len(x)) for x in layers if x.ndim == 2]
    found = {"policy.name": "flow", "policy.point_channels": f"[{','.join(channels)}]"}
    projection = weights.get(f"{_EXTRACTOR}final_projection.0.weight")
    if projection is not None:
        found["policy.point_features"] = str(len(projection))
    _, horizon, width = weights["model.pos_emb"].shape
    blocks = {match[1] for name in weights if (match := re.match(r"model\.blocks\.(\d+)\.", name))}
    found |= {"policy.width": str(width), "policy.layers": str(len(blocks)), "policy.horizon": str(horizon)}
    return " ".join(f"{key}={value}" for key, value in found.items()) + " and an env with points"
