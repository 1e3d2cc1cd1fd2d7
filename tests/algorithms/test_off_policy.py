"""Learning from stale data: every loss and V-trace by hand, the gate, and that corrections improve learning."""

import copy
import math

import pytest
import torch
from doubles import IdentityBackend
from parity_cases import METHODS
from parity_cases import rollout_of as flow_rollout
from tensordict import TensorDict
from test_advantages import rollout
from test_grpo import Lesson as GroupLesson
from test_ppo import Lesson

from sparring.algorithms.advantages import OffPolicy, gae, vtrace
from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.algorithms.grpo import grpo_loss
from sparring.algorithms.ppo import PPO, ppo_loss
from sparring.algorithms.scoring import Decisions, ParityError, Scorer
from sparring.collect.collector import Collector
from sparring.config.section import ConfigError
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig
from sparring.processes.distributed import Distributed

CORRECTIONS = [
    {"correction": "none"},
    {"correction": "truncated"},
    {"correction": "decoupled"},
    {"correction": "decoupled", "proximal": "interpolated"},
    {"correction": "vtrace"},
]
STALE_METRICS = {"staleness_mean", "staleness_max", "parity_skipped"}
WEIGHT_METRICS = {"ess", "weight_mean", "weight_max", "weight_masked"}


def log(numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64).log()


def stale_batch(advantage, weight, ratio, age=4):
    """Decisions with these w and r; their behaviour log-probabilities differ and must not matter."""
    size = [len(advantage)]
    behave = torch.linspace(-3, 2, len(advantage), dtype=torch.float64)
    behave = behave.view(-1, *[1] * (torch.tensor(weight).dim() - 1)).expand(torch.tensor(weight).shape)
    batch = {
        "advantage": torch.tensor(advantage),
        "log_prob": behave,
        "proximal_log_prob": behave + log(weight),
        "age": torch.full(size, age),
        "value": torch.zeros(size),
        "return": torch.zeros(size),
    }
    present = (behave + log(weight) + log(ratio)).requires_grad_()
    scored = {"log_prob": present, "value": torch.zeros(size), "entropy": torch.zeros(size)}
    return TensorDict(batch, size), TensorDict(scored, size), present


# ---- losses by hand

# gains min(r A, clip(r) A): 1.2 (clipped), -1.5, 0.5, -2
ADVANTAGE, RATIO = [1.0, -1.0, 1.0, -2.0], [1.5, 1.5, 0.5, 1.0]
GAINS = [1.2, -1.5, 0.5, -2.0]
WEIGHT = [0.5, 2.0, 3.0, 1.0]
COUNTED = {
    # 3 exceeds the cap of 2: masked
    "decoupled": [0.5, 2.0, 0.0, 1.0],
    "truncated": [0.5, 2.0, 2.0, 1.0],
    # rho_bar = 1
    "vtrace": [0.5, 1.0, 1.0, 1.0],
}


@pytest.mark.parametrize("correction", COUNTED)
def test_each_loss_by_hand(correction):
    batch, scored, _ = stale_batch(ADVANTAGE, WEIGHT, RATIO)
    loss, terms = ppo_loss(PPOConfig(correction=correction), 0.2, batch, scored)
    by_hand = -sum(w * gain for w, gain in zip(COUNTED[correction], GAINS, strict=True)) / 4
    assert loss.item() == pytest.approx(by_hand, rel=1e-5)
    assert terms.log_ratio.tolist() == pytest.approx(log(RATIO).tolist(), abs=1e-6)
    assert terms.weight.tolist() == pytest.approx(WEIGHT, rel=1e-5)


@pytest.mark.parametrize("correction", COUNTED)
def test_no_gradient_passes_through_the_weight(correction):
    batch, scored, present = stale_batch(ADVANTAGE, WEIGHT, RATIO)
    ppo_loss(PPOConfig(correction=correction), 0.2, batch, scored)[0].backward()
    # d/dlog pi of w r A is w r A where r is not clipped
    by_hand = [-w * gain / 4 for w, gain in zip(COUNTED[correction], GAINS, strict=True)]
    by_hand[0] = 0.0
    assert present.grad.tolist() == pytest.approx(by_hand, rel=1e-5)


