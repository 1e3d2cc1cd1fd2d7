"""Each reward term by hand, its sign, and the rewards of a rollout."""

import copy
import math

import numpy as np
import pytest
import torch
from doubles import counting_env
from doubles_judge import JudgeConfig, JudgingWorldModel
from tensordict import TensorDict

from sparring.collect.collector import Collector
from sparring.config.resolve import build
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.errors import UserError
from sparring.policies.policy import Policy
from sparring.processes.distributed import Distributed
from sparring.rewards import TERMS
from sparring.rewards.configs import OriginalRewardsConfig, RewardsConfig
from sparring.rewards.reward_model import RewardModel, _weights_of

SPEC = EnvSpec({"image/head": ((3, 16, 16), "uint8"), "state": ((2,), "float32")}, action_dim=1)
ALONE = Distributed("cpu")


def term(name, config=None, spec=SPEC):
    return build(config or RewardsConfig(), TERMS, spec, 1, torch.device("cpu"), kind="reward term", name=name)


def memories(entered, entered_wrist, after, after_wrist, is_first=False):
    """One transition [1]."""
    row = {"world_model": [entered], "world_model_wrist": [entered_wrist]}
    following = {"world_model": [after], "world_model_wrist": [after_wrist]}
    as_td = {name: torch.tensor(value, dtype=torch.float32) for name, value in row.items()}
    next_td = {name: torch.tensor(value, dtype=torch.float32) for name, value in following.items()}
    return TensorDict({"memory": as_td, "next": {"memory": next_td}, "is_first": torch.tensor([is_first])}, [1])


# ---- memory


def test_memory_divergence_rewards_a_decrease_of_the_distance():
    # normalised, (1, 3) is (-1, 1) and (3, 1) is (1, -1): 2 apart in each of two numbers, 2 after the root of D
    apart_then_alike = memories([1, 3], [3, 1], [1, 3], [2, 6])
    assert term("memory_divergence")(apart_then_alike).item() == pytest.approx(2.0, abs=1e-4)
    alike_then_apart = memories([1, 3], [2, 6], [1, 3], [3, 1])
    assert term("memory_divergence")(alike_then_apart).item() == pytest.approx(-0.99 * 2.0, abs=1e-4)
    discounted = term("memory_divergence", RewardsConfig(divergence_discount=0.5))
    assert discounted(memories([1, 3], [3, 1], [1, 3], [3, 1])).item() == pytest.approx(2 - 0.5 * 2, abs=1e-4)


def test_memory_divergence_is_zero_at_the_start_of_an_episode():
    assert term("memory_divergence")(memories([0, 0], [0, 0], [1, 3], [3, 1], is_first=True)).item() == 0.0
    assert term("memory_divergence")(memories([0, 0], [0, 0], [1, 3], [3, 1])).item() == pytest.approx(-1.98, abs=1e-4)


def test_the_original_divergence_is_not_normalised_and_has_a_cost_of_distance():
    original = term("memory_divergence", OriginalRewardsConfig())
    # from 5 (a 3-4-5 triangle) to 2
    closer = memories([3, 4], [0, 0], [2, 0], [0, 0])
    assert original(closer).item() == pytest.approx(-(2 - 5) - 0.07 * 5)
    farther = memories([2, 0], [0, 0], [3, 4], [0, 0])
    assert original(farther).item() == pytest.approx(-(5 - 2) - 0.07 * 2)
    assert original(memories([3, 4], [0, 0], [2, 0], [0, 0], is_first=True)).item() == 0.0


def test_memory_change_is_the_distance_between_memories():
    assert term("memory_change")(memories([1, 1], [0, 0], [4, 5], [0, 0])).item() == 5.0


# ---- prediction and task


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("prediction_error", "error"),
        ("prediction_entropy", "entropy"),
        ("disagreement", "disagreement"),
        ("latent_surprise", "surprise"),
    ],
)
def test_scores_of_the_world_model_are_rewards(name, key):
    judged = {other: torch.zeros(2) for other in ("error", "entropy", "disagreement", "surprise")}
    td = TensorDict({"judged": judged | {key: torch.tensor([0.5, 2.0])}}, [2])
    assert term(name)(td).tolist() == [0.5, 2.0]


def test_task_terms_are_the_envs_own():
    following = {"success": torch.tensor([True, False]), "reward": torch.tensor([[1.0, 2.0], [0.5, -3.0]])}
    td = TensorDict({"next": following}, [2])
    assert term("task_success")(td).tolist() == [1.0, 0.0]
    assert term("task_reward")(td).tolist() == [3.0, -2.5]


# ---- terms that learn


def transitions(levels, errors=None, states=None):
    """Transitions [B] between images of uniform brightness."""
    count = len(levels)
    images = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 16, 16).clone()
    state = torch.zeros(count, 2) if states is None else states
    observation = TensorDict({"image": {"head": images}, "state": state}, [count])
    error = torch.zeros(count) if errors is None else torch.tensor(errors)
    td = {"observation": observation, "next": {"observation": observation.clone()}, "judged": {"error": error}}
    return TensorDict(td | {"action": torch.zeros(count, 1, 1)}, [count])


