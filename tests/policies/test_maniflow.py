"""Checkpoints of ManiFlow: read without executing code, mapped to the flow policy, with a report of the rest."""

import pickle
import runpy
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.policies.configs import FlowConfig
from sparring.policies.encoders import POINT_SCALE, self_attention
from sparring.policies.flow.policy import FlowPolicy
from sparring.runs.fits import load_pretrained

WIDTH, HORIZON, ACTIONS, FEATURES, HEADS, LAYERS = 24, 6, 4, 10, 3, 2
SETTINGS = {
    "point_channels": (64, 128, 256),
    "point_features": FEATURES,
    "width": WIDTH,
    "layers": LAYERS,
    "heads": HEADS,
}
SETTINGS |= {"horizon": HORIZON}
CONVERTER = Path(__file__).parents[2] / "examples" / "maniflow_checkpoint.py"


class PointNet(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        layers: list[nn.Module] = []
        sizes = [inputs, 64, 128, 256] + ([512] if inputs == 6 else [])
        for number, (size, width) in enumerate(zip(sizes, sizes[1:], strict=False)):
            layers += [nn.Linear(size, width)]
            layers += [nn.LayerNorm(width), nn.ReLU()] if number < 3 else []
        self.mlp = nn.Sequential(*layers)
        self.final_projection = nn.Sequential(nn.Linear(sizes[-1], FEATURES), nn.LayerNorm(FEATURES))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.cross_attn = nn.ModuleDict({"q": nn.Linear(WIDTH, WIDTH), "kv": nn.Linear(WIDTH, 2 * WIDTH)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 4 * WIDTH), "fc2": nn.Linear(4 * WIDTH, WIDTH)})
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 9 * WIDTH))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_emb, self.pos_emb = nn.Linear(ACTIONS, WIDTH), nn.Parameter(torch.randn(1, HORIZON, WIDTH))
        self.vis_cond_pos_embed = nn.Parameter(torch.randn(1, 16, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))


class ManiFlow(nn.Module):
    """The modules of ManiFlow's point-cloud policy that matter here, under their names."""

    def __init__(self, inputs: int = 3, seed: int = 0):
        torch.manual_seed(seed)
        super().__init__()
        state = nn.Sequential(nn.Linear(9, 64), nn.ReLU(), nn.Linear(64, 64))
        self.obs_encoder = nn.ModuleDict({"extractor": PointNet(inputs), "state_mlp": state})
        self.model = Transformer()

    def weights(self, highest: float = 1.0) -> dict[str, torch.Tensor]:
        stats = {"scale": torch.linspace(0.5, 3, 6), "offset": torch.linspace(-1, 1, 6)}
        stats["input_stats.max"] = torch.tensor([0.4, 0.4, 0.4, highest, highest, highest])
        normalizer = {f"normalizer.params_dict.point_cloud.{name}": tensor for name, tensor in stats.items()}
        return self.state_dict() | normalizer | {"normalizer.params_dict.action.scale": torch.ones(4)}


def policy_of(points: int = 3, **settings) -> FlowPolicy:
    spec = EnvSpec(observation={"points": ((32, points), "float32"), "state": ((9,), "float32")}, action_dim=ACTIONS)
    return FlowPolicy(FlowConfig(**{**SETTINGS, **settings}), spec, chunk=4)


def load(policy: FlowPolicy, weights: dict, folder: Path) -> str:
    save_file(weights, folder / "maniflow.safetensors")
    return load_pretrained(policy, folder / "maniflow.safetensors", SimpleNamespace(config=None, spec=None))


@pytest.mark.parametrize("points", [3, 6])
def test_features_of_points_are_those_of_maniflow(tmp_path, points):
    theirs, ours = ManiFlow(), policy_of(points)
    weights = theirs.weights()
    report = load(ours, weights, tmp_path)
    cloud = torch.randn(2, 32, points)
    scale, offset = (weights[f"normalizer.params_dict.point_cloud.{name}"][:3] for name in ("scale", "offset"))
    with torch.no_grad():
        expected = theirs.obs_encoder["extractor"].mlp(cloud[..., :3] * scale + offset)
        encoder = ours.encoder.points
        found = encoder.each_point(torch.cat([POINT_SCALE * cloud[..., :3], cloud[..., 3:]], -1))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # ours pools the points before the projection, as ManiFlow does with pointwise: false
        pooled = theirs.obs_encoder["extractor"].final_projection(expected.amax(1))
        torch.testing.assert_close(encoder(cloud, None), pooled, rtol=1e-4, atol=1e-5)
    assert "point encoder: 16 of 16 tensors\n" in report