def test_without_correction_the_ratio_is_to_the_behaviour_policy():
    batch, scored, _ = stale_batch([1.0, -1.0], [2.0, 2.0], [0.55, 0.55])
    loss, terms = ppo_loss(PPOConfig(correction="none"), 0.2, batch, scored)
    # r = 1.1 relative to the behaviour policy
    assert loss.item() == pytest.approx(0.0, abs=1e-6) and terms.weight is None
    assert terms.log_ratio.exp().tolist() == pytest.approx([1.1, 1.1], rel=1e-5)


def test_the_interpolated_proximal_by_hand():
    """present / behaviour = 16 = w r; age 3, alpha = 3/4: w = 8, r = 2; age 1: w = 4, r = 4; age 0: w = 1, r = 16."""
    batch, scored, present = stale_batch([-1.0, -1.0, -1.0, 1.0], [1.0] * 4, [16.0] * 4)
    batch["age"] = torch.tensor([3, 1, 0, 1])
    config = PPOConfig(correction="decoupled", proximal="interpolated", weight_cap=5.0)
    loss, terms = ppo_loss(config, 0.2, batch.exclude("proximal_log_prob"), scored)
    assert terms.weight.tolist() == pytest.approx([8.0, 4.0, 1.0, 4.0], rel=1e-5)
    assert terms.log_ratio.exp().tolist() == pytest.approx([2.0, 4.0, 16.0, 4.0], rel=1e-5)
    # the first is masked; the last is clipped, so that only its weight could have a gradient
    assert loss.item() == pytest.approx((4 * 4 + 16 - 4 * 1.2) / 4, rel=1e-5)
    loss.backward()
    assert present.grad.tolist() == pytest.approx([0.0, 4.0, 4.0, 0.0], rel=1e-5)


def test_each_denoising_step_has_its_own_weight_but_vtrace_has_one_per_decision():
    pairs = [[0.5, 3.0], [1.5, 0.4]], [[1.0, 1.0], [1.0, 1.0]]
    steps = torch.tensor([0.5, 1.0])
    batch, scored, _ = stale_batch([1.0, -1.0], *pairs)
    loss = ppo_loss(PPOConfig(correction="decoupled"), 0.2, batch, scored, steps)[0]
    assert loss.item() == pytest.approx(-(0.5 * 0.5 + 0 - 1.5 * 0.5 - 0.4) / 4, rel=1e-5)
    loss, terms = ppo_loss(PPOConfig(correction="vtrace"), 0.2, batch, scored, steps)
    # 1.5, cut to 1; and 0.6
    assert terms.weight.tolist() == [pytest.approx([1.5], rel=1e-5), pytest.approx([0.6], rel=1e-5)]
    assert loss.item() == pytest.approx(-(1.5 - 0.6 * 1.5) / 4, rel=1e-5)


def test_grpo_applies_the_weights():
    batch, scored, _ = stale_batch(ADVANTAGE, WEIGHT, RATIO)
    # clip_high 0.28
    gains = [1.28, *GAINS[1:]]
    for correction in ("decoupled", "truncated"):
        loss, _ = grpo_loss(GRPOConfig(correction=correction), batch, scored)
        by_hand = -sum(w * gain for w, gain in zip(COUNTED[correction], gains, strict=True)) / 4
        assert loss.item() == pytest.approx(by_hand, rel=1e-5)


def test_vtrace_refuses_an_interpolated_proximal():
    with pytest.raises(ConfigError, match="vtrace.*correction=decoupled"):
        PPOConfig(proximal="interpolated")


# ---- V-trace by hand


