"""Two gloo ranks train one VLA, including cases in which some weights get no gradient."""

import pytest
import torch
from doubles_vla import RandomCameraEnv, config
from test_distributed import on_two_ranks

from sparring.algorithms.configs import GRPOConfig
from sparring.algorithms.grpo import GRPO
from sparring.algorithms.ppo import _weight
from sparring.collect.collector import Collector
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.policy import make_policy
from sparring.processes.distributed import Distributed

pytestmark = pytest.mark.usefixtures("forked")
STEPS, ROBOTS = 6, 4
CASES = {
    # the value head is trainable, but no loss of GRPO uses it
    "no critic_parts": {"critic_parts": ()},
    "adapters of an unread layer": {"model": "UnusedLayer", "lora_r": 2, "critic_parts": ()},
    "frozen parts": {"frozen": ("vision", "words")},
}
# rollouts of process 1, where process 0 has 24 decisions
UNEVEN = {"8 decisions": {}, "24 decisions of episodes that are all alike": {"kl_coef": 0.5}}
# with a large epsilon Adam's steps are proportional to gradients
LEARNING = GRPOConfig(mini_batch_size=STEPS * ROBOTS, epochs=2, adam_eps=1.0, policy_lr=0.1, max_grad_norm=0.05)


def made(settings: dict, seed: int):
    torch.manual_seed(seed)
    return make_policy(config(**settings), RandomCameraEnv(1).spec, 1).eval()


