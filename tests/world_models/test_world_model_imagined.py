"""ImaginedEnv: an env whose observations and rewards are the model's predictions."""

import numpy as np
import pytest
import torch
from doubles_episodes import assert_equal
from doubles_moving import SPEC, make, moving_windows
from tensordict import TensorDict

from sparring.algorithms.advantages import gae
from sparring.collect.collector import Collector
from sparring.contract import check_observation, check_step
from sparring.data import EpisodeStore, RolloutBuffer
from sparring.errors import UserError
from sparring.policies.random import RandomPolicy
from sparring.world_models.imagined_env import GivenStarts, ImaginedEnv, StoredStarts

CONTINUES = {"terminated": [0.1, 0.1], "success": [0.0, 0.0]}


def imagined(model, max_decisions: int = 3, robots: int = 2) -> ImaginedEnv:
    observations = moving_windows(5, 1)[:, 0]["observation"]
    return ImaginedEnv(model, SPEC, GivenStarts(model, observations), robots, max_decisions)


def with_predictions(model, **others):
    """`model` with some of its predictions replaced."""
    predict = model.predict

    def changed(td: TensorDict) -> TensorDict:
        predicted = predict(td)
        return predicted.update({name: torch.tensor(value) for name, value in others.items()})

    model.predict = changed
    return model


def action(robots: int, value: float = 1.0) -> TensorDict:
    return TensorDict({"action": torch.full((robots, 2, 1), value)}, [robots])


def test_the_env_returns_the_models_predictions():
    model = with_predictions(make(), **CONTINUES)
    env = imagined(model)
    root = env.reset(seed=0)
    check_observation(root, env.spec, "reset")
    assert root["is_first"].all() and env.num_envs == 2 and env.tasks == SPEC.instructions
    td = root.clone().update(action(2)).set(("memory", "world_model"), model.empty_memory(2))
    first = model.predict(td)
    after = env.step(action(2))
    check_step(after, env.spec, 2, "step")
    assert torch.equal(after["observation", "image", "head"], first["image", "head"])
    assert torch.equal(after["next", "observation", "state"], first["state"])
    # half of the predicted reward for each of the two steps
    assert torch.equal(after["next", "reward"], torch.stack([first["reward"], first["reward"]], 1) / 2)
    assert torch.equal(after["observation", "task"], root["observation", "task"])
    # the second prediction is made with the memory of the first
    td = after.clone().update(action(2, -1.0)).set(("memory", "world_model"), first["memory"])
    assert torch.equal(env.step(action(2, -1.0))["observation", "state"], model.predict(td)["state"])


def test_the_predicted_reward_is_discounted_like_that_of_an_env():
    env = imagined(with_predictions(make(), **CONTINUES, reward=[6.0, -2.0]))
    env.reset(seed=0)
    after = env.step(action(2))
    assert after["next", "reward"].tolist() == [[3.0, 3.0], [-1.0, -1.0]]
    # [T, N] = [1, 2], with values of 0
    rollout = after.select("next").unsqueeze(0)
    rollout["value"], rollout["next", "value"] = torch.zeros(1, 2), torch.zeros(1, 2)
    # an env that gives 3 in each of two steps: 3 + 0.5 * 3; all on the last step would be 0.5 * 6
    assert gae(rollout, gamma=0.5, gae_lambda=1.0)[0].tolist() == [[4.5, -1.5]]


def test_episodes_end_by_prediction_or_by_the_limit():
    env = imagined(with_predictions(make(), terminated=[0.0, 0.6], success=[0.0, 0.0]))
    env.reset(seed=0)
    for decision in range(3):
        after = env.step(action(2))
        assert after["next", "terminated"].tolist() == [False, True]
        assert after["next", "truncated"].tolist() == [decision == 2, False]
        assert after["is_first"].tolist() == [decision == 2, True]
        assert env.last.ended.tolist() == ([0, 1] if decision == 2 else [1])
    # the final observation is returned, and the next episode starts elsewhere
    assert torch.equal(torch.from_numpy(env.last.final["state"]), after["next", "observation", "state"])
    assert not torch.equal(after["observation", "state"], after["next", "observation", "state"])
    env = imagined(with_predictions(make(), terminated=[0.0, 0.0], success=[0.2, 0.9]))
    env.reset(seed=0)
    after = env.step(action(2))
    assert after["next", "success"].tolist() == after["next", "terminated"].tolist() == [False, True]


def test_a_restored_env_continues_with_the_same_steps():
    model = make()
    env, other = imagined(model), imagined(model)
    env.reset(seed=3)
    env.step(action(2))
    state = env.state()
    other.set_state({name: np.array(values) for name, values in state.items()})
    for _ in range(4):  # over the end of the episodes
        assert_equal(env.step(action(2)), other.step(action(2)))


def test_a_collector_collects_from_it():
    env = imagined(with_predictions(make(), **CONTINUES), max_decisions=4)
    collector = Collector(env, RandomPolicy(env.spec, 2), seed=0, chunk=2)
    for _ in range(9):
        collector.decide()
    assert [episode.steps for episode in collector.drain_episodes()] == [8] * 4


@pytest.fixture
def store(tmp_path):
    store = EpisodeStore(tmp_path)
    for seed in range(2):
        episode = moving_windows(1, 6, seed=seed)[0].exclude("mask")
        # the state is the numbers of the episode and of the step
        clock = torch.stack([torch.full((7,), float(seed)), torch.arange(7.0)], -1)
        episode["observation", "state"], episode["next", "observation", "state"] = clock[:-1], clock[1:]
        store.append(episode)
    return store


def test_stored_starts_have_the_memory_of_the_steps_before_them(store):
    model = make()
    starts = StoredStarts(model, store, looks_back=2)
    steps = {}
    for seed in range(40):
        started = starts([seed])
        episode, step = started["observation", "state"][0].int().tolist()
        steps[episode, step] = started["memory"]
    # any step of both episodes is a start
    assert len({number for number, _ in steps}) == 2 and len(steps) > 6
    for (number, step), memory in steps.items():
        expected = model.empty_memory(1)
        episode = store.episode(number)
        for t in range(max(step - 2, 0), step):
            expected = model.observe(episode[t : t + 1].set(("memory", "world_model"), expected))
        torch.testing.assert_close(memory, expected)


def test_an_empty_store_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no episode to start from"):
        StoredStarts(make(), EpisodeStore(tmp_path))([0])


def test_a_rollout_buffer_stores_its_episodes():
    env = imagined(with_predictions(make(), **CONTINUES), max_decisions=3)
    collector = Collector(env, RandomPolicy(env.spec, 2), seed=0, chunk=2)
    buffer = RolloutBuffer(steps=6)
    buffer.start()
    for _ in range(6):
        buffer.add(collector.decide().exclude("noise"))
    buffer.close(collector.root)
    # [T, N]: both episodes of each robot end by the limit
    assert buffer.get(flatten=False)["next", "truncated"].sum() == 4
