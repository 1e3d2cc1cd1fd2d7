"""The parity gate passes correct policies and trips on every known mistake."""

import pytest
import torch
from doubles import IdentityBackend
from torch import nn

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.algorithms.scoring import Decisions, Parity, ParityError
from sparring.collect.collector import Collector
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig


def rollout_of(policy_class=ActorCritic, choices=0, num_envs=16, chunk=1, **config):
    torch.manual_seed(0)
    env = Env(IdentityBackend(num_envs, choices))
    policy = policy_class(ActorCriticConfig(**config), env.spec, chunk)
    nn.init.normal_(policy.head.linear.weight, std=0.3)
    buffer = RolloutBuffer(32)
    collector = Collector(env, policy, seed=0, chunk=chunk)
    collector.collect(buffer)
    return policy, buffer, collector


def gate(policy, buffer) -> Parity:
    return PPO(PPOConfig(), policy).scorer.parity(Decisions(buffer.get()))


@pytest.mark.parametrize("num_envs", [1, 6, 16])
@pytest.mark.parametrize("distribution", ["gaussian", "squashed", "gsde", "discrete", "tokens"])
@pytest.mark.parametrize("chunk", [1, 3])
def test_every_head_passes_with_any_number_of_robots(num_envs, distribution, chunk):
    choices = 4 if distribution == "discrete" else 0
    policy, buffer, _ = rollout_of(choices=choices, num_envs=num_envs, chunk=chunk, distribution=distribution)
    parity = gate(policy, buffer)
    assert parity.drift <= 1e-5 and parity.dims == 0
    parity.check(1e-4)


def test_the_gate_passes_after_updates_and_with_normalisation():
    policy, buffer, collector = rollout_of()
    ppo = PPO(PPOConfig(mini_batch_size=64), policy)
    for _ in range(3):
        assert ppo.update(buffer.get(flatten=False))["parity"] <= 1e-5
        collector.version += 1
        collector.collect(buffer)


class RedrawsNoise(ActorCritic):
    def evaluate(self, td):
        return super().evaluate(td.clone().set("action", td["action"] + 0.01 * torch.randn_like(td["action"])))


class Dropout(ActorCritic):
    def __init__(self, config, spec, chunk):
        super().__init__(config, spec, chunk)
        self.actor.append(nn.Dropout(0.1))


class ScoresClampedAction(ActorCritic):
    def evaluate(self, td):
        return super().evaluate(td.clone().set("action", td["action"].clamp(-0.5, 0.5)))


class CountsPadding(ActorCritic):
    def evaluate(self, td):
        scored = super().evaluate(td)
        scored["trace", "dims"] += 1
        return scored


class AddsAConstant(ActorCritic):
    def evaluate(self, td):
        scored = super().evaluate(td)
        scored["log_prob"] += 0.3
        return scored


class GivesNaN(ActorCritic):
    def evaluate(self, td):
        scored = super().evaluate(td)
        scored["trace", "mean"] = scored["trace", "mean"] * float("nan")
        return scored


@pytest.mark.parametrize("mutant", [RedrawsNoise, Dropout, ScoresClampedAction, CountsPadding, AddsAConstant, GivesNaN])
def test_a_policy_that_scores_something_else_is_refused(mutant):
    policy, buffer, _ = rollout_of(mutant)
    with pytest.raises(ParityError, match="refuses to train.*Likely causes"):
        PPO(PPOConfig(), policy).update(buffer.get(flatten=False))


def test_dropout_applies_without_images_too():
    policy, buffer, collector = rollout_of(dropout=0.3)
    policy.eval()
    collector.collect(buffer)
    assert gate(policy, buffer).drift <= 1e-5
    with pytest.raises(ParityError):
        policy.train()
        PPO(PPOConfig(), policy).update(buffer.get(flatten=False))


@pytest.mark.parametrize("distribution", ["gaussian", "squashed", "gsde", "discrete", "tokens"])
def test_in_bf16_the_drift_is_within_the_documented_tolerance(distribution):
    choices = 4 if distribution == "discrete" else 0
    policy, buffer, _ = rollout_of(choices=choices, num_envs=1, distribution=distribution, precision="bf16")
    gate(policy, buffer).check(0.05)
    exact = rollout_of(choices=choices, num_envs=1, distribution=distribution)[0]
    flat = buffer.get()
    means = [p.evaluate(flat)["trace", "mean"] for p in (policy, exact)]
    # it computes in bf16 and scores in float32 or float64
    assert means[0].dtype == torch.float32 and 1e-5 < (means[0] - means[1]).abs().max() < 0.05


def test_counting_steps_that_were_not_executed_is_refused():
    policy, buffer, _ = rollout_of(chunk=3)
    rollout = buffer.get(flatten=False)
    rollout["next", "executed"][:] = 2  # every chunk ended early, but log_prob counts all three steps
    with pytest.raises(ParityError, match="score .*executed_mask"):
        PPO(PPOConfig(), policy).update(rollout)


def test_later_updates_are_gated():
    policy, buffer, collector = rollout_of()
    ppo = PPO(PPOConfig(), policy)
    ppo.update(buffer.get(flatten=False))
    collector.version += 1
    collector.collect(buffer)
    policy.__class__ = RedrawsNoise
    with pytest.raises(ParityError):
        ppo.update(buffer.get(flatten=False))


def test_a_normaliser_that_changed_after_acting_is_refused():
    policy, buffer, _ = rollout_of()
    policy.encoder.normalizer.update(torch.randn(100, 1) * 0.1)
    with pytest.raises(ParityError):
        PPO(PPOConfig(), policy).update(buffer.get(flatten=False))


def test_weights_that_changed_after_acting_are_refused_before_any_gradient_step():
    policy, buffer, _ = rollout_of()
    with torch.no_grad():
        policy.head.linear.bias += 0.01
    before = [p.clone() for p in policy.parameters()]
    with pytest.raises(ParityError):
        PPO(PPOConfig(), policy).update(buffer.get(flatten=False))
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