def test_vtrace_by_hand():
    """gamma = lambda = 0.5. Weights 2 (rho 1.5, c 1) and 0.4."""
    td = rollout([[[1]], [[2]]], [[2], [4]], [[4], [8]], [[False], [False]], [[False], [False]])
    advantage, vs = vtrace(td, 0.5, 0.5, torch.tensor([[2.0], [0.4]]), 1.5, 1.0)
    # delta_0 = 1 + .5*4 - 2 = 1, delta_1 = 2 + .5*8 - 4 = 2; vs_1 - V_1 = .4*2 = .8
    # vs_0 - V_0 = 1.5*1 + .5*.5*1*.8 = 1.7; A_0 = 1 + .5*.5*.8 = 1.2
    assert advantage.flatten().tolist() == pytest.approx([1.2, 2.0])
    assert vs.flatten().tolist() == pytest.approx([3.7, 4.8])


def test_with_lambda_1_the_advantage_is_that_of_the_paper():
    td = rollout([[[1]], [[2]]], [[2], [4]], [[4], [8]], [[False], [False]], [[False], [False]])
    advantage, vs = vtrace(td, 0.5, 1.0, torch.tensor([[2.0], [0.4]]), 1.0, 1.0)
    assert advantage[0].item() == pytest.approx(1 + 0.5 * vs[1].item() - 2)


def test_vtrace_discounts_per_executed_step_and_ends_in_mid_chunk():
    """Chunks of 3. t=0: all run; t=1: terminated after 2."""
    reward = [[[1, 2, 4]], [[4, 4, 0]]]
    td = rollout(reward, [[1], [2]], [[2], [9]], [[False], [True]], [[False], [False]], [[3], [2]])
    advantage, vs = vtrace(td, 0.5, 0.5, torch.tensor([[0.5], [0.25]]), 1.0, 1.0)
    # delta_1 = 4 + 2 - 2 = 4: no V_next; delta_0 = (1 + 1 + 1) + .125*2 - 1 = 2.25
    # vs_1 - V_1 = 1; vs_0 - V_0 = .5*2.25 + .125*.5*.5*1 = 1.15625; A_0 = 2.25 + .125*.5*1
    assert advantage.flatten().tolist() == pytest.approx([2.3125, 4.0])
    assert vs.flatten().tolist() == pytest.approx([2.15625, 3.0])


def test_vtrace_bootstraps_at_truncations_and_does_not_mix_robots():
    """Env 0 is truncated at t=0 (V of its own final observation: 6), env 1 terminates at t=1."""
    td = rollout(
        [[[1], [1]], [[1], [3]]],
        [[2, 0], [0, 1]],
        [[6, 1], [4, 9]],
        [[False, False], [False, True]],
        [[True, False], [False, False]],
    )
    weight = torch.tensor([[0.5, 0.8], [3.0, 0.5]])
    advantage, vs = vtrace(td, 0.5, 0.5, weight, 1.0, 1.0)
    # env 0: delta 1 + 3 - 2 = 2, then 1 + 2 = 3, neither reaching the other
    # env 1: delta_1 = 3 - 1 = 2, vs_1 - V_1 = 1; delta_0 = 1 + .5 = 1.5, A_0 = 1.5 + .25*1
    assert advantage.tolist() == [pytest.approx([2.0, 1.75]), pytest.approx([3.0, 2.0])]
    # vs_0 of env 1: .8*1.5 + .25*.8*1
    assert vs.tolist() == [pytest.approx([3.0, 1.4]), pytest.approx([3.0, 2.0])]


def test_invalid_decisions_do_not_affect_valid_ones():
    td = rollout([[[1]], [[2]]], [[2], [4]], [[4], [8]], [[True], [False]], [[False], [False]])
    td["valid"] = torch.tensor([[True], [False]])
    advantage, _ = vtrace(td, 0.5, 0.5, torch.full((2, 1), 0.5), 1.0, 1.0)
    assert advantage.flatten().tolist() == [-1.0, 0.0]