def test_rnd_rewards_rare_observations_more():
    rnd = term("rnd")
    noise = torch.randn(256, 2, generator=torch.Generator().manual_seed(0))
    often = transitions([100 + k % 5 for k in range(256)], states=noise)
    for _ in range(60):
        rnd.learn(often, ALONE)
    usual, rare = rnd(often).mean(), rnd(transitions([250, 0], states=noise[:2])).mean()
    assert rare > 10 * usual > 0


def test_rnd_is_the_same_in_every_process_and_does_not_change_the_random_state():
    torch.manual_seed(3)
    first = term("rnd")(transitions([10, 200]))
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))
    torch.manual_seed(4)
    assert torch.equal(first, term("rnd")(transitions([10, 200])))


def test_learning_progress_rewards_a_falling_error_and_not_a_constant_one():
    progress = term("learning_progress")
    bright = [k % 2 * 200 for k in range(512)]
    # dark images have an error of 1, bright ones (pure noise) of 3
    before = transitions(bright, [1.0 + k % 2 * 2 for k in range(512)])
    assert progress(before).abs().max() == 0
    for _ in range(150):
        progress.learn(before, ALONE)
    now = transitions([0, 200], [0.25, 3.0])
    learned, noise = progress(now).tolist()
    assert learned == pytest.approx(0.75, abs=0.1) and noise == pytest.approx(0.0, abs=0.1)


def test_learning_progress_is_soon_near_zero_if_nothing_is_learned():
    progress = term("learning_progress")
    # no error falls: dark images have an error of 2, bright ones (static) of 4
    rollout = transitions([k % 2 * 200 for k in range(800)], [2.0 + k % 2 * 2 for k in range(800)])
    progress.learn(rollout, ALONE)
    assert progress(rollout).abs().max() < 1.1
    for _ in range(3):
        progress.learn(rollout, ALONE)
    assert progress(rollout).abs().max() < 0.1


@pytest.mark.parametrize("name", ["rnd", "learning_progress"])
def test_a_restored_term_continues_to_learn_identically(name):
    one, other = term(name), term(name)
    td = transitions([10, 60, 110, 160], [0.1, 0.2, 0.3, 0.4])
    one.learn(td, ALONE)
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    one.learn(td, ALONE)
    other.learn(td, ALONE)
    assert torch.equal(one(td), other(td)) and one(td).abs().max() > 0


# ---- weights


def test_the_default_and_the_original_weights():
    assert _weights_of(RewardsConfig()) == {"memory_divergence": 0.3, "disagreement": 1.0}
    assert _weights_of(OriginalRewardsConfig()) == {"memory_divergence": 1.0, "prediction_error": 1.0}
    everything = RewardsConfig(**{name: 0.5 for name in TERMS})
    assert _weights_of(everything) == dict.fromkeys(TERMS, 0.5)


# ---- rewards of a rollout


class Stepper(Policy):
    """Its action is the number of its decision, times 10 for robot 1: 1, 2, 3, ... and 10, 20, 30, ..."""

    in_keys = []
    noise_size = 1

    def __init__(self, chunk):
        super().__init__()
        self.chunk, self.count = chunk, 0

    def act(self, td):
        self.count += 1
        size = self.count * torch.tensor([1.0, 10.0])
        zeros = torch.zeros(2, self.chunk)
        trace = {name: zeros.clone() for name in ("log_prob", "mean", "z2", "dims")}
        td["action"] = size[:, None, None].expand(-1, self.chunk, 1).clone()
        td["trace"] = TensorDict(trace, [2])
        return td.update({"log_prob": torch.zeros(2), "value": torch.zeros(2)})

    def value(self, td):
        return torch.zeros(len(td))


def make_rewards(**settings):
    """Two robots with episodes of 3 and 5 steps, two steps a decision, four decisions a rollout."""
    env = counting_env((3, 5))
    model = JudgingWorldModel(JudgeConfig(), env.spec, 2)
    rewards = RewardModel(RewardsConfig(**settings), model, env, 2, ("head",), ALONE)
    return rewards, model, Collector(env, Stepper(2), seed=0, chunk=2), RolloutBuffer(4)


ONLY_ERROR = {"memory_divergence": 0, "disagreement": 0, "prediction_error": 1, "clip": 1e6}


def test_rewards_are_on_the_last_executed_step_of_each_decision():
    rewards, _, collector, buffer = make_rewards(**ONLY_ERROR)
    collector.collect(buffer)
    metrics = rewards.write_rewards(buffer)
    errors = np.array([[1, 10], [2, 20], [3, 30], [4, 40]], np.float64)
    reward, executed = buffer.rollout()["next", "reward"], buffer.rollout()["next", "executed"]
    assert executed.tolist() == [[2, 2], [1, 2], [2, 1], [1, 2]]
    last = reward.gather(-1, executed[..., None] - 1)[..., 0].numpy()
    assert last == pytest.approx((errors - errors.mean()) / errors.std(), rel=1e-5)
    assert reward.sum(-1).numpy() == pytest.approx(last)
    assert metrics["reward/prediction_error"] == pytest.approx(errors.mean())
    assert metrics["reward/prediction_error_normalized"] == pytest.approx(0, abs=1e-6)


