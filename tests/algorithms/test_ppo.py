"""PPO: its loss by hand, the effect of its settings, and that it learns with the right signs only."""

import math

import pytest
import torch
from doubles import IdentityBackend
from tensordict import TensorDict

from sparring.algorithms import ppo as ppo_module
from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.gradient_step import schedule
from sparring.algorithms.ppo import PPO, LossTerms, ppo_loss
from sparring.algorithms.scoring import Decisions
from sparring.collect.collector import Collector
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.configs import ActorCriticConfig
from sparring.processes.distributed import Distributed


def batch(advantage, ratio, value=0.0, target=0.0, old_value=0.0):
    size = [len(advantage)]
    acted = TensorDict(
        {
            "advantage": torch.tensor(advantage),
            "log_prob": torch.zeros(size),
            "value": torch.full(size, old_value),
            "return": torch.full(size, target),
        },
        size,
    )
    scored = TensorDict(
        {"log_prob": torch.tensor(ratio).log(), "value": torch.full(size, value), "entropy": torch.full(size, 2.0)},
        size,
    )
    return acted, scored


def test_the_kl_penalty_to_a_reference_by_hand():
    acted, scored = batch([0.0, 0.0], [1.0, 1.0], value=1.0, target=1.0)
    acted["reference_log_prob"] = torch.tensor([2.0, 0.5]).log()
    loss, terms = ppo_loss(PPOConfig(kl_coef=0.1), 0.2, acted, scored)
    # r = reference / present
    kl = ((2 - 1 - math.log(2)) + (0.5 - 1 - math.log(0.5))) / 2
    assert terms.scalars["reference_kl"].item() == pytest.approx(kl)
    assert loss.item() == pytest.approx(0.1 * kl) and terms.scalars["loss"].item() == pytest.approx(0.1 * kl)


def test_the_clipped_loss_by_hand():
    config = PPOConfig(normalize_advantage=False, value_loss_coef=0.5, entropy_coef=0.1, clip_ratio=0.2)
    # gains: min(1.5*1, 1.2*1) = 1.2; min(.5*1, .8*1) = .5; min(1.5*-1, 1.2*-1) = -1.5; min(.5*-1, .8*-1) = -.8
    acted, scored = batch([1.0, 1.0, -1.0, -1.0], [1.5, 0.5, 1.5, 0.5], value=3.0, target=1.0)
    loss, terms = ppo_loss(config, 0.2, acted, scored)
    policy_loss = -(1.2 + 0.5 - 1.5 - 0.8) / 4
    assert terms.scalars["policy_loss"].item() == pytest.approx(policy_loss)
    assert terms.scalars["value_loss"].item() == pytest.approx(4.0)
    assert loss.item() == pytest.approx(policy_loss + 0.5 * 4.0 - 0.1 * 2.0)
    assert LossTerms.means([terms], 0.2, 0.2)["clip_fraction"] == 1.0
    kl = (0.5 - math.log(1.5) + -0.5 - math.log(0.5)) / 2
    assert LossTerms.means([terms], 0.2, 0.2)["approx_kl"] == pytest.approx(kl, rel=1e-5)


def test_value_clipping_takes_the_larger_error():
    config = PPOConfig(value_clip=0.5)
    # value moved from 0 to 3, clipped to 0.5; target 1: errors 4 and .25
    acted, scored = batch([0.0, 0.0], [1.0, 1.0], value=3.0, target=1.0)
    assert ppo_loss(config, 0.2, acted, scored)[1].scalars["value_loss"].item() == pytest.approx(4.0)
    # target 5: errors 4 and 20.25
    acted, scored = batch([0.0, 0.0], [1.0, 1.0], value=3.0, target=5.0)
    assert ppo_loss(config, 0.2, acted, scored)[1].scalars["value_loss"].item() == pytest.approx(20.25)


def test_schedules():
    assert [schedule(kind, 0.25) for kind in ("constant", "linear")] == [1.0, 0.75]
    assert schedule("cosine", 0.5) == pytest.approx(0.5)
    assert schedule("linear", 2.0) == 0.0
    assert [schedule("constant", 0.5, update, 4) for update in (0, 1, 3, 9)] == [0.25, 0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match="unknown"):
        schedule("steps", 0.1)


