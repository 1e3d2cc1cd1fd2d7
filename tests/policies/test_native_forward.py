"""The forward pass with a preallocated cache equals that of the network. Plain torch stands in for the kernels."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import doubles_launches
import pytest
import torch
from doubles_native import Instructed, make_inputs, make_model, make_native
from test_native_graphs import Replayed

from sparring.envs.env import Env
from sparring.policies.native.hopper import forward
from sparring.policies.native.hopper.forward import Cache, HopperForward
from sparring.policies.native.hopper.graphs import ActingGraphs

SIZES = {"width": 64, "mlp": 128, "expert_width": 64, "expert_mlp": 128, "head_dim": 32}
# the tiles' largest number of tokens (`many`: no limit, code for many tokens) and the precision
TOLERANCES = {"64 fp16": 5e-3, "inf fp16": 5e-3, "many fp16": 5e-3, "inf fp32": 1e-5, "many fp32": 1e-5}


@pytest.fixture
def plain_launches(monkeypatch):
    monkeypatch.setitem(sys.modules, "sparring.policies.native.hopper.kernels", doubles_launches)
    monkeypatch.setattr(forward, "_has_hopper", lambda weight: True)


@pytest.fixture(params=["few", "many"])
def few_and_many(monkeypatch, request):
    monkeypatch.setattr(forward, "FEW_TOKENS", 1000 if request.param == "few" else 0)


def make_steps(model, room=9):
    return HopperForward(model, room, lambda function: function)


@pytest.mark.parametrize(("memory", "shared"), [(False, 1), (True, 2)])
def test_prefix_and_velocity_equal_those_of_the_network(plain_launches, few_and_many, memory, shared):
    model, inputs = make_model(**SIZES, kv_heads=shared, memory_size=3 if memory else 0), make_inputs(memory=memory)
    own, plain = make_steps(model), model.prefix(inputs)
    cache = own.prefix(inputs)
    torch.testing.assert_close(cache.features, plain.features)
    # repeated: a step does not depend on what earlier ones, or chunks of other lengths, left in the cache
    for seed, horizon in enumerate((7, 3, 7)):
        generator = torch.Generator().manual_seed(seed)
        x, t = torch.randn(3, horizon, 8, generator=generator), torch.rand(3, generator=generator)
        torch.testing.assert_close(own.velocity(x, t, cache), model.velocity(x, t, plain))


def test_images_are_encoded_as_by_the_network():
    vision = make_model(image_size=30, patch_size=6, vision_heads=4).vision
    images = torch.rand(3, 3, 30, 30)
    seen = forward._encode_images(vision, images, torch.float32, doubles_launches.Kernels.gelu_product)
    torch.testing.assert_close(seen, vision(images, torch.float32))


def test_the_prefix_needs_no_images(plain_launches):
    model, inputs = make_model(**SIZES), make_inputs(cameras=0)
    torch.testing.assert_close(make_steps(model).prefix(inputs).features, model.prefix(inputs).features)


def test_products_are_split_if_their_last_tiles_occupy_few_processors():
    # 68 x 8 tiles on 132 units: four full rounds, and 16 tiles more
    assert forward._full_rows(8704, 2048, processors=132) == 8448
    assert forward._full_rows(8448, 2048, processors=132) == 8448
    # the remainder is not small
    assert forward._full_rows(8000, 2048, processors=132) == 8000
    assert forward._full_rows(544, 2048, processors=132) == 544


def test_split_products_cover_all_rows(plain_launches, monkeypatch):
    monkeypatch.setattr(forward, "_full_rows", lambda rows, width, units: rows - 4)
    model = make_model(**SIZES | {"mlp": 192})
    torch.testing.assert_close(make_steps(model).prefix(make_inputs()).features, model.prefix(make_inputs()).features)


def test_a_chunk_longer_than_the_cache_is_refused(plain_launches):
    own = make_steps(make_model(**SIZES), room=5)
    with pytest.raises(ValueError, match="6 tokens, but the cache has room for 5"):
        own.velocity(torch.randn(3, 5, 8), torch.rand(3), own.prefix(make_inputs()))


@pytest.mark.parametrize("greedy", [True, False])
def test_a_policy_acts_the_same_with_kernels(plain_launches, greedy):
    plain, policy = make_native(method="flow_noise", **SIZES), make_native(method="flow_noise", **SIZES)
    fast = ActingGraphs(policy.model, policy.sampling_steps, False, False, record=Replayed, kernels=True, room=6)
    policy._acting_graphs = lambda robots: fast
    for seed in range(2):
        seen = Env(Instructed(3)).reset(seed).select("observation")
        size = plain.start_size if greedy else plain.noise_size
        seen["start" if greedy else "noise"] = torch.rand(3, size).clamp(0.01, 0.99)
        expected, acted = plain.act(seen.clone()), policy.act(seen.clone())
        torch.testing.assert_close(acted["action"], expected["action"])
        if not greedy:
            assert isinstance(fast._cached, Cache)
            torch.testing.assert_close(acted["value"], expected["value"])
            torch.testing.assert_close(acted["trace", "mean"], expected["trace", "mean"])


def test_networks_that_the_kernels_do_not_support_run_without_them(plain_launches):
    assert HopperForward.can_run(make_model(**SIZES))
    # widths must be multiples of 64; adapters are not supported
    assert not HopperForward.can_run(make_model())
    adapted = make_native(lora_r=2, **SIZES).model
    assert not HopperForward.can_run(adapted)
    fast = ActingGraphs(adapted, 4, False, False, record=Replayed, kernels=True)
    inputs, noise = make_inputs(), torch.randn(3, 4, 8)
    torch.testing.assert_close(fast.sample(inputs, noise), adapted.sample(inputs, noise, 4))
    assert not isinstance(fast.prefix(inputs), Cache)


def test_kernels_need_a_gpu():
    assert not forward._has_hopper(torch.zeros(1, dtype=torch.bfloat16)) and not HopperForward.can_run(
        make_model(**SIZES)
    )


def test_compilation_has_no_graph_break(plain_launches):
    model, inputs = make_model(**SIZES), make_inputs()
    compiled = HopperForward(model, 9, lambda function: torch.compile(function, backend="eager", fullgraph=True))
    x, t = torch.randn(3, 4, 8), torch.rand(3)
    with torch.no_grad():
        velocity = compiled.velocity(x, t, compiled.prefix(inputs))
        torch.testing.assert_close(velocity, model.velocity(x, t, model.prefix(inputs)))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_interpreted_kernels_agree_with_the_network():
    here = Path(__file__).parents[1] / "doubles"
    # read when triton is imported: needs a new process
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    run = subprocess.run(
        [sys.executable, here / "interpreted_steps.py"], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found.keys() == TOLERANCES.keys()
    assert {name: far for name, far in found.items() if far > TOLERANCES[name]} == {}


@pytest.mark.skipif(
    not torch.cuda.is_available() or not forward._has_hopper(torch.zeros(1, dtype=torch.bfloat16, device="cuda")),
    reason="needs a GPU of Hopper's generation",
)
@pytest.mark.parametrize("robots", [1, 3, 40, 80])
def test_on_a_gpu_kernels_agree_with_the_network(robots):
    model = make_model(width=128, mlp=256, expert_width=128, expert_mlp=256, head_dim=64).cuda().bfloat16()
    inputs = type(make_inputs())(
        *(None if x is None else x.cuda() for x in make_inputs(robots, lengths=tuple(i % 7 + 1 for i in range(robots))))
    )
    noise = torch.randn(robots, 5, 8, device="cuda")
    fast = ActingGraphs(model, 4, half=True, kernels=True)
    with torch.no_grad():
        for moved in (0, 1):
            given = inputs._replace(state=inputs.state + moved)
            expected = model.sample(given, noise, 4)
            assert (fast.sample(given, noise) - expected).abs().max() < 0.05 * expected.abs().max()
        assert isinstance(fast.prefix(inputs), Cache)
        t = torch.full((robots,), 0.5, device="cuda")
        expected = model.velocity(noise, t, model.prefix(inputs))
        assert (fast.velocity(noise, t) - expected).abs().max() < 0.05 * expected.abs().max()
