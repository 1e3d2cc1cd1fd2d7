"""Options of PPO, each by its effect."""

import math

import pytest
import torch
from tensordict import TensorDict
from test_ppo import Lesson, batch
from torch import nn

from sparring.algorithms.configs import GRPOConfig, PPOConfig
from sparring.algorithms.gradient_step import GradientStep
from sparring.algorithms.grpo import GRPO
from sparring.algorithms.ppo import PPO, LossTerms, clipped_policy_loss, ppo_loss
from sparring.collect.collector import Collector
from sparring.config.resolve import config_class
from sparring.contract import ContractError
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig
from sparring.policies.policy import executed_mask
from sparring.processes.distributed import Distributed


def parameters_of(lesson) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in lesson.policy.named_parameters()}


def moved(before, after) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_the_critic_learns_during_its_warm_up():
    lesson = Lesson(critic_warmup_updates=2)
    start = parameters_of(lesson)
    lesson.learn(2)
    warm = parameters_of(lesson)
    assert moved(start, warm) == {name for name in start if name.startswith("critic")}
    lesson.learn(1)
    assert moved(warm, parameters_of(lesson)) == set(start)


def test_the_warm_up_leaves_no_momentum_behind():
    lesson = Lesson(critic_warmup_updates=1)
    lesson.learn(1)
    policy_vector, critic_vector = (group.vector for group in lesson.ppo.step.groups)
    assert policy_vector not in lesson.ppo.step.optimizer.state and critic_vector in lesson.ppo.step.optimizer.state


def test_gradient_clipping_includes_all_groups_that_learn():
    one, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))
    groups = [{"params": [one], "lr": 0.1}, {"params": [other], "lr": 0.1}]
    step = GradientStep(groups, Distributed("cpu"), 1.0, "ppo.policy_lr=0.1")
    for learning, norm in ((step.groups[-1:], 4.0), (None, 5.0)):
        step.backward(TensorDict({}, [1]), lambda _: (3 * one[0] + 4 * other[0], None), None)
        assert step.apply(learning).item() == pytest.approx(norm)
    assert one.grad.norm() == pytest.approx(0.6) and other.grad.norm() == pytest.approx(0.8)


def test_critic_warm_up_needs_a_policy_that_names_its_critic():
    class Anonymous(ActorCritic):
        def critic_parameters(self):
            return []

    policy = Anonymous(ActorCriticConfig(), Lesson().env.spec, 1)
    with pytest.raises(UserError, match="critic_warmup_updates=3: Anonymous"):
        PPO(PPOConfig(critic_warmup_updates=3), policy)


def test_a_derived_algorithm_has_the_config_section_of_its_base():
    for base, section in ((PPO, PPOConfig), (GRPO, GRPOConfig)):
        assert config_class(type("Mine", (base,), {}), "algorithm") is section


def test_micro_batches_add_up_to_their_minibatch():
    # 512 decisions in minibatches of 171, 171 and 170, of at most 48 at once
    options = {"mini_batch_size": 200, "entropy_coef": 0.01, "value_clip": 0.3, "policy_lr": 1e-3, "ppo_epochs": 1}
    whole, parts = Lesson(**options), Lesson(**options, micro_batch_size=48)
    sizes, evaluate = [], parts.policy.evaluate

    def recorded(td):
        if torch.is_grad_enabled():
            sizes.append(len(td))
        return evaluate(td)

    parts.policy.evaluate = recorded
    whole.learn(2), parts.learn(2)
    assert sizes[:12] == [48, 48, 48, 27] * 2 + [48, 48, 48, 26]
    assert parts.metrics["gradient_steps"] == whole.metrics["gradient_steps"] == 3
    for name, value in parameters_of(whole).items():
        assert (value - parameters_of(parts)[name]).abs().max() <= 1e-6, name
    for name, value in whole.metrics.items():
        assert parts.metrics[name] == pytest.approx(value, abs=1e-5), name


def test_dual_clip_by_hand():
    # gains: min(5*-1, 1.2*-1) = -5, not below 3*-1; min(2*-1, ..) = -2 stays; good decisions as ever: min(5, 1.2)
    acted, scored = batch([-1.0, -1.0, 1.0], [5.0, 2.0, 5.0])
    for dual_clip, gains in ((None, [-5.0, -2.0, 1.2]), (3.0, [-3.0, -2.0, 1.2])):
        config = PPOConfig(normalize_advantage=False, dual_clip=dual_clip)
        loss = ppo_loss(config, 0.2, acted, scored)[1].scalars["policy_loss"]
        assert loss.item() == pytest.approx(-sum(gains) / 3)


