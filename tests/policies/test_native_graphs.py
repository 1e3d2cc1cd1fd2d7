"""Acting with CUDA graphs: the same actions, from the current weights. A double stands in for the CUDA graph."""

import copy

import pytest
import torch
from doubles_native import Instructed, make_inputs, make_model, make_native, rollout_of_native
from parity_cases import gate

from sparring.collect.collector import Collector
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.native.hopper.graphs import ActingGraphs

# setting the flags below makes torch warn of missing GPUs
pytestmark = pytest.mark.filterwarnings("ignore:TF32 acceleration")


@pytest.fixture(autouse=True)
def plain_bf16(request):
    """Disable oneDNN's bf16 kernels: their rounding differs between CPUs and between batch sizes."""
    with torch.backends.mkldnn.flags(enabled="bf16" not in request.node.name):
        yield


class Replayed:
    """Like a CUDA graph: every call copies its inputs into the same buffers and repeats the recorded function."""

    def __init__(self, function, tensors):
        self.function, self.inputs = function, [tensor.clone() for tensor in tensors]
        self.outputs = function(*self.inputs)

    def __call__(self, *tensors):
        for static, tensor in zip(self.inputs, tensors, strict=True):
            static.copy_(tensor)
        new = self.function(*self.inputs)
        several = isinstance(new, tuple)
        for static, tensor in zip(self.outputs if several else [self.outputs], new if several else [new], strict=True):
            static.copy_(tensor)
        return self.outputs


def fast_of(model, half=False, steps=4, record=Replayed):
    return ActingGraphs(model, steps, half, compiled=False, record=record)


def make_fast(policy):
    """A policy that acts as it would on a GPU."""
    fast = fast_of(policy.model, policy.config.precision == "bf16", policy.sampling_steps)

    def graphs(robots):
        if not fast.supports(robots):
            return None
        fast.refresh(policy._learned)
        policy._learned = False
        return fast

    policy._acting_graphs = graphs
    return policy


@pytest.mark.parametrize("greedy", [True, False])
def test_graphs_act_like_the_network(greedy):
    plain, fast = make_native(method="flow_noise"), make_fast(make_native(method="flow_noise"))
    for seed in range(3):
        seen = Env(Instructed(3)).reset(seed).select("observation")
        if greedy:
            seen["start"] = torch.rand(3, plain.start_size).clamp(0.01, 0.99)
        else:
            seen["noise"] = torch.rand(3, plain.noise_size).clamp(0.01, 0.99)
        expected, acted = plain.act(seen.clone()), fast.act(seen.clone())
        torch.testing.assert_close(acted["action"], expected["action"])
        if not greedy:
            torch.testing.assert_close(acted["value"], expected["value"])
            torch.testing.assert_close(acted["trace", "mean"], expected["trace", "mean"])


def test_greedy_without_a_start_graphs_act_like_the_network():
    seen = Env(Instructed(3)).reset(0).select("observation")
    torch.testing.assert_close(
        make_fast(make_native()).act(seen.clone())["action"], make_native().act(seen.clone())["action"]
    )


@pytest.mark.parametrize("memory", [0, 5])
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.02)])
def test_actions_from_graphs_pass_the_gate(precision, tolerance, memory):
    env = Env(Instructed(4))
    policy = make_fast(make_native(env.spec, precision=precision, memory_size=memory))
    buffer = RolloutBuffer(64)
    Collector(env, policy, seed=0, chunk=4).collect(buffer)
    gate(policy, buffer).check(tolerance)


def test_weight_copies_follow_updates_and_loading():
    policy, buffer = rollout_of_native(num_envs=4, precision="bf16")
    make_fast(policy)
    seen = Env(Instructed(3)).reset(0).select("observation")

    def agrees():
        expected = fast_of(policy.model, half=True).sample(policy.encoder(seen), policy._start(seen))
        return torch.equal(policy.act(seen.clone())["action"], policy._action_of(expected))

    assert agrees()
    before = policy.act(seen.clone())["action"]
    # an optimiser step: the values change without a new version in autograd
    policy.evaluate(buffer.get()[:4])["log_prob"].sum().backward()
    policy.model.action_out.weight.data.add_(0.1)
    assert agrees() and not torch.equal(before, policy.act(seen.clone())["action"])
    other = copy.deepcopy(policy.model.state_dict())
    other["action_out.weight"] += 1
    policy.model.load_state_dict(other)
    assert agrees()