def test_with_weights_of_one_vtrace_is_gae():
    torch.manual_seed(0)
    shape = (12, 3)
    terminated, truncated = torch.rand(shape) < 0.15, torch.rand(shape) < 0.15
    executed = torch.randint(1, 3, shape)
    columns = torch.randn(*shape, 2), torch.randn(shape), torch.zeros(shape), terminated, truncated, executed
    td = rollout(*(column.tolist() for column in columns))
    td["next", "value"][:-1] = td["value"][1:]
    for one, other in zip(vtrace(td, 0.9, 0.8, torch.ones(shape), 1.0, 1.0), gae(td, 0.9, 0.8), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_current_values_replace_next_values_except_at_the_end_of_an_episode():
    td = rollout([[[0], [0]]] * 3, [[1, 1]] * 3, [[7, 7]] * 3, [[False, True]] + [[False] * 2] * 2, [[False] * 2] * 3)
    td["next", "truncated"][1, 0] = True
    td["log_prob"] = td["proximal_log_prob"] = torch.zeros(3, 2)
    td["proximal_value"] = torch.tensor([[10.0, 20.0], [11.0, 21.0], [12.0, 22.0]])
    td_now, _ = Lesson(correction="vtrace").ppo.off_policy.for_vtrace(td)
    assert td_now["next", "value"].tolist() == [[11, 7], [7, 22], [7, 7]] and td_now["value"][2].tolist() == [12, 22]
    assert (td["next", "value"] == 7).all() and (td["value"] == 1).all()


# ---- metrics


def metrics_of(config, weights) -> dict[str, float]:
    """The metrics of four stale decisions with these weights."""
    scorer = Scorer(config, Lesson().policy, Distributed("cpu"))
    decisions = TensorDict({"action": torch.zeros(4), "age": torch.ones(4)}, [4])
    return OffPolicy(config, scorer).metrics(Decisions(decisions), weights)


def test_the_effective_sample_size_by_hand():
    def metrics_with(**config):
        return metrics_of(PPOConfig(**config), [torch.tensor([0.5, 2.0]), torch.tensor([3.0, 1.0])])

    metrics = metrics_with(correction="decoupled")
    # 3 is masked: (.5 + 2 + 1)^2 / (4 (.25 + 4 + 1))
    assert metrics["ess"] == pytest.approx(3.5**2 / (4 * 5.25))
    assert [metrics[f"weight_{name}"] for name in ("mean", "max", "masked")] == [6.5 / 4, 3.0, 0.25]
    assert metrics_with(correction="truncated")["ess"] == pytest.approx(5.5**2 / (4 * 9.25))
    assert metrics_with(correction="vtrace")["ess"] == pytest.approx(3.5**2 / (4 * 3.25))
    assert metrics_with(correction="vtrace")["weight_masked"] == 0.5
    assert not WEIGHT_METRICS & metrics_of(PPOConfig(), [None]).keys()


# ---- updates


def weights_after(updates=3, **config) -> tuple[dict, dict]:
    lesson = Lesson(chunk=3, gamma=0.9, value_clip=0.5, micro_batch_size=48, **config)
    lesson.learn(updates)
    return lesson.policy.state_dict(), lesson.metrics


def test_updates_on_fresh_data_are_bit_identical_with_any_correction():
    plain, expected = weights_after(correction="none")
    assert not (STALE_METRICS | WEIGHT_METRICS) & set(expected)
    for correction in CORRECTIONS[1:]:
        weights, metrics = weights_after(**correction)
        assert metrics == expected and all(torch.equal(weights[name], plain[name]) for name in plain), correction


def test_updates_of_grpo_on_fresh_data_are_bit_identical_with_any_correction():
    lessons = [GroupLesson(episodes=2, **correction) for correction in CORRECTIONS[:-1]]
    for lesson in lessons:
        lesson.learn(2)
        assert lesson.metrics == lessons[0].metrics
        assert all(torch.equal(value, lessons[0].weights()[name]) for name, value in lesson.weights().items())


@pytest.mark.parametrize(("learner", "correction"), [("ppo", "decoupled"), ("ppo", "none"), ("grpo", "truncated")])
def test_if_stale_data_is_expected_fresh_data_has_the_metrics_of_staleness_too(learner, correction):
    lesson = (Lesson if learner == "ppo" else GroupLesson)(correction=correction)
    getattr(lesson, learner).expect_stale()
    lesson.learn(1)
    logged = {name: lesson.metrics[name] for name in (STALE_METRICS | WEIGHT_METRICS) & set(lesson.metrics)}
    weights = {"ess": 1.0, "weight_mean": 1.0, "weight_max": 1.0, "weight_masked": 0.0}
    assert logged == dict.fromkeys(STALE_METRICS, 0.0) | ({} if correction == "none" else weights)


def stale_lesson(lag=2, learner=Lesson, **config):
    """A lesson after `lag` updates on fresh data, and the rollout and the policy from before them."""
    lesson = learner(**config)
    snapshot = copy.deepcopy(lesson.policy)
    lesson.learn(lag)
    lesson.collector.policy, lesson.collector.version = snapshot, 0
    lesson.collector.collect(lesson.buffer)
    return lesson, lesson.buffer.rollout(), snapshot


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_an_update_reports_the_staleness_of_its_data(correction):
    lesson, td, _ = stale_lesson(policy_lr=3e-2, **correction)
    # a quarter of the decisions is one version newer
    td["version"][24:] = 1
    metrics = lesson.ppo.update(td)
    assert metrics["staleness_mean"] == (24 * 2 + 8 * 1) / 32 and metrics["staleness_max"] == 2
    assert metrics["parity_skipped"] == 1
    if correction["correction"] == "none":
        assert not WEIGHT_METRICS & set(metrics)
    else:
        assert 0 < metrics["ess"] < 1 and metrics["weight_max"] > 1


def test_weights_are_computed_once_at_the_start_of_an_update():
    lesson, td, snapshot = stale_lesson(correction="decoupled", weight_cap=1e9, mini_batch_size=64, micro_batch_size=40)
    with torch.no_grad():
        flat = td.flatten(0, 1)
        weight = (lesson.policy.evaluate(flat)["log_prob"] - flat["log_prob"]).double().exp()
    metrics = lesson.ppo.update(td)
    assert metrics["weight_mean"] == pytest.approx(weight.mean().item(), rel=1e-4)
    assert metrics["ess"] == pytest.approx((weight.sum() ** 2 / (len(weight) * weight.square().sum())).item(), rel=1e-4)


def test_only_vtrace_uses_values_of_the_current_critic():
    annotated = {}
    for correction in ("decoupled", "vtrace"):
        lesson, td, snapshot = stale_lesson(correction=correction, gamma=0.9)
        lesson.ppo.off_policy.annotate(td, lesson.ppo.updates)
        annotated[correction] = lesson.ppo._with_advantages(td)
    with torch.no_grad():
        flat = td.flatten(0, 1)
        for correction, policy in (("decoupled", snapshot), ("vtrace", lesson.policy)):
            value = policy.evaluate(flat)["value"].view(td.batch_size)
            assert torch.allclose(annotated[correction]["value"], value, atol=1e-5)
    assert not torch.allclose(annotated["decoupled"]["advantage"], annotated["vtrace"]["advantage"], atol=1e-3)


@pytest.mark.parametrize("method", ["flow_noise", "mdp_noise"])
@pytest.mark.parametrize("correction", CORRECTIONS[1:])
def test_denoising_chains_are_corrected(method, correction):
    policy, buffer = flow_rollout(num_envs=6, **METHODS[method])
    ppo = PPO(PPOConfig(mini_batch_size=64, **correction), policy)
    ppo.update(buffer.rollout())
    metrics = ppo.update(buffer.rollout())
    assert metrics["staleness_max"] == 1 and 0 < metrics["ess"] < 1 and math.isfinite(metrics["loss"])


@pytest.mark.parametrize("method", ["one_step", "mdp_sde"])
def test_methods_that_score_some_steps_only_refuse_stale_data(method):
    policy, buffer = flow_rollout(num_envs=6, **METHODS[method])
    ppo = PPO(PPOConfig(), policy)
    ppo.update(buffer.rollout())
    before = ppo.step.groups[0].vector.detach().clone()
    with pytest.raises(UserError, match="policy.method=flow_sde or flow_noise"):
        ppo.update(buffer.rollout())
    assert torch.equal(before, ppo.step.groups[0].vector)
    PPO(PPOConfig(correction="none"), policy).off_policy.check_correctable()


def test_grpo_learns_from_stale_episodes():
    lesson, td, snapshot = stale_lesson(learner=GroupLesson, episodes=4, policy_lr=1e-2)
    metrics = lesson.grpo.update(td)
    assert metrics["staleness_mean"] == 2 and 0 < metrics["ess"] < 1 and metrics["parity_skipped"] == 1


# ---- the gate


def test_stale_data_is_gated_with_a_snapshot_of_the_behaviour_policy():
    lesson, td, snapshot = stale_lesson()
    scorer = Scorer(lesson.ppo.config, snapshot, lesson.ppo.distributed)
    assert scorer.replay(td, version=0).drift <= 1e-5
    with torch.no_grad():
        snapshot.head.linear.bias += 0.01
    with pytest.raises(ParityError):
        lesson.ppo.gate(scorer.replay(td, version=0))


def test_the_gate_replays_all_decisions_once_and_then_random_samples(monkeypatch):
    monkeypatch.setattr("sparring.algorithms.scoring._REPLAYED", 4)
    lesson, td, snapshot = stale_lesson()
    scorer = Scorer(lesson.ppo.config, snapshot, lesson.ppo.distributed)
    rows = []
    scorer.parity = lambda decisions: rows.append(decisions.rows.tolist())
    decisions = td.numel()
    scorer.replay(td, version=0)
    scorer.replay(td, version=0)
    td["version"][: len(td) // 2] = -1
    scorer.replay(td, version=0)
    assert rows[0] == list(range(decisions))
    assert len(set(rows[1])) == 4 and set(rows[1]) < set(rows[0])
    assert len(rows[2]) == 4 and min(rows[2]) >= decisions // 2
    td["version"][:] = 1
    scorer.replay(td, version=1)
    assert len(rows[3]) == 4 and set(rows[3]) != set(rows[1])


def test_without_a_snapshot_only_fresh_decisions_are_gated():
    lesson, td, _ = stale_lesson()
    stale = lesson.ppo.update(td)
    assert stale["parity"] == 0 and stale["parity_skipped"] == 1
    # the same decisions, marked as on-policy although other weights took them
    td["version"][30:] = lesson.ppo.updates
    with pytest.raises(ParityError):
        lesson.ppo.update(td)


def test_a_process_that_starts_with_stale_data_gates_its_first_fresh_rollout_completely():
    lesson, td, _ = stale_lesson()
    ppo = PPO(PPOConfig(mini_batch_size=32, ppo_epochs=1), lesson.policy)
    ppo.updates = 2
    ppo.update(td)
    assert not ppo.parity_gate.checked_rollout
    lesson.collector.policy, lesson.collector.version = lesson.policy, 3
    lesson.collector.collect(lesson.buffer)
    fresh = lesson.buffer.rollout()
    # one decision in 512, which a minibatch of 32 is unlikely to contain
    fresh["log_prob"][5, 5] += 0.1
    with pytest.raises(ParityError):
        ppo.update(fresh)


# ---- learning


def reward_with_lag(lag: int, **config) -> float:
    """The final mean reward on the identity task, learned from data of weights `lag` versions back."""
    torch.manual_seed(0)
    env = Env(IdentityBackend(16))
    policy = ActorCritic(ActorCriticConfig(), env.spec, 1)
    ppo = PPO(PPOConfig(mini_batch_size=64, policy_lr=1e-2, gamma=0.0, **config), policy)
    collector, buffer, past = Collector(env, policy, 0), RolloutBuffer(16), []
    for update in range(16):
        past.append(copy.deepcopy(policy))
        collector.version = max(0, update - lag)
        collector.policy = past[collector.version]
        collector.collect(buffer)
        ppo.update(buffer.rollout())
    collector.policy = policy
    collector.collect(buffer)
    return float(buffer.get()["next", "reward"].mean())


def test_with_a_lag_of_four_versions_corrected_data_is_as_good_as_fresh_data():
    fresh, uncorrected = reward_with_lag(0), reward_with_lag(4, correction="none")
    # uncorrected data lacks twice as much to the best reward of 1
    assert fresh > 0.92 and uncorrected < 0.87
    for correction in CORRECTIONS[1:]:
        assert reward_with_lag(4, **correction) > fresh - 0.015, correction