def test_episode_rewards_add_up_across_rollouts():
    rewards, _, collector, buffer = make_rewards(**ONLY_ERROR)
    collector.collect(buffer)
    first = rewards.write_rewards(buffer)["episode_reward"]
    before = reward_of(rewards)
    # robot 0: decisions 1, 2 and 3, 4; robot 1: 1 to 3
    assert first == pytest.approx(np.mean([before(1, 2), before(3, 4), before(10, 20, 30)]), rel=1e-4)
    collector.collect(buffer)
    second = rewards.write_rewards(buffer)["episode_reward"]
    # robot 1's second episode began in the first rollout: decision 4 was normalised with the statistics of that time
    now = reward_of(rewards)
    assert second == pytest.approx(np.mean([now(5, 6), now(7, 8), before(40) + now(50, 60)]), rel=1e-4)


def reward_of(rewards):
    """The total reward of these errors with the current statistics."""
    mean, scale = float(rewards.normalizer.mean), float(rewards.normalizer.scale)
    return lambda *errors: sum((error - mean) * scale for error in errors)


def test_memories_are_carried_across_rollouts_and_cleared_at_the_start_of_an_episode():
    rewards, model, collector, buffer = make_rewards()
    for _ in range(2):
        collector.collect(buffer)
        rewards.write_rewards(buffer)
    entered = torch.stack(model.entered)
    # decisions since the episode began: 2 an episode of robot 0, 3 of robot 1, whose second one spans both rollouts
    assert entered[:, 0, 0].tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert entered[:, 1, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert entered[:, 1, 1].tolist() == [0, 10, 30, 0, 40, 90, 0, 70]
    # per decision: one score, and one observe without the head camera
    assert dict(model.calls) == {"score": 8, "observe": 8}


def test_the_memory_without_the_head_camera_is_computed_only_if_a_term_needs_it():
    rewards, model, collector, buffer = make_rewards(**ONLY_ERROR)
    collector.collect(buffer)
    rewards.write_rewards(buffer)
    assert dict(model.calls) == {"score": 4}


def test_terms_are_normalised_by_running_statistics_clipped_and_weighted():
    rewards, _, collector, buffer = make_rewards(**ONLY_ERROR | {"clip": 1.0, "prediction_entropy": 0.5})
    collector.collect(buffer)
    rewards.write_rewards(buffer)
    errors = np.array([1, 10, 2, 20, 3, 30, 4, 40], np.float64)
    mean, std = errors.mean(), errors.std()
    # entropy is twice the error, hence the same after scaling
    expected = 1.5 * np.clip((errors - mean) / std, -1, 1)
    assert buffer.rollout()["next", "reward"].sum(-1).flatten().numpy() == pytest.approx(expected, rel=1e-4)


def test_a_restored_reward_model_gives_the_same_rewards():
    config = {"rnd": 1.0, "disagreement": 1.0, "memory_divergence": 1.0}
    rewards, _, collector, buffer = make_rewards(**config)
    collector.collect(buffer)
    rewards.write_rewards(buffer)
    twin = make_rewards(**config)[0]
    twin.load_state_dict(*copy.deepcopy((rewards.state_dict(), rewards.process_state())))
    collector.collect(buffer)
    results = []
    for one in (rewards, twin):
        metrics = one.write_rewards(buffer)
        results.append((metrics, buffer.rollout()["next", "reward"].clone()))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert results[0][1].abs().max() > 0


def test_memory_divergence_needs_a_camera_that_the_explorer_does_not_see():
    env = counting_env()
    model = JudgingWorldModel(JudgeConfig(), env.spec, 1)
    with pytest.raises(UserError, match="memory_divergence compares .* set it to 0"):
        RewardModel(RewardsConfig(), model, env, 1, (), ALONE)


def test_no_term_has_a_flipped_sign():
    """No expected value is 0, so each differs from its negative."""
    judged = TensorDict({"error": [0.5], "entropy": [0.25], "disagreement": [0.125], "surprise": [2.0]}, [1])
    td = transitions([100]).update(memories([1, 3], [3, 1], [2, 3], [2, 6])).update({"judged": judged})
    td["next"].update({"success": torch.tensor([True]), "reward": torch.ones(1, 1)})
    expected = {
        "memory_divergence": 2.0,
        "memory_change": 1.0,
        "prediction_error": 0.5,
        "prediction_entropy": 0.25,
        "disagreement": 0.125,
        "latent_surprise": 2.0,
        "task_success": 1.0,
        "task_reward": 1.0,
    }
    for name, value in expected.items():
        assert term(name)(td).item() == pytest.approx(value, abs=1e-4), name
    assert math.isfinite(term("rnd")(td).item()) and term("rnd")(td).item() > 0