@pytest.mark.parametrize(("log_ratio", "advantage", "dual_clip"), [(89.0, 1.0, None), (100.0, -1.0, 3.0)])
def test_a_clipped_ratio_has_no_gradient_even_where_it_would_overflow(log_ratio, advantage, dual_clip):
    log_ratios = torch.tensor([log_ratio, 0.1], requires_grad=True)
    loss = clipped_policy_loss(log_ratios, torch.full((2,), advantage), 0.2, 0.2, dual_clip=dual_clip)
    loss.backward()
    # the other decision learns as if the first had been clipped in the ordinary way
    assert log_ratios.grad.tolist() == pytest.approx([0.0, -advantage * math.exp(0.1) / 2])


def test_the_kl_to_a_distant_reference_is_finite_and_has_no_gradient():
    log_prob = torch.tensor([-100.0, 0.0, 100.0], requires_grad=True)
    acted = TensorDict({"reference_log_prob": torch.tensor([0.0, 0.1, 0.0])}, [3])
    kl = LossTerms.reference_kl(acted, TensorDict({"log_prob": log_prob}, [3]))
    kl.backward()
    assert math.isfinite(kl.item())
    # the gradient of (r - 1) - log r, log r = reference - present: 1 - r, and 1 where the present is far likelier
    assert log_prob.grad.tolist() == pytest.approx([0.0, (1 - math.exp(0.1)) / 3, 1 / 3])


def test_each_denoising_step_is_clipped_by_itself_and_weighted():
    ratio = torch.tensor([[1.5, 0.5], [1.5, 0.5]])
    # advantages of the pairs: [[1, .5], [-2, -1]]
    loss = clipped_policy_loss(ratio.log(), torch.tensor([1.0, -2.0]), 0.2, 0.2, torch.tensor([1.0, 0.5]))
    gains = [1.2, 0.5 * 0.5, -2 * 1.5, -1 * 0.8]
    assert loss.item() == pytest.approx(-sum(gains) / 4)


class StepByStep(ActorCritic):
    """Scores every position of its chunk separately, as denoising steps do."""

    def __init__(self, config, spec, chunk, weights):
        super().__init__(config, spec, chunk)
        self.weights = torch.tensor(weights)

    @property
    def step_weights(self):
        return self.weights

    def _executed_sum(self, per_position, td):
        return per_position * executed_mask(td, self.chunk)


def step_by_step(weights) -> Lesson:
    lesson = Lesson(chunk=2, gamma=1.0)
    lesson.policy = StepByStep(ActorCriticConfig(), lesson.env.spec, 2, weights)
    lesson.ppo = PPO(lesson.ppo.config, lesson.policy)
    lesson.collector = Collector(lesson.env, lesson.policy, 0, chunk=2)
    return lesson


def test_a_policy_with_scores_per_step_learns():
    lesson = step_by_step([1.0, 1.0])
    start, end = lesson.learn(1), lesson.learn(50)
    assert lesson.buffer.get()["log_prob"].shape == (512, 2)
    assert start < 0.6 and end > 0.75


def test_a_step_of_weight_0_has_no_gradient():
    lesson = step_by_step([1.0, 0.0])
    start = parameters_of(lesson)["head.linear.weight"]
    lesson.learn(1)
    after = parameters_of(lesson)["head.linear.weight"]
    assert not torch.equal(start[0], after[0]) and torch.equal(start[1], after[1])


def test_scores_of_another_shape_than_the_step_weights_are_refused():
    lesson = step_by_step([1.0, 1.0, 1.0])
    with pytest.raises(ContractError, match=r"log_prob has shape \[32, 16, 2\], expected \[32, 16, 3\]"):
        lesson.learn(1)


def test_scores_per_step_are_gated():
    lesson = step_by_step([1.0, 1.0])
    lesson.collector.collect(lesson.buffer)
    # a shift that cancels in the sum of both steps
    log_prob = lesson.buffer.rollout()["log_prob"]
    lesson.buffer.set("log_prob", log_prob + torch.tensor([0.1, -0.1]))
    with pytest.raises(UserError, match="parity gate refuses to train: score"):
        lesson.ppo.update(lesson.buffer.rollout())


class WithDropout(ActorCritic):
    def __init__(self, config, spec, chunk):
        super().__init__(config, spec, chunk)
        self.actor.append(nn.Dropout(0.5))


def test_finetune_disables_dropout_and_the_gate_trips_if_it_is_enabled():
    from sparring.data.buffer import RolloutBuffer
    from sparring.phases.finetune import Finetune

    env = Lesson().env
    torch.manual_seed(0)
    policy = WithDropout(ActorCriticConfig(), env.spec, 1)
    nn.init.normal_(policy.head.linear.weight, std=0.3)
    ppo = PPO(PPOConfig(), policy)
    phase = Finetune(env, policy, ppo, RolloutBuffer(16), ppo.distributed)
    assert phase.step(0.0)["parity"] <= 1e-5
    policy.train()
    with pytest.raises(UserError, match="refuses to train.*dropout"):
        phase.step(0.0)


