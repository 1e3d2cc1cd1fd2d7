"""Reward terms by import path, added to the env's reward in finetune."""

import re
from pathlib import Path

import pytest
import torch
from doubles import LinearPolicy, counting_env
from small_runs import SMALL, config_in
from tensordict import TensorDict

from sparring.cli.main import main
from sparring.collect.collector import Collector
from sparring.config.schema import load_config
from sparring.config.section import ConfigError
from sparring.config.text import Setting, parse_overrides
from sparring.data.buffer import RolloutBuffer
from sparring.errors import UserError
from sparring.processes.distributed import Distributed
from sparring.rewards.added_rewards import AddedRewards
from sparring.rewards.configs import RewardsConfig
from sparring.rewards.terms import RewardTerm
from sparring.runs.checkpoint import checkpoints
from sparring.runs.run import Run

ALONE = Distributed("cpu")
DOCS = Path(__file__).parents[2] / "docs" / "rewards.md"


def two(td):
    return torch.full(td.batch_size, 2.0)


def task_reward(td):
    return td["next", "reward"].sum(-1)


def no_parameters():
    return 0


def one_number(td):
    return td["action"].mean()


def no_tensor(td):
    return 1.0


def unknown_key(td):
    return td["judged", "error"]


def nan_after_a_while(td):
    return torch.where(td["action"].abs().sum((1, 2)) > 0, torch.nan, 0.0)


class NotATerm:
    pass


class Counts(RewardTerm):
    """Rewards with how many transitions it has learned from."""

    learned = 0

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return torch.full(td.batch_size, float(self.learned))

    def learn(self, td, distributed):
        self.learned += len(td)

    def state_dict(self):
        return {"learned": self.learned}

    def load_state_dict(self, state):
        self.learned = state["learned"]


def terms_of(**terms):
    return {f"{__name__}:{name}": weight for name, weight in terms.items()}


def rollout_and_rewards(**settings):
    env, chunk = counting_env(), 2
    buffer = RolloutBuffer(4)
    Collector(env, LinearPolicy(chunk), seed=0, chunk=chunk).collect(buffer)
    return buffer, AddedRewards(RewardsConfig(**settings), env, chunk, ALONE)


def test_terms_are_added_to_the_envs_reward_on_the_last_executed_step():
    buffer, rewards = rollout_and_rewards(terms=terms_of(two=0.5, task_reward=3.0), task_reward=0.25)
    before = buffer.rollout()["next", "reward"].clone()
    last = buffer.rollout()["next", "executed"] - 1
    metrics = rewards.write_rewards(buffer)
    added = 0.5 * 2 + 3.0 * before.sum(-1)
    expected = 0.25 * before
    expected.scatter_add_(-1, last[..., None], added[..., None])
    torch.testing.assert_close(buffer.rollout()["next", "reward"], expected)
    # a term with the name of the env's reward is logged by its path
    mean = float(before.sum(-1).mean())
    assert metrics == pytest.approx(
        {"reward/two": 2.0, "reward/task_reward": mean, f"reward/{__name__}:task_reward": mean}
    )


def test_with_terms_the_env_reward_has_weight_1_by_default():
    override = f"rewards.{__name__}:two=0"
    mapping = f"rewards.terms={{{__name__}:two: 0}}"
    weights = [load_config(None, parse_overrides(w)).rewards.task_reward for w in ([], [override], [mapping])]
    assert weights == [0.0, 1.0, 1.0]
    assert load_config(None, parse_overrides([override, "rewards.task_reward=0"])).rewards.task_reward == 0.0
    buffer, rewards = rollout_and_rewards(terms=terms_of(two=0.0, Counts=1.0), task_reward=1.0)
    before = buffer.rollout()["next", "reward"].clone()
    rewards.write_rewards(buffer)
    torch.testing.assert_close(buffer.rollout()["next", "reward"], before)