class Lesson:
    """PPO on the identity task."""

    def __init__(self, choices=0, chunk=1, seed=0, policy=None, **config):
        torch.manual_seed(seed)
        self.env = Env(IdentityBackend(16, choices))
        self.policy = ActorCritic(ActorCriticConfig(**(policy or {})), self.env.spec, chunk)
        defaults = {"mini_batch_size": 128, "policy_lr": 3e-3, "gamma": 0.0, "ppo_epochs": 5}
        self.ppo = PPO(PPOConfig(**(defaults | config)), self.policy)
        self.collector = Collector(self.env, self.policy, seed, chunk=chunk)
        self.buffer = RolloutBuffer(32)

    def learn(self, updates=25) -> float:
        """Mean reward per env step of the last rollout."""
        for _ in range(updates):
            self.collector.version = self.ppo.updates
            self.collector.collect(self.buffer)
            rollout = self.buffer.get(flatten=False)
            self.metrics = self.ppo.update(rollout)
        return float(rollout["next", "reward"].mean())


@pytest.mark.parametrize(
    "options",
    [
        {"policy": {"distribution": "gaussian"}},
        {"policy": {"distribution": "squashed", "activation": "relu"}},
        {"policy": {"distribution": "gsde", "init_std": 0.1, "sde_sample_freq": 2}},
        {"choices": 4},
        {"chunk": 3, "gamma": 1.0},
        {"value_clip": 0.2, "target_kl": 0.05, "entropy_coef": 1e-3, "critic_lr": 1e-3},
    ],
)
def test_ppo_learns_the_identity(options):
    lesson = Lesson(**options)
    start, end = lesson.learn(1), lesson.learn(25 * lesson.policy.chunk)
    assert start < 0.6 and end > (0.9 if options.get("choices") else 0.75)


def test_with_a_flipped_sign_of_the_advantage_the_reward_falls(monkeypatch):
    def flipped(config, clip, acted, *others):
        mirrored = acted.clone().set("advantage", -acted["advantage"])
        return ppo_loss(config, clip, mirrored, *others)

    lesson = Lesson()
    start = lesson.learn(1)
    monkeypatch.setattr(ppo_module, "ppo_loss", flipped)
    assert lesson.learn(25) < start - 0.2


@pytest.mark.parametrize("policy", [{}, {"distribution": "squashed"}, {"distribution": "gsde", "init_std": 0.1}])
def test_entropy_bonus_widens_every_continuous_policy(policy):
    plain, with_bonus = Lesson(policy=policy), Lesson(policy=policy, entropy_coef=3.0)
    plain.learn(10), with_bonus.learn(10)
    assert with_bonus.metrics["entropy"] > plain.metrics["entropy"] + 0.3
    assert with_bonus.policy.head.log_std.mean() > plain.policy.head.log_std.mean() + 0.1
    assert with_bonus.metrics["approx_kl"] < 0.2


def test_kl_stop_saves_gradient_steps():
    without_stop, with_stop = Lesson(policy_lr=3e-2), Lesson(policy_lr=3e-2, target_kl=1e-4)
    without_stop.learn(2), with_stop.learn(2)
    assert without_stop.metrics["gradient_steps"] == 5 * 4 and with_stop.metrics["gradient_steps"] == 4


def test_learning_rates_are_separate_and_schedule():
    lesson = Lesson(policy_lr=1e-3, critic_lr=1e-4, lr_schedule="linear", warmup_updates=2)
    lesson.collector.collect(lesson.buffer)
    # at half of training (linear: 0.5), in the first of two warm-up updates: another 0.5
    assert lesson.ppo.update(lesson.buffer.get(flatten=False), progress=0.5)["lr"] == pytest.approx(2.5e-4)
    assert [g["lr"] for g in lesson.ppo.step.optimizer.param_groups] == pytest.approx([2.5e-4, 2.5e-5])


def test_linear_clip_ends_at_zero():
    lesson = Lesson(clip_schedule="linear")
    lesson.collector.collect(lesson.buffer)
    assert lesson.ppo.update(lesson.buffer.get(flatten=False), progress=1.0)["clip_fraction"] > 0.9


def test_critic_lr_applies_to_the_critic_and_policy_lr_to_the_rest():
    frozen = Lesson(policy_lr=1e-12, critic_lr=1e-2)
    before = {name: p.clone() for name, p in frozen.policy.named_parameters()}
    frozen.learn(1)
    moved = {n for n, p in frozen.policy.named_parameters() if (p - before[n]).abs().max() > 1e-6}
    assert moved == {n for n in before if n.startswith("critic")}