# ---- returns far from 0, or widely spread


class FarLesson(Lesson):
    """Adds 100 to every reward: with gamma 0.9 this adds 1000 to every return."""

    def collect(self) -> TensorDict:
        self.collector.version = self.ppo.updates
        self.collector.collect(self.buffer)
        rollout = self.buffer.get(flatten=False).clone()
        rollout["next", "reward"] += 100
        return rollout

    def learn_far(self, updates: int) -> torch.Tensor:
        """The values of the last rollout."""
        for _ in range(updates):
            rollout = self.collect()
            self.metrics = self.ppo.update(rollout)
        return rollout["value"]


def test_with_normalize_value_the_critic_starts_at_the_level_of_the_returns():
    plain, normal = FarLesson(gamma=0.9), FarLesson(gamma=0.9, normalize_value=True)
    assert plain.learn_far(2).mean() < 50
    assert normal.learn_far(2).mean() == pytest.approx(1000, rel=0.02)
    # the remaining error is no larger than the rewards that can be gained
    assert normal.metrics["value_loss"] < 100 < 1e4 < plain.metrics["value_loss"]


@pytest.mark.parametrize("correction", ["none", "decoupled", "vtrace"])
def test_the_level_is_added_to_values_that_were_collected_before_it_was_known(correction):
    lesson = FarLesson(gamma=0.9, normalize_value=True, correction=correction)
    lesson.ppo.expect_stale()
    ahead = [lesson.collect() for _ in range(3)]
    for rollout in ahead:
        metrics = lesson.ppo.update(rollout)
        assert metrics["return_mean"] == pytest.approx(1000, rel=0.02) and metrics["value_loss"] < 100
    fresh = lesson.collect()
    assert fresh["value"].mean() == pytest.approx(1000, rel=0.02)
    lesson.ppo.update(fresh)
    assert fresh["return"].mean() == pytest.approx(1000, rel=0.02)


@pytest.mark.parametrize("correction", ["none", "decoupled"])
def test_the_level_is_added_once_even_if_versions_are_not_counted(correction):
    lesson = FarLesson(gamma=0.9, normalize_value=True, correction=correction)
    for _ in range(5):
        rollout = lesson.collect()
        rollout["version"] = torch.zeros_like(rollout["version"])
        metrics = lesson.ppo.update(rollout)
        assert metrics["return_mean"] == pytest.approx(1000, rel=0.02)


def test_a_critic_at_the_level_of_its_returns_is_not_shifted():
    lesson = FarLesson(gamma=0.9, normalize_value=True)
    lesson.learn_far(3)
    other = PPO(lesson.ppo.config, lesson.policy)
    other.update(lesson.collect())
    assert other.level == 0 and lesson.ppo.level == pytest.approx(1000, rel=0.02)


def test_the_value_loss_is_in_units_of_the_spread_of_returns():
    acted, scored = batch([0.0, 0.0], [1.0, 1.0], value=3.0, target=1.0)
    loss, terms = ppo_loss(PPOConfig(value_loss_coef=0.5), 0.2, acted, scored, None, unit=10.0)
    assert loss.item() == pytest.approx(0.5 * 4.0 / 100) and terms.scalars["value_loss"].item() == pytest.approx(4.0)


def test_values_do_not_change_with_the_unit():
    lesson = Lesson()
    critic, td = lesson.policy.critic, lesson.env.reset(0, "train", 0)
    features = torch.randn(16, critic.hidden[0].in_features)
    before = critic(features, td)
    first, second = torch.tensor([10.0, 30.0]), torch.tensor([500.0, 500.0])
    assert critic.fit_returns(first, lambda tensor: tensor) == pytest.approx(10.0)
    assert critic.fit_returns(second, lambda tensor: tensor) == pytest.approx(
        torch.cat([first, second]).std(correction=0)
    )
    torch.testing.assert_close(critic(features, td), before, atol=1e-3, rtol=0)
    critic.shift_by(7.0)
    torch.testing.assert_close(critic(features, td), before + 7, atol=1e-3, rtol=0)


def test_normalize_value_needs_a_critic_of_the_library():
    policy = Lesson().policy
    policy.critic = nn.Linear(3, 1)
    with pytest.raises(UserError, match="normalize_value=true .*ActorCritic"):
        PPO(PPOConfig(normalize_value=True), policy)