def test_a_class_learns_and_keeps_its_state():
    buffer, rewards = rollout_and_rewards(terms=terms_of(Counts=1.0))
    rewards.write_rewards(buffer)
    _, restored = rollout_and_rewards(terms=terms_of(Counts=1.0))
    restored.load_state_dict(rewards.state_dict(), rewards.process_state())
    count = buffer.rollout().numel()
    assert count and restored.write_rewards(rollout_and_rewards(terms=terms_of(two=1.0))[0])["reward/Counts"] == count


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere_at_all:two", "no module 'nowhere_at_all'"),
        (f"{__name__}:twoo", "has no 'twoo'; nearest: two"),
        (f"{__name__}:no_parameters", r"takes \(\); expected a function"),
        (f"{__name__}:one_number", r"returned shape \[\], expected \[2\]"),
        (f"{__name__}:no_tensor", r"returned float, expected a tensor \[2\]"),
        (
            f"{__name__}:unknown_key",
            rf"failed on a sample of zeros with KeyError.* \({re.escape(__file__)} line "
            rf"{unknown_key.__code__.co_firstlineno + 1}\); the td has observation, action",
        ),
        (f"{__name__}:NotATerm", "is not a RewardTerm; expected a function"),
        (f"{__name__}:DOCS", "expected a class, or a function"),
    ],
)
def test_a_term_that_does_not_fit_is_refused_before_training(tmp_path, capsys, path, message):
    with pytest.raises(UserError, match=message) as refused:
        Run(config_in(tmp_path / "run", rewards={path: 1.0}), quiet=True)
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


def test_nan_from_a_term_stops_training():
    buffer, rewards = rollout_and_rewards(terms=terms_of(nan_after_a_while=1.0))
    with pytest.raises(UserError, match="nan_after_a_while returned NaN or infinity"):
        rewards.write_rewards(buffer)


def test_a_checkpoint_is_saved_when_a_term_fails(tmp_path):
    run = Run(config_in(tmp_path, rewards=terms_of(two=1.0), training={"iterations": 9}), quiet=True)
    step = run.phase.step

    def step_until_the_third(fraction):
        if run.phase.progress.updates == 2:
            run.phase.rewards.terms[f"{__name__}:two"].function = no_tensor
        return step(fraction)

    run.phase.step = step_until_the_third
    with pytest.raises(UserError, match="two returned float, expected a tensor"):
        run.run()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rewards.my.module:term=a"], "my.module:term=a: expected a number"),
        (["rewards.terms.term=1"], "'term' is not an import path"),
        (["rewards.my.module:term=1", "rollout.mode=async"], "rollout.mode=async; use sync"),
        (["rewards.my.module:term=1", "phase=student", "student.teacher=x"], "for finetune only, not for student"),
    ],
)
def test_unsupported_settings_raise_an_error(arguments, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, parse_overrides(arguments), inherit=False)


def test_an_import_path_as_key_is_loaded_overridden_and_saved(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("rewards: {my.module:term: 1.0, other:term: 2}\n")
    assert load_config(file).rewards.terms == {"my.module:term": 1.0, "other:term": 2}
    config = load_config(file, [Setting("rewards.my.module:term", 3.0, "command line")])
    assert config.rewards.terms == {"my.module:term": 3.0, "other:term": 2}
    (tmp_path / "again.yaml").write_text(config.to_yaml())
    assert load_config(tmp_path / "again.yaml") == config


def test_the_example_of_the_docs_trains(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)
    assert len(code.splitlines()) <= 10
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config(SMALL | {"output": str(tmp_path / "run"), "rewards": {"my_rewards:calm": 0.1}})
    run = Run(config, quiet=True)
    metrics = run.phase.step(0.0)
    # actions of CartPole are 0 or 1
    assert -1 <= metrics["reward/calm"] < 0 and metrics["reward/task_reward"] == 1.0
    reward = run.phase.buffer.rollout()["next", "reward"]
    torch.testing.assert_close(reward, 1 - 0.1 * run.phase.buffer.rollout()["action"].square().mean(-1))
    run.phase.env.close()
    arguments = ["rewards.my_rewards:ends_early=-1", "env.name=gym:CartPole-v1", "device=cpu", "--dry-run"]
    assert main(["train", "finetune", *arguments, "--output", str(tmp_path / "dry")]) == 0