@pytest.mark.parametrize("highest", [1.0, 255.0])
def test_of_the_colour_pointnet_the_layers_before_the_fourth_are_used(tmp_path, highest):
    theirs, ours = ManiFlow(6), policy_of(6, point_channels=(64, 128, 256, 512))
    before = ours.encoder.points.each_point[9].weight.clone()
    weights = theirs.weights(highest)
    report = load(ours, weights, tmp_path)
    cloud = torch.rand(1, 8, 6)
    normal = {name: weights[f"normalizer.params_dict.point_cloud.{name}"] for name in ("scale", "offset")}
    raw = torch.cat([cloud[..., :3], cloud[..., 3:] * highest], -1)
    with torch.no_grad():
        expected = theirs.obs_encoder["extractor"].mlp[:9](raw * normal["scale"] + normal["offset"])
        found = ours.encoder.points.each_point[:9](torch.cat([POINT_SCALE * cloud[..., :3], cloud[..., 3:]], -1))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert torch.equal(ours.encoder.points.each_point[9].weight, before)
    assert "point encoder: 12 of 20 tensors; new: encoder.points.each_point.9.weight" in report
    assert "obs_encoder.extractor.final_projection.*, obs_encoder.extractor.mlp.*" in report


def test_attention_positions_and_inputs_become_start_values(tmp_path):
    theirs, ours = ManiFlow(), policy_of(consistency=1.0)
    report = load(ours, theirs.weights(), tmp_path)
    tokens = torch.randn(2, HORIZON, WIDTH)
    for number in range(LAYERS):
        block = ours.velocity.blocks[number]
        with torch.no_grad():
            expected, _ = theirs.model.blocks[number].self_attn(tokens, tokens, tokens)
            found = block.attended(self_attention(block.queries_keys_values(tokens), HEADS))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        # the rest of the network is new: its blocks begin as the identity
        assert not block.modulation.weight.any()
    assert torch.equal(ours.velocity.position, theirs.model.pos_emb[0])
    assert torch.equal(ours.target.position, ours.velocity.position)
    assert "27 of 56 tensors" in report and "action transformer: 11 tensors, as start values" in report
    not_used = report.splitlines()[-1]
    for part in ("cross_attn.kv", "mlp.fc1", "adaLN_modulation.*", "vis_cond_pos_embed", "state_mlp.*", "action.scale"):
        assert part in not_used
    assert "self_attn" not in not_used and "point_cloud" not in not_used


def test_other_shapes_are_reported_with_the_settings_that_fit(tmp_path):
    ours = policy_of(width=12, horizon=8)
    report = load(ours, ManiFlow().weights(), tmp_path)
    assert "velocity.position [6, 24], here [8, 12]" in report and "action transformer: 0 tensors" in report
    settings = "policy.name=flow policy.point_channels=[64,128,256] policy.point_features=10 policy.width=24"
    assert f"set {settings} policy.layers=2 policy.horizon=6" in report


def test_a_policy_whose_point_encoder_does_not_fit_is_refused(tmp_path):
    ours = policy_of(point_channels=(32, 32), point_features=7)
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with pytest.raises(
        UserError, match=r"point encoder does not fit .* set policy.name=flow policy.point_channels=\[64,"
    ):
        load(ours, ManiFlow().weights(), tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())


def test_weights_with_nan_are_refused(tmp_path):
    weights = ManiFlow().weights()
    weights["model.pos_emb"][0, 0, 0] = torch.nan
    with pytest.raises(UserError, match=r"cannot be used: NaN.*model.pos_emb"):
        load(policy_of(), weights, tmp_path)


def payload(**parts) -> dict:
    """The content of a .ckpt of ManiFlow: averaged weights beside those of the last step, and pickles as bytes."""
    states = {"model": ManiFlow(seed=1).weights(), "ema_model": ManiFlow(seed=2).weights(), "optimizer": {"state": {}}}
    return {"state_dicts": states, "pickles": {"_output_dir": b"not read"}} | parts


