"""A policy's memory: carried from one decision of an episode to the next, never across episodes; and its use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doubles import LinearPolicy, counting_env
from doubles_judge import JudgeConfig, JudgingWorldModel
from doubles_memory import CountingPolicy, CueBackend
from doubles_native import SMALL, Instructed, make_native, rollout_of_native
from parity_cases import DIMS, RandomEnv, gate
from tensordict import TensorDict

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.algorithms.scoring import measure_parity
from sparring.collect.collector import Collector
from sparring.config.schema import load_config
from sparring.contract import POLICY_MEMORY, ContractError
from sparring.data.buffer import RolloutBuffer, VLABuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.evaluation.play import play
from sparring.policies.native.config import NativeVLAConfig
from sparring.policies.native.policy import NativeVLA, _MemoryTraces
from sparring.processes.distributed import Distributed
from sparring.rewards.configs import RewardsConfig
from sparring.rewards.reward_model import RewardModel
from sparring.runs.run import Run

# ---- traces, by hand


def memories(traces, *observations):
    """The memory before each observation and after the last."""
    rows = [torch.zeros(1, 1 + len(traces.rates))]
    for numbers in observations:
        rows.append(traces(rows[-1], torch.tensor([numbers])))
    return torch.cat(rows)


def test_a_trace_is_a_mean_at_first_and_an_exponential_average_later():
    traces = _MemoryTraces(2, 4)
    traces.directions.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
    assert (1 / traces.rates).tolist() == pytest.approx(
        [_MemoryTraces.longest_span, _MemoryTraces.longest_span**0.5, 1]
    )
    traces.rates[1] = 0.5
    memory = memories(traces, (4.0, 1.0), (0.0, 7.0), (8.0, -3.0), (0.0, 5.0))
    assert memory[:, 0].tolist() == pytest.approx([0, 1 / 2, 2 / 3, 3 / 4, 4 / 5])
    # the mean of all; the mean of the first 2, then half old and half new; the last one
    assert memory[:, 1].tolist() == pytest.approx([0, 4, 2, 4, 3])
    assert memory[:, 2].tolist() == pytest.approx([0, 4, 2, 5, 2.5])
    assert memory[:, 3].tolist() == [0, 1, 7, -3, 5]


def test_in_a_long_episode_the_clock_stays_exact_and_the_distant_past_fades():
    traces = _MemoryTraces(1, 2)
    traces.directions.fill_(1.0)
    memory = memories(traces, *([(1.0,)] * _MemoryTraces.longest_span), *([(0.0,)] * 5 * _MemoryTraces.longest_span))
    t = torch.arange(6 * _MemoryTraces.longest_span + 1)
    torch.testing.assert_close(memory[:, 0], t / (t + 1), rtol=1e-4, atol=0)
    assert memory[_MemoryTraces.longest_span, 1] == pytest.approx(1, abs=1e-4)
    # (1 - 1 / _MemoryTraces.longest_span) ** (5 * _MemoryTraces.longest_span)
    assert memory[-1, 1] == pytest.approx(0.99**500, rel=0.02)


def test_directions_are_reproducible_and_of_length_1():
    one, other = _MemoryTraces(50, 9), _MemoryTraces(50, 9)
    assert torch.equal(one.directions, other.directions) and not one.state_dict()
    torch.testing.assert_close(one.directions.norm(dim=1), torch.ones(8))
    assert (one.directions @ one.directions.T - torch.eye(8)).abs().max() < 0.5
    # only a clock; no observations
    assert memories(_MemoryTraces(3, 1), (1.0, 2.0, 3.0)).tolist() == [[0], [0.5]]
    assert _MemoryTraces(0, 3)(torch.zeros(2, 3), torch.zeros(2, 0)).tolist() == [[0.5, 0, 0]] * 2


# ---- the collector, with an env that counts


def collected(buffer=None, **more):
    collector = Collector(counting_env((3, 5)), CountingPolicy(), seed=0, **more)
    buffer = buffer or RolloutBuffer(6)
    collector.collect(buffer)
    return collector, buffer


def test_memory_starts_from_zeros_and_continues_within_an_episode_only():
    collector, buffer = collected()
    memory = buffer.rollout()[POLICY_MEMORY]
    # decisions taken, and the sum of their numbers
    assert memory[:, 0].tolist() == [[0, 0], [1, 0], [2, 1], [0, 0], [1, 0], [2, 1]]
    assert memory[:, 1].tolist() == [[0, 0], [1, 0], [2, 1], [3, 3], [4, 6], [0, 0]]
    collector.collect(buffer)
    # across rollouts too
    assert buffer.rollout()[POLICY_MEMORY][:, 1].tolist() == [[1, 0], [2, 1], [3, 3], [4, 6], [0, 0], [1, 0]]


def test_values_of_next_observations_use_the_memory_of_that_time():
    _, buffer = collected()
    rollout = buffer.rollout()
    # the episodes end after 3 decisions (env 0) and 5 (env 1), the rollout after the first decision of env 1's second
    assert rollout["next", "value"][:, 0].tolist() == [1.5, 3, 4.5, 11.5, 13, 14.5]
    assert rollout["next", "value"][:, 1].tolist() == [1001.5, 1003, 1004.5, 1006, 1007.5, 1011.5]


def test_a_rollout_of_whole_episodes_starts_with_empty_memories():
    collector = Collector(counting_env((3, 5)), CountingPolicy(), seed=0, episodes=2)
    buffer = RolloutBuffer(10)
    for _ in range(2):
        collector.collect(buffer)
        rollout = buffer.rollout()
        assert rollout[POLICY_MEMORY][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
        assert torch.equal(rollout[POLICY_MEMORY][:, :, 0] == 0, rollout["is_first"])


def test_greedy_decisions_carry_memory():
    collector = Collector(counting_env((3, 5)), CountingPolicy(), seed=0, split="eval", greedy=True)
    assert [collector.decide()[POLICY_MEMORY][:, 0].tolist() for _ in range(4)] == [[0, 0], [1, 1], [2, 2], [0, 3]]


def test_a_ring_buffer_stores_memory_like_a_rollout_buffer():
    _, plain = collected()
    _, ring = collected(VLABuffer(20, steps=6))
    for key in (POLICY_MEMORY, ("next", "value")):
        assert torch.equal(plain.rollout()[key], ring.rollout()[key])


def test_a_world_models_memory_does_not_overwrite_the_policys():
    env, buffer = counting_env((3, 5)), RolloutBuffer(4)
    rewards = RewardModel(
        RewardsConfig(), JudgingWorldModel(JudgeConfig(), env.spec, 2), env, 2, ("head",), Distributed("cpu")
    )
    Collector(env, CountingPolicy(2), seed=0, chunk=2).collect(buffer)
    before = buffer.rollout()[POLICY_MEMORY].clone()
    metrics = rewards.write_rewards(buffer)
    assert "reward/memory_divergence" in metrics and torch.equal(buffer.rollout()[POLICY_MEMORY], before)
    # decisions, of 2 steps each
    assert before[..., 0].tolist() == [[0, 0], [1, 1], [0, 2], [1, 0]]


def test_a_restored_collector_continues_with_its_memory():
    collector, buffer = collected()
    state = collector.state_dict()
    collector.collect(buffer)
    again = Collector(counting_env((3, 5)), CountingPolicy(), seed=0)
    again.env.reset(0)
    assert again.load_state_dict(state)
    other = RolloutBuffer(6)
    again.collect(other)
    assert other.rollout()[POLICY_MEMORY][0].tolist() == [[0, 0], [1, 0]]
    assert (other.rollout() == buffer.rollout()).all()


def test_a_memory_that_violates_the_contract_is_refused():
    policy = CountingPolicy()
    policy.memory_size = 3
    policy.remember = lambda td: torch.zeros(2, 2)
    with pytest.raises(ContractError, match=r"policy.remember has shape \[2, 2\], expected \[2, 3\]"):
        Collector(counting_env(), policy, seed=0).decide()
    forgetful = LinearPolicy()
    forgetful.memory_size = 3
    with pytest.raises(UserError, match=r"LinearPolicy has memory_size=3 and no remember\(\)"):
        Collector(counting_env(), forgetful, seed=0).decide()


# ---- the native VLA


@pytest.mark.parametrize("num_envs", [1, 6])
def test_a_native_vlas_memory_is_a_function_of_the_rows_before(num_envs):
    policy, buffer = rollout_of_native(num_envs, memory_size=9)
    rollout = buffer.rollout()
    memory, is_first = rollout[POLICY_MEMORY], rollout["is_first"]
    assert is_first.sum() > 2 * num_envs and not memory[is_first].any()
    assert (memory[~is_first].abs().amax(-1) > 0.1).all()
    for t in range(len(rollout) - 1):
        expected = torch.where(is_first[t + 1, :, None], 0.0, policy.remember(rollout[t]))
        assert torch.equal(memory[t + 1], expected)


def test_traces_cover_the_normalised_state_and_the_colours_of_each_image():
    policy = make_native(memory_size=2)
    seen = Env(Instructed(1)).reset(0).select("observation")
    size = policy.encoder.traces.directions.shape[1]
    assert size == 5 + 2 * 48
    images = seen["observation", "image"]
    images["head"].zero_()
    images["wrist"].fill_(255)
    # the first cell of the wrist camera's first colour
    images["wrist"][:, 0, :9, :9] = 51
    traced = []
    for number in range(size):
        policy.encoder.traces.directions.zero_()[0, number] = 1.0
        traced.append(policy.remember(seen)[0, 1])
    state, head, wrist = torch.stack(traced).split([5, 48, 48])
    torch.testing.assert_close(state, seen["observation", "state"][0] / 2)
    assert torch.equal(head, torch.full((48,), -1.0))
    torch.testing.assert_close(wrist, torch.cat([torch.tensor([51 / 127.5 - 1]), torch.ones(47)]))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 1e-4), ("bf16", 0.05)])
def test_the_gate_passes_and_detects_scoring_with_another_memory(precision, tolerance):
    # oneDNN's bf16 kernels round differently on different CPUs
    with torch.backends.mkldnn.flags(enabled=precision != "bf16"):
        policy, buffer = rollout_of_native(memory_size=9, precision=precision)
        gate(policy, buffer).check(tolerance)
        wrong = buffer.get().clone()
        wrong[POLICY_MEMORY] = wrong[POLICY_MEMORY].roll(1, 0)
        assert measure_parity(wrong, policy.evaluate(wrong)).drift > 2 * tolerance


def test_actor_and_critic_learn_to_read_the_memory():
    policy, buffer = rollout_of_native(memory_size=9)
    flat = buffer.get()
    before = policy.model.memory_in.weight.clone()
    other = flat.clone().set(POLICY_MEMORY, flat[POLICY_MEMORY] + 1)
    assert (policy.value(flat) - policy.value(other)).abs().min() > 1e-4
    torch.testing.assert_close(policy.evaluate(flat)["value"], policy.value(flat))
    PPO(PPOConfig(mini_batch_size=64, ppo_epochs=1), policy).update(buffer.rollout())
    assert (policy.model.memory_in.weight - before).abs().max() > 1e-5


def test_a_missing_memory_counts_as_zeros():
    policy = make_native(memory_size=9)
    seen = Env(Instructed(3)).reset(0).select("observation")
    with_zeros = seen.clone().set(POLICY_MEMORY, torch.zeros(3, 9))
    assert torch.equal(policy.act(seen)["action"], policy.act(with_zeros)["action"])


def test_without_observations_the_memory_is_a_clock():
    policy = NativeVLA(NativeVLAConfig(**SMALL, memory_size=3), type(RandomEnv(1).spec)({}, DIMS), 1)
    assert policy.remember(TensorDict({}, [2])).tolist() == [[0.5, 0, 0]] * 2


# ---- in several processes


def updates_on_this_rank(folder):
    """Run in each of two processes: a run without interruption, and one that stops in mid-episode and resumes."""
    torch.set_num_threads(1)
    settings = {
        "device": "cpu",
        "policy": SMALL | {"name": "native_vla", "layers": 1, "memory_size": 5, "max_state_dim": 64},
        "rollout": {"n_envs": 2, "steps": 7, "max_episode_steps": 10, "render_episodes": 0},
        "ppo": {"mini_batch_size": 8, "ppo_epochs": 1},
        "training": {"iterations": 2},
        "logging": {"console_level": "ERROR"},
    }
    straight = Run(load_config(settings | {"output": f"{folder}/straight"}))
    straight.run()
    stopped = Run(load_config(settings | {"output": f"{folder}/stopped"}))
    stopped.phase.step(stopped.fraction)
    stopped.save()
    resumed = Run(load_config(settings | {"output": f"{folder}/stopped"}))
    resumed.run()
    runs = {"straight": straight, "resumed": resumed}
    results = {
        name: {"weights": run.phase.model.state_dict(), "memory": run.phase.buffer.rollout()[POLICY_MEMORY]}
        for name, run in runs.items()
    }
    torch.save(results, f"{folder}/rank{straight.distributed.rank}.pt")


@pytest.mark.usefixtures("forked")
def test_two_processes_have_separate_memories_and_resume_bit_identically(tmp_path):
    code = (
        "import sys; from accelerate import debug_launcher; from test_policy_memory import updates_on_this_rank;"
        "debug_launcher(updates_on_this_rank, (sys.argv[1],), num_processes=2)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "doubles"), *sys.path])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for rank in ranks:
        assert torch.equal(rank["straight"]["memory"], rank["resumed"]["memory"])
    # decision 4 of an episode of 10
    assert ranks[0]["straight"]["memory"][0, :, 0].tolist() == pytest.approx([4 / 5] * 2)
    assert not torch.equal(ranks[0]["straight"]["memory"], ranks[1]["straight"]["memory"])
    for name, weight in ranks[0]["straight"]["weights"].items():
        others = (ranks[1]["straight"], ranks[0]["resumed"], ranks[1]["resumed"])
        assert all(torch.equal(weight, other["weights"][name]) for other in others), name


# ---- learning with a memory


def trained_reward(memory_size: int, seed: int) -> float:
    """The mean greedy reward of a decision after the first, once a native VLA has trained for seconds."""
    torch.manual_seed(seed)
    env = Env(CueBackend(32))
    sizes = SMALL | {"layers": 1, "sampling_steps": 3, "normalize_actions": False}
    policy = NativeVLA(NativeVLAConfig(**sizes, memory_size=memory_size), env.spec, 1).eval()
    ppo = PPO(PPOConfig(policy_lr=3e-3, mini_batch_size=128, ppo_epochs=4, gamma=0.5, gae_lambda=0.0), policy)
    collector, buffer = Collector(env, policy, seed=seed), RolloutBuffer(8)
    for _ in range(20):
        collector.collect(buffer)
        ppo.update(buffer.rollout())
    played, _ = play(policy, Env(CueBackend(32)), 64, seed)
    return sum(episode.reward for episode in played) / len(played) / 3


def test_a_cue_shown_only_at_first_is_used_with_a_memory_and_not_without():
    assert trained_reward(memory_size=4, seed=0) > 0.7
    assert abs(trained_reward(memory_size=0, seed=0)) < 0.15