def test_only_weights_of_another_precision_are_copied():
    model = make_model()
    assert fast_of(model)._copies == []
    copied = {id(weight) for _, weight in fast_of(model, half=True)._copies}
    assert {name for name, weight in model.named_parameters() if id(weight) not in copied} == {
        name for name, _ in model.named_parameters() if "norm" in name
    }
    frozen = make_native(precision="bf16", frozen=("vision.*", "trunk.*", "words.*")).model
    fast = fast_of(frozen, half=True)
    copied = {id(weight) for _, weight in fast._copies}
    assert {name.partition(".")[0] for name, weight in frozen.named_parameters() if id(weight) in copied} == {
        "projector",
        "expert",
        "state_in",
        "action_in",
        "time_in",
        "time_out",
        "action_out",
    }
    # trainable weights stay in fp32
    assert all(weight.dtype == torch.float32 for weight in frozen.parameters() if weight.requires_grad)


def test_weights_in_new_memory_invalidate_the_graphs():
    model = make_model()
    fast = fast_of(model)
    assert fast.is_valid()
    model.action_out.weight.data = model.action_out.weight.data.clone()
    assert not fast.is_valid()


def test_too_many_batch_sizes_are_not_recorded():
    model = make_model()
    fast = fast_of(model)
    for robots in (1, 2, 3, 4):
        assert fast.supports(robots)
        fast.sample(make_inputs(robots, lengths=(3,) * robots), torch.randn(robots, 4, 8))
    assert fast.supports(4) and not fast.supports(5)


def test_a_copy_of_a_policy_has_no_graphs():
    policy = make_native()
    policy._graphs = fast_of(policy.model)
    assert copy.deepcopy(policy)._graphs is None and policy._graphs is not None


def test_fast_needs_a_gpu():
    policy = make_native(fast=True)
    seen = Env(Instructed(3)).reset(0).select("observation")
    with pytest.raises(UserError, match="policy.fast=true needs a GPU, but the policy is on cpu"):
        policy.act(seen)
    assert make_native(precision="bf16")._acting_graphs(3) is None


def test_compilation_has_no_graph_break():
    model, inputs = make_model(), make_inputs()
    x, t = torch.randn(3, 4, 8), torch.rand(3)
    prefix = torch.compile(model.prefix, backend="eager", fullgraph=True)
    velocity = torch.compile(model.velocity, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(velocity(x, t, prefix(inputs)), model.velocity(x, t, model.prefix(inputs)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_graphs_agree_with_the_network(compiled):
    model = make_model().cuda().bfloat16()
    inputs = type(make_inputs())(*(None if x is None else x.cuda() for x in make_inputs()))
    noise = torch.randn(3, 4, 8, device="cuda")
    fast = ActingGraphs(model, 4, half=True, compiled=compiled)
    with torch.no_grad():
        expected = model.sample(inputs, noise, 4)
        assert (fast.sample(inputs, noise) - expected).abs().max() < 0.05 * expected.abs().max()
        # again, with other inputs in the same buffers
        other = inputs._replace(state=inputs.state + 1)
        expected = model.sample(other, noise, 4)
        assert (fast.sample(other, noise) - expected).abs().max() < 0.05 * expected.abs().max()
        prefix = model.prefix(inputs)
        assert (fast.prefix(inputs).features - prefix.features).abs().max() < 0.05 * prefix.features.abs().max()
        t = torch.full((3,), 0.5, device="cuda")
        expected = model.velocity(noise, t, prefix)
        assert (fast.velocity(noise, t) - expected).abs().max() < 0.05 * expected.abs().max()