def test_gradients_are_clipped_to_their_norm():
    lesson = Lesson(max_grad_norm=1e-3)
    lesson.collector.collect(lesson.buffer)
    acted = lesson.buffer.get()
    acted["advantage"], acted["return"] = torch.randn(2, len(acted))
    loss, _ = ppo_loss(lesson.ppo.config, 0.2, acted, lesson.policy.evaluate(acted))
    assert lesson.ppo.step(acted, loss) > 1e-3
    total = sum(p.grad.square().sum() for p in lesson.policy.parameters()).sqrt()
    assert total.item() == pytest.approx(1e-3, rel=1e-3)


def test_images_too_small_for_the_convolutions_are_refused():
    from sparring.contract import EnvSpec

    spec = EnvSpec({"image/head": ((3, 32, 32), "uint8")}, 2)
    with pytest.raises(ValueError, match="32x32 pixels are too small for the 3 convolutions of policy.channels"):
        ActorCritic(ActorCriticConfig(), spec, 1)
    ActorCritic(ActorCriticConfig(channels=(8, 8)), spec, 1)


def test_ppo_learns_from_images():
    """A CNN learns the brightness of an image."""
    from doubles_image import BrightnessBackend

    torch.manual_seed(0)
    env = Env(BrightnessBackend(16))
    policy = ActorCritic(ActorCriticConfig(channels=(8, 8, 8), image_features=16, hidden=(16,)), env.spec, 1)
    learner = PPO(PPOConfig(mini_batch_size=128, policy_lr=3e-3, gamma=0.0), policy)
    collector, buffer = Collector(env, policy, 0), RolloutBuffer(16)
    for _ in range(12):
        collector.version = learner.updates
        collector.collect(buffer)
        rollout = buffer.get(flatten=False)
        assert rollout["observation", "image", "head"].dtype == torch.uint8
        learner.update(rollout)
    assert rollout["next", "reward"].mean() > 0.9


class OneOfTwo(Distributed):
    """One of two processes; `held`: for each, the number of decisions and whether they count."""

    def __init__(self, rank: int, held: list[tuple[int, bool]]):
        super().__init__("cpu")
        self.rank, self.held = rank, held

    def gather_objects(self, values: list) -> list:
        assert values == [self.held[self.rank]]
        return self.held


@pytest.mark.parametrize("counts", [(True, True), (True, False)])
def test_each_decision_has_the_same_weight_in_any_process(counts):
    values = [torch.tensor([1.0, 2, 3, 4, 5, 6, 7]), torch.tensor([10.0, 20, 30])]
    held = [(len(each), counted) for each, counted in zip(values, counts, strict=True)]
    spec = Env(IdentityBackend(1), "cpu").spec
    shares = []
    for rank, (each, counted) in enumerate(held):
        policy = ActorCritic(ActorCriticConfig(hidden=[4]), spec, 1)
        algorithm = PPO(PPOConfig(mini_batch_size=4), policy, OneOfTwo(rank, held))
        columns = {"observation": {"state": torch.zeros(each, 1)}, "action": torch.zeros(each, 1, 1), "trace": {}}
        flat = TensorDict(columns | {"number": values[rank]}, [each])
        minibatches = algorithm.minibatches(Decisions(flat), ["number"], 1, [], counted)
        shares.append([(batch["number"], weight) for batch, weight in minibatches])
    # for each minibatch the processes average their weighted means
    for (one, weight), (other, other_weight) in zip(*shares, strict=True):
        averaged = (weight * one.mean() + other_weight * other.mean()) / 2
        together = torch.cat([one, other]) if counts[1] else one
        assert float(averaged) == pytest.approx(float(together.mean()))
    assert [len(one) for one, _ in shares[0]] == [4, 3] and [len(one) for one, _ in shares[1]] == [2, 1]


def test_the_gradient_of_a_minibatch_is_weighted():
    policy = ActorCritic(ActorCriticConfig(hidden=[4]), Env(IdentityBackend(1), "cpu").spec, 1)
    step, batch = PPO(PPOConfig(), policy).step, TensorDict({"state": torch.ones(2, 1)}, [2])
    step.scale_lr(0.0)
    norms = []
    for weight in (1.0, 0.25):
        step.backward(batch, lambda batch: (sum(p.square().sum() for p in policy.parameters()), None), None)
        norms.append(float(step.apply(None, weight)))
    assert norms[1] == pytest.approx(0.25 * norms[0])