def rollout_of(policy, rank: int):
    """Each robot's decisions are one episode; pairs of robots are a group."""
    buffer = RolloutBuffer(STEPS)
    Collector(Env(RandomCameraEnv(ROBOTS), "cpu"), policy, seed=rank).collect(buffer)
    rollout = buffer.rollout()
    robot = torch.arange(ROBOTS) + rank * ROBOTS
    rollout["episode"], rollout["group"] = robot.repeat(STEPS, 1), (robot // 2).repeat(STEPS, 1)
    rollout["valid"] = torch.ones(STEPS, ROBOTS, dtype=torch.bool)
    rollout["next", "reward"] = robot.float().repeat(STEPS, 1)[..., None]
    return rollout.clone()


def uneven_rollout_of(policy, rank: int, case: str):
    rollout = rollout_of(policy, rank)
    if rank == 1 and case == "8 decisions":
        rollout["valid"][2:] = False
    elif rank == 1:
        rollout["next", "reward"][:] = 1.0
    return rollout


def weights_of(policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.state_dict().items()}


def updates_on_this_rank(folder):
    """Run by each of two processes."""
    torch.set_num_threads(1)
    distributed = Distributed("cpu")
    results = {}
    for case, settings in CASES.items():
        for micro in (None, 5):
            # as in a run, each process initialises different weights
            policy = made(settings, seed=distributed.rank)
            algorithm = GRPO(LEARNING.model_copy(update={"micro_batch_size": micro}), policy, distributed)
            before, rollout, averaged = weights_of(policy), rollout_of(policy, distributed.rank), []
            average = distributed.average_
            distributed.average_ = lambda vector, a=average, seen=averaged: (seen.append(len(vector)), a(vector))
            metrics = algorithm.update(rollout.clone())
            del distributed.average_
            results[case, micro] = {
                "before": before,
                "after": weights_of(policy),
                "rollout": rollout,
                "grad_norm": metrics["grad_norm"],
                "averaged": averaged,
            }
    for case, settings in UNEVEN.items():
        for micro in (None, 5):
            policy = made({"critic_parts": ()}, seed=0)
            before, rollout = weights_of(policy), uneven_rollout_of(policy, distributed.rank, case)
            learning = LEARNING.model_copy(update=settings | {"micro_batch_size": micro})
            metrics = GRPO(learning, policy, distributed).update(rollout.clone())
            results[case, micro] = {"before": before, "after": weights_of(policy), "rollout": rollout} | metrics
    results["errors"] = _errors_of_different_models(distributed)
    results["kinds"] = _buffers_of_many_kinds(distributed)
    torch.save(results, f"{folder}/rank{distributed.rank}.pt")


def _errors_of_different_models(distributed) -> list[str]:
    first, errors = distributed.is_main, []
    for ours in (
        {"frozen": () if first else ("joints.bias",)},
        {"frozen": ("joints.bias",) if first else ("joints.weight",)},
        {"model": "Samples" if first else "UnusedLayer"},
    ):
        with pytest.raises(UserError) as raised:
            GRPO(LEARNING, made(ours, seed=0), distributed)
        errors.append(str(raised.value))
    return errors


def _buffers_of_many_kinds(distributed) -> list[torch.Tensor]:
    """Buffers that are not contiguous float32: integers, booleans, half precision, empty, transposed."""
    module, rank = torch.nn.Module(), distributed.rank
    kinds = (torch.bool, torch.int64, torch.float64, torch.bfloat16)
    tensors = [torch.full((2, 3), rank == 0).to(kind) for kind in kinds]
    tensors += [torch.tensor(5 - rank), torch.zeros(0, 3), torch.arange(6.0).view(2, 3).mT - rank]
    for number, tensor in enumerate(tensors):
        module.register_buffer(f"kind{number}", tensor, persistent=number % 2 == 0)
    distributed.broadcast_weights(module)
    return list(module.buffers())


@pytest.fixture(scope="module")
def ranks(forked, tmp_path_factory):
    return on_two_ranks(updates_on_this_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("micro", [None, 5])
@pytest.mark.parametrize("case", CASES)
def test_ranks_start_and_stay_equal(ranks, case, micro):
    first, second = (rank[case, micro] for rank in ranks)
    for when in ("before", "after"):
        for name, tensor in first[when].items():
            assert torch.equal(tensor, second[when][name]) and tensor.isfinite().all(), (when, name)
    changed = {name for name, tensor in first["after"].items() if not torch.equal(tensor, first["before"][name])}
    assert any("mean" in name for name in changed)
    assert not any(name.startswith(("model.value_head", "model.spare")) for name in changed)
    assert case != "frozen parts" or not any(name.startswith(("model.vision", "model.words")) for name in changed)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_process_with_both_rollouts(ranks, case):
    first, second = (rank[case, None] for rank in ranks)
    assert not torch.equal(first["rollout"]["action"], second["rollout"]["action"])
    policy = made(CASES[case], seed=0)
    policy.load_state_dict(first["before"])
    both = torch.cat([first["rollout"], second["rollout"]], 1)
    alone = GRPO(LEARNING.model_copy(update={"mini_batch_size": 2 * STEPS * ROBOTS}), policy)
    metrics = alone.update(both)
    # clipped by the norm of the averaged gradient
    assert first["grad_norm"] > LEARNING.max_grad_norm
    assert first["grad_norm"] == second["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    moved = max(float((tensor - first["before"][name]).abs().max()) for name, tensor in first["after"].items())
    assert moved > 1e-4
    for name, tensor in policy.state_dict().items():
        torch.testing.assert_close(tensor, first["after"][name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("micro", [None, 5])
@pytest.mark.parametrize("case", UNEVEN)
def test_decisions_have_equal_weights_if_ranks_have_different_numbers(ranks, case, micro):
    first, second = (rank[case, micro] for rank in ranks)
    policy = made({"critic_parts": ()}, seed=0)
    alone = GRPO(LEARNING.model_copy(update=UNEVEN[case] | {"mini_batch_size": 2 * STEPS * ROBOTS}), policy)
    metrics = alone.update(torch.cat([first["rollout"], second["rollout"]], 1))
    assert first["grad_norm"] == second["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert max(float((tensor - first["before"][name]).abs().max()) for name, tensor in first["after"].items()) > 1e-4
    for name, tensor in policy.state_dict().items():
        assert torch.equal(first["after"][name], second["after"][name])
        torch.testing.assert_close(tensor, first["after"][name], rtol=0, atol=1e-6)


def test_weights_of_minibatches_by_hand():
    even = [(24, True)] * 3
    assert [_weight(even, rank, number, 3) for rank in range(3) for number in range(3)] == [1.0] * 9
    # of 5 and 3 decisions in 2 minibatches: 3 + 2 and 2 + 1
    assert [_weight([(5, True), (3, True)], rank, 0, 2) for rank in range(2)] == [3 / 2.5, 2 / 2.5]
    assert [_weight([(5, True), (3, True)], rank, 1, 2) for rank in range(2)] == [2 / 1.5, 1 / 1.5]
    # 1 decision in 2 minibatches is in both, with weight one half
    assert [_weight([(4, True), (1, True)], rank, 0, 2) for rank in range(2)] == [2 / 1.25, 0.5 / 1.25]
    assert [_weight([(4, True), (9, False)], rank, 0, 1) for rank in range(2)] == [2.0, 0.0]


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_averaged_once_per_step_without_frozen_weights(ranks, case):
    whole, micro = ranks[0][case, None], ranks[0][case, 5]
    policy = made(CASES[case], seed=0)
    critic = {id(p) for p in policy.critic_parameters()}
    learning = sum(p.numel() for p in policy.parameters() if p.requires_grad and id(p) not in critic)
    # one average in each of two gradient steps
    assert whole["averaged"] == micro["averaged"] == [learning] * 2
    for name, tensor in whole["after"].items():
        torch.testing.assert_close(tensor, micro["after"][name], rtol=0, atol=1e-6)


def test_all_ranks_report_their_differences(ranks):
    assert ranks[0]["errors"] == ranks[1]["errors"]
    frozen, other, more = ranks[0]["errors"]
    message = "VLAPolicy differs between processes: process 0 has model.joints.bias [16] (torch.float32, learns)"
    assert frozen.startswith(f"{message}, process 1 has model.joints.bias [16] (torch.float32, does not learn); ")
    assert "has model.joints.weight" in other
    assert "process 1 has model.spare.weight [16, 16] (torch.float32, learns)" in more


def test_buffers_of_any_kind_are_broadcast(ranks):
    for rank in ranks:
        yes, whole, double, half, scalar, empty, transposed = rank["kinds"]
        assert yes.dtype == torch.bool and yes.all() and whole.tolist() == [[1] * 3] * 2
        assert double.dtype == torch.float64 and half.dtype == torch.bfloat16 and (double == 1).all()
        assert (half == 1).all() and scalar == 5 and empty.shape == (0, 3)
        assert torch.equal(transposed, torch.arange(6.0).view(2, 3).mT)
