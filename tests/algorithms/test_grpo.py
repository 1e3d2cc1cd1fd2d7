"""GRPO: advantages and loss by hand; it learns with the right sign only, and only from groups that differ."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from doubles import IdentityBackend
from tensordict import TensorDict
from test_ppo_options import StepByStep

from sparring.algorithms import grpo as grpo_module
from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.algorithms.grpo import GRPO, _compare_groups, grpo_loss
from sparring.algorithms.ppo import PPO
from sparring.collect.collector import Collector
from sparring.data.buffer import RolloutBuffer
from sparring.envs.backend import Step
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig


def rollout_of(reward, episode, group, valid) -> TensorDict:
    """Lists [T][N] (reward: [T][N][C])."""
    reward = torch.tensor(reward)
    columns = {"episode": torch.tensor(episode), "group": torch.tensor(group), "valid": torch.tensor(valid)}
    following = TensorDict({"reward": reward}, reward.shape[:2])
    return TensorDict(columns | {"next": following}, reward.shape[:2])


def test_advantages_by_hand():
    # robots 0 and 1 are group 0: rewards 1 + 2 = 3 and 5; robots 2 and 3 group 1: 4 and 4. Robot 1's episode takes one
    # decision, its next reward (100) does not count
    td = rollout_of(
        reward=[[[1.0, 0.0], [2.0, 3.0], [4.0, 0.0], [1.0, 1.0]], [[1.0, 1.0], [100.0, 0.0], [0.0, 0.0], [2.0, 0.0]]],
        episode=[[0, 1, 2, 3], [0, 5, 2, 3]],
        group=[[0, 0, 1, 1], [0, 2, 1, 1]],
        valid=[[True, True, True, True], [True, False, True, True]],
    )
    groups = _compare_groups(td, 1e-4)
    # mean 4, deviations -1 and 1, standard deviation sqrt(2) (of a sample of two)
    unit = 1 / (math.sqrt(2) + 1e-4)
    expected = torch.tensor([[-unit, unit, 0, 0], [-unit, 0, 0, 0]])
    assert torch.allclose(groups.advantage, expected, atol=1e-6)
    assert groups.dropped == 1
    assert groups.kept.tolist() == [[True, True, False, False], [True, False, False, False]]


def test_success_0_or_1_by_hand():
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    td = rollout_of([[[r] for r in rewards]], [list(range(8))], [[0] * 4 + [1] * 4], [[True] * 8])
    advantage = _compare_groups(td, 1e-9).advantage[0]
    # one of four: mean .25, std .5; three of four: mean .75, std .5
    assert torch.allclose(advantage, torch.tensor([1.5, -0.5, -0.5, -0.5, 0.5, 0.5, 0.5, -1.5]), atol=1e-6)


def test_groups_whose_rewards_differ_by_rounding_only_are_dropped():
    # the mean of three such sums differs from each of them by rounding
    td = rollout_of([[[7.7, 1e-10]] * 3], [[0, 1, 2]], [[0, 0, 0]], [[True] * 3])
    groups = _compare_groups(td, 1e-4)
    assert groups.dropped == 1 and groups.advantage.abs().max() == 0


def test_a_rollout_without_groups_is_refused():
    td = TensorDict({"next": TensorDict({"reward": torch.zeros(2, 2, 1)}, [2, 2])}, [2, 2])
    with pytest.raises(UserError, match="set rollout.n_episodes_per_batch and rollout.group_size"):
        _compare_groups(td, 1e-4)


def scored_batch(advantage, ratio, reference_ratio):
    """Reference: log-prob such that reference / present is `reference_ratio`."""
    present = torch.tensor(ratio).log()
    acted = {"advantage": torch.tensor(advantage), "log_prob": torch.zeros(len(ratio))}
    acted["reference_log_prob"] = present + torch.tensor(reference_ratio).log()
    scored = {"log_prob": present, "entropy": torch.zeros(len(ratio))}
    return TensorDict(acted, [len(ratio)]), TensorDict(scored, [len(ratio)])


def test_the_asymmetric_loss_by_hand():
    acted, scored = scored_batch([1.0, 1.0, -1.0, -2.0], [1.5, 0.5, 1.5, 0.5], [1.0] * 4)
    # min(1.5, 1.28) = 1.28; min(.5, .8) = .5; min(-1.5, -1.28) = -1.5; 2 min(-.5, -.8) = -1.6
    loss, terms = grpo_loss(GRPOConfig(), acted, scored)
    assert loss.item() == pytest.approx(-(1.28 + 0.5 - 1.5 - 1.6) / 4)
    assert "reference_kl" not in terms.scalars and "value_loss" not in terms.scalars


def test_the_kl_to_the_reference_by_hand():
    acted, scored = scored_batch([0.0, 0.0], [1.0, 1.0], [2.0, 4.0])
    loss, terms = grpo_loss(GRPOConfig(kl_coef=0.1), acted, scored)
    kl = ((2 - 1 - math.log(2)) + (4 - 1 - math.log(4))) / 2
    assert terms.scalars["reference_kl"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(0.1 * kl)


class Bandit(IdentityBackend):
    """Episodes of one step: the best action equals the observation, which is the same for all robots of a group."""

    def reset(self, seeds):
        self.seeds, self.episode = seeds, 0
        return self._draw()

    def step(self, action):
        reward = self._reward(action[:, 0, 0])[:, None].astype(np.float32)
        self.episode += 1
        seen, everyone = self._draw(), np.arange(self.num_envs)
        done = np.ones(self.num_envs, bool)
        return Step(seen, reward, done.astype(np.int64), done, ~done, ~done, everyone, seen)

    def _draw(self):
        draws = [np.random.default_rng(self.seeds(i, self.episode)).uniform(-0.8, 0.8) for i in range(self.num_envs)]
        self.target = np.array(draws)
        return {"state": self.target[:, None].astype(np.float32)}


class Lesson:
    """GRPO on the bandit: 4 groups of 8 robots, 16 episodes each."""

    def __init__(self, backend=Bandit, episodes=16, group_size=8, policy=None, **config):
        torch.manual_seed(0)
        self.env = Env(backend(32), group_size=group_size)
        self.policy = ActorCritic(ActorCriticConfig(**(policy or {})), self.env.spec, 1)
        defaults = {"mini_batch_size": 128, "policy_lr": 3e-3}
        self.grpo = GRPO(GRPOConfig(**(defaults | config)), self.policy)
        self.collector = Collector(self.env, self.policy, 0, episodes=episodes)
        self.buffer = RolloutBuffer(episodes)

    def learn(self, updates) -> float:
        for _ in range(updates):
            self.collector.version = self.grpo.updates
            self.collector.collect(self.buffer)
            rollout = self.buffer.rollout()
            self.metrics = self.grpo.update(rollout)
        return float(rollout["next", "reward"].mean())

    def weights(self):
        return {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}


def test_grpo_learns_the_bandit_and_leaves_the_critic_alone():
    lesson = Lesson()
    before = lesson.weights()
    start, end = lesson.learn(1), lesson.learn(30)
    assert start < 0.5 and end > 0.75
    after = lesson.weights()
    assert {n for n in after if n.startswith("critic") and not torch.equal(before[n], after[n])} == set()
    assert not torch.equal(before["head.linear.weight"], after["head.linear.weight"])
    assert lesson.metrics["groups_dropped"] == 0 and lesson.metrics["valid_fraction"] == 1
    assert lesson.metrics["parity"] <= 1e-5


def test_ppo_trains_the_critic_after_grpo():
    lesson = Lesson()
    lesson.learn(1)
    before = lesson.weights()
    ppo = PPO(PPOConfig(mini_batch_size=128), lesson.policy)
    lesson.collector.collect(lesson.buffer)
    ppo.update(lesson.buffer.rollout())
    after = lesson.weights()
    critic = [name for name, _ in lesson.policy.named_parameters() if name.startswith("critic")]
    assert critic and not any(torch.equal(before[name], after[name]) for name in critic)


def test_with_a_flipped_sign_of_the_advantage_the_reward_falls(monkeypatch):
    lesson = Lesson()
    start = lesson.learn(1)

    def flipped(config, acted, scored, step_weights):
        return grpo_loss(config, acted.clone().set("advantage", -acted["advantage"]), scored, step_weights)

    monkeypatch.setattr(grpo_module, "grpo_loss", flipped)
    assert lesson.learn(20) < start - 0.2


class TwoSteps(Bandit):
    """Chunks of two steps; the second one has no reward."""

    def step(self, action):
        first = super().step(action[:, :1])
        return replace(first, reward=np.pad(first.reward, ((0, 0), (0, 1))), executed=first.executed + 1)


@pytest.mark.parametrize("weights", [[1.0, 0.0], [0.0, 1.0]])
def test_a_step_of_weight_0_has_no_gradient(weights):
    lesson = Lesson(TwoSteps)
    lesson.policy = StepByStep(ActorCriticConfig(), lesson.env.spec, 2, weights)
    lesson.grpo = GRPO(lesson.grpo.config, lesson.policy)
    lesson.collector = Collector(lesson.env, lesson.policy, 0, chunk=2, episodes=16)
    start = lesson.weights()["head.linear.weight"]
    lesson.learn(1)
    learned = (lesson.weights()["head.linear.weight"] - start).abs().amax(1) > 0
    assert learned.tolist() == [weight > 0 for weight in weights]


class Indifferent(Bandit):
    """Every action is as good as any other in the groups of the first 16 robots."""

    def _reward(self, action):
        return np.where(np.arange(self.num_envs) < 16, 1.0, super()._reward(action))


def test_groups_without_variance_have_no_gradient():
    """Observations and actions of dropped groups have no effect."""
    results = []
    for garbage in (None, float("nan")):
        lesson = Lesson(Indifferent, policy={"normalize_observations": False})
        lesson.collector.collect(lesson.buffer)
        rollout = lesson.buffer.rollout()
        if garbage is not None:
            for key in ("action", "log_prob", ("observation", "state"), ("trace", "mean")):
                rollout[key][:, :16] = garbage
        results.append((lesson.grpo.update(rollout), lesson.weights()))
    (metrics, weights), (other_metrics, other_weights) = results
    assert metrics == other_metrics and metrics["groups_dropped"] == 2 * 16
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


class ConstantReward(Bandit):
    def _reward(self, action):
        return np.full(self.num_envs, 0.3)


def test_an_update_whose_groups_are_all_dropped_is_skipped_with_a_warning(caplog, monkeypatch):
    lesson = Lesson(ConstantReward, kl_coef=0.1)
    before = {name: parameter.detach().clone() for name, parameter in lesson.policy.named_parameters()}
    monkeypatch.setattr(logging.getLogger("sparring"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        lesson.learn(2)
    assert "update 2 skipped" in caplog.text
    assert all(torch.equal(before[n], p) for n, p in lesson.policy.named_parameters())
    assert lesson.metrics["groups_dropped"] == 4 * 16 and lesson.metrics["gradient_steps"] == 0
    assert all(math.isfinite(value) for value in lesson.metrics.values())
    assert lesson.grpo.updates == 2


def test_the_reference_is_the_initial_policy_and_slows_learning():
    free, held = Lesson(), Lesson(kl_coef=3.0)
    start = held.weights()
    assert free.learn(10) > held.learn(10) + 0.05
    assert free.grpo.scorer.reference is None
    assert all(torch.equal(start[name], tensor) for name, tensor in held.grpo.scorer.reference.state_dict().items())
    assert held.metrics["reference_kl"] > 0
    again = Lesson(kl_coef=3.0)
    again.policy.load_state_dict(held.policy.state_dict())
    again.grpo.load_state_dict(held.grpo.state_dict())
    assert all(torch.equal(start[name], tensor) for name, tensor in again.grpo.scorer.reference.state_dict().items())
    assert not any(parameter.requires_grad for parameter in again.grpo.scorer.reference.parameters())