def read(policy: FlowPolicy, file: Path) -> str:
    return load_pretrained(policy, file, SimpleNamespace(config=None, spec=None))


def test_averaged_weights_of_a_plain_checkpoint_are_read(tmp_path):
    torch.save(payload(), tmp_path / "latest.ckpt")
    ours = policy_of()
    assert "27 of 56 tensors" in read(ours, tmp_path / "latest.ckpt")
    assert torch.equal(ours.velocity.position, ManiFlow(seed=2).model.pos_emb[0])


NORMALIZER, FIRST = "normalizer.params_dict.point_cloud.", "obs_encoder.extractor.mlp.0.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({1: torch.ones(2)}, "it holds 1: Tensor"),
        ({"extra": "text"}, "it holds 'extra': str"),
        ({"model.pos_emb": torch.ones(6, 24)}, r"pos_emb has shape \[6, 24\], expected \[1, horizon, width\]"),
        ({"model.pos_emb": torch.tensor(1.0)}, r"pos_emb has shape \[\], expected"),
        ({f"{NORMALIZER}scale": torch.ones(2)}, r"scale has shape \[2\], expected \[3\]"),
        ({f"{NORMALIZER}offset": None}, "without normalizer.params_dict.point_cloud.offset"),
        ({f"{NORMALIZER}input_stats.max": torch.tensor(1.0)}, r"input_stats.max has shape \[\]"),
        ({FIRST: torch.ones(64, 7)}, r"mlp.0.weight has shape \[64, 7\], expected \[F, 3 or 6\]"),
        ({FIRST: torch.ones(64)}, r"mlp.0.weight has shape \[64\]"),
        ({FIRST.replace("weight", "bias"): torch.ones(5)}, r"mlp.0.bias has shape \[5\], expected \[64\]"),
    ],
)
def test_malformed_checkpoints_are_refused(tmp_path, changes, message):
    weights = {name: tensor for name, tensor in (ManiFlow().weights() | changes).items() if tensor is not None}
    torch.save({"state_dicts": {"model": weights}}, tmp_path / "latest.ckpt")
    with pytest.raises(UserError, match=message):
        read(policy_of(), tmp_path / "latest.ckpt")


class Malicious:
    """Its pickle creates a file when it is loaded."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_code_in_a_checkpoint_is_not_executed(tmp_path):
    torch.save(payload(cfg=Malicious(tmp_path / "executed")), tmp_path / "latest.ckpt")
    with pytest.raises(UserError, match=r"latest.ckpt' cannot be read: .*examples/maniflow_checkpoint.py"):
        read(policy_of(), tmp_path / "latest.ckpt")
    assert not (tmp_path / "executed").exists()
    # the file would have done it
    torch.load(tmp_path / "latest.ckpt", weights_only=False)
    assert (tmp_path / "executed").exists()


def test_converted_checkpoints_are_read(tmp_path, monkeypatch, capsys):
    # of dill, only its interface of pickle is used
    monkeypatch.setitem(sys.modules, "dill", pickle)
    texts = types.SimpleNamespace(to_yaml=lambda config, resolve: f"horizon: {config['horizon']}\n")
    monkeypatch.setitem(sys.modules, "omegaconf", types.SimpleNamespace(OmegaConf=texts))
    torch.save(payload(cfg={"horizon": 16}), tmp_path / "latest.ckpt")
    target = tmp_path / "maniflow.safetensors"
    monkeypatch.setattr(sys, "argv", ["maniflow_checkpoint.py", str(tmp_path / "latest.ckpt"), str(target)])
    runpy.run_path(str(CONVERTER), run_name="__main__")
    assert "56 tensors of ema_model" in capsys.readouterr().out
    assert (tmp_path / "maniflow.yaml").read_text() == "horizon: 16\n"
    assert load_file(target).keys() == ManiFlow().weights().keys()
    ours = policy_of()
    assert "point encoder: 16 of 16" in read(ours, target)
    assert torch.equal(ours.velocity.position, ManiFlow(seed=2).model.pos_emb[0])
    monkeypatch.setattr(sys, "argv", ["maniflow_checkpoint.py", "latest.ckpt"])
    with pytest.raises(SystemExit, match="expected: python maniflow_checkpoint.py FILE.ckpt FILE.safetensors"):
        runpy.run_path(str(CONVERTER), run_name="__main__")
