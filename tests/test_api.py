"""The Python API is the command line's own code."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparring import GRPO, PPO, Trainer, load_config, load_policy, make_env, make_policy
from sparring.collect.remote.learner import RemoteCollector, RemoteEnv
from sparring.data.buffer import VLABuffer
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.runs.run import Run

SMALL = {
    "rollout": {"n_envs": 4, "max_episode_steps": 10},
    "buffer": {"size": 64},
    "ppo": {"mini_batch_size": 32, "ppo_epochs": 2},
    "training": {"total_timesteps": 192},
    "evaluation": {"episodes": 4},
    "logging": {"console_level": "ERROR"},
}


def test_trainer_and_command_line_give_bit_equal_weights(tmp_path):
    config = load_config(SMALL | {"output": str(tmp_path / "cli")})
    by_config = Run(config)
    by_config.run()

    torch.manual_seed(0)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, batch_size=32, quiet=True)
    assert trainer.train(total_timesteps=192)
    evaluation = trainer.evaluate(episodes=3)
    for name, tensor in by_config.phase.model.state_dict().items():
        assert torch.equal(tensor, policy.state_dict()[name]), name
    assert evaluation.episodes == 3


def test_train_again_goes_on(tmp_path):
    config = load_config(SMALL)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, quiet=True)
    trainer.train(total_timesteps=64)
    trainer.train(total_timesteps=192)
    # the first rollout fits the normalisers
    assert trainer.run.phase.progress.updates == 2


def test_a_saved_policy_comes_back_and_acts_the_same(tmp_path):
    run = Run(load_config(SMALL | {"output": str(tmp_path)}))
    run.run()
    loaded = load_policy(tmp_path)
    td = run.phase.env.reset(seed=9, split="eval")
    with torch.no_grad():
        assert torch.equal(loaded.act(td.clone())["action"], run.phase.model.act(td.clone())["action"])
    assert not loaded.training


def test_bad_arguments_are_told():
    config = load_config(SMALL)
    env = make_env(config.env, 4)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, buffer_type="ring")
    with pytest.raises(ValueError, match="buffer.type = ring .*one of: standard"):
        trainer.train(10)


def test_names_are_loaded_on_use_and_unknown_ones_are_told():
    import sparring

    with pytest.raises(AttributeError, match="it offers Trainer"):
        sparring.nonsense  # noqa: B018


@pytest.mark.parametrize("example", sorted(Path("examples").glob("[0-9]*.py")), ids=lambda path: path.name)
def test_every_example_runs(example, tmp_path):
    command = [sys.executable, str(example), "--total-timesteps", "4096", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "first actions:" in done.stdout and (tmp_path / "out" / "config.yaml").exists()


def test_a_trainer_with_a_folder_may_be_asked_for_more_and_is_evaluated_alike(tmp_path):
    config = load_config(SMALL)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, output=tmp_path, quiet=True)
    assert trainer.train(total_timesteps=64) and trainer.train(total_timesteps=192)
    assert (tmp_path / "checkpoint-2").exists()
    saved = load_config(tmp_path / "config.yaml")
    assert saved.training.total_timesteps == 192 and saved.rollout.max_episode_steps == 10


def test_a_folder_needs_parts_that_can_be_made_again(tmp_path):
    from doubles import LinearPolicy, counting_env

    policy = LinearPolicy()
    with pytest.raises(ValueError, match="make env and policy with make_env and make_policy"):
        Trainer(policy, counting_env(), PPO(load_config(SMALL).ppo, policy), output=tmp_path)


def test_evaluating_a_checkpoint_refuses_what_was_decided_in_training(tmp_path):
    from sparring.config.text import Setting
    from sparring.evaluation.of_run import evaluate_checkpoint

    run = Run(load_config(SMALL | {"output": str(tmp_path)}))
    run.run()
    with pytest.raises(ValueError, match="ppo.gamma: cannot be changed after training"):
        evaluate_checkpoint(str(tmp_path), [Setting("ppo.gamma", 0.5, "here")])
    with pytest.raises(ValueError, match=r"observation/state was \[36\] float32 and is \[30\] float32"):
        evaluate_checkpoint(str(tmp_path), [Setting("env.object_state", "hidden", "here")])
    with pytest.raises(ValueError, match="cannot write there .No such file or directory"):
        evaluate_checkpoint(str(tmp_path), [], json_file=tmp_path / "no" / "x.json")
    evaluation = evaluate_checkpoint(str(tmp_path), [Setting("env.task", "reach_d1", "here")])
    assert list(evaluation.scores["policy"]) == ["reach_d1"]


def test_grpo_by_the_trainer_and_by_the_command_line_give_bit_equal_weights(tmp_path):
    rollout = {"n_envs": 4, "max_episode_steps": 5, "n_episodes_per_batch": 8, "group_size": 2, "render_episodes": 0}
    grpo = {"mini_batch_size": 16, "epochs": 2}
    training = {"total_timesteps": 80}
    config = load_config({"algorithm": "grpo", "rollout": rollout, "grpo": grpo, "training": training})
    by_config = Run(config, folder=False, quiet=True)
    by_config.run()

    torch.manual_seed(0)
    env = make_env(config.env, 4, max_episode_steps=5, group_size=2)
    policy = make_policy(config.policy, env.spec, chunk=1)
    algorithm = GRPO(config.grpo, policy)
    trainer = Trainer(policy, env, algorithm, output=tmp_path / "run", quiet=True, episodes_per_batch=8)
    assert trainer.train(total_timesteps=80)
    for name, tensor in by_config.phase.model.state_dict().items():
        assert torch.equal(tensor, policy.state_dict()[name]), name
    saved = load_config(tmp_path / "run" / "config.yaml")
    assert saved.algorithm == "grpo" and saved.grpo.epochs == 2 and saved.rollout.group_size == 2


def small_trainer(config, seed: int = 0, algorithm=PPO, **settings) -> Trainer:
    torch.manual_seed(seed)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    return Trainer(policy, env, algorithm(config.ppo, policy), buffer_size=64, batch_size=32, quiet=True, **settings)


@pytest.mark.usefixtures("forked")
def test_asynchronous_training_starts_from_the_policy_given_and_goes_on():
    config = load_config(SMALL)
    in_turns = small_trainer(config)
    # in async mode as well, where nothing may be behind: the same numbers from the same first weights
    at_once = small_trainer(config, mode="async", staleness=0)
    for total_timesteps in (128, 256):
        assert in_turns.train(total_timesteps) and at_once.train(total_timesteps)
        for name, tensor in in_turns.policy.state_dict().items():
            assert torch.equal(tensor, at_once.policy.state_dict()[name]), name
    assert isinstance(at_once.run.phase.env, RemoteEnv) and not at_once.algorithm.off_policy.expected
    assert at_once.run.phase.progress.updates == 3 and at_once.evaluate(episodes=2).episodes == 2
    process = at_once.run.phase.env.actor.child.process
    assert process.poll() is None
    at_once.close(), in_turns.close()
    assert process.poll() is not None and in_turns.train(257)
    with pytest.raises(UserError, match="was closed"):
        at_once.train(512)


@pytest.mark.usefixtures("forked")
def test_the_buffer_vla_is_the_asynchronous_mode_unless_a_mode_is_given(tmp_path):
    config = load_config(SMALL)
    trainer = small_trainer(config, buffer_type="vla", output=tmp_path)
    assert trainer.train(256)
    trainer.close()
    assert isinstance(trainer.run.phase.collector, RemoteCollector) and trainer.algorithm.off_policy.expected
    saved = load_config(tmp_path / "config.yaml")
    assert (saved.rollout.mode, saved.rollout.staleness, saved.buffer.type) == ("async", 1, "vla")
    # what the actor process says from its start on
    assert "made robots 0 to" in next((tmp_path / "logs/env").iterdir()).read_text()
    ring = small_trainer(config, buffer_type="vla", mode="sync")
    assert ring.train(64) and isinstance(ring.run.phase.buffer, VLABuffer)


def test_what_the_collecting_process_cannot_make_again_is_refused():
    from doubles import LinearPolicy, counting_env

    config = load_config(SMALL)
    env, policy = make_env(config.env, 4), LinearPolicy()
    algorithm = PPO(config.ppo, policy)
    with pytest.raises(UserError, match="this Env has none; create it with make_env, or use mode='sync'"):
        Trainer(policy, counting_env(), algorithm, mode="async")
    with pytest.raises(UserError, match="this LinearPolicy has none; .*make_policy .*, or use mode='sync'"):
        Trainer(policy, env, algorithm, mode="async")
    mine = type("Mine", (PPO,), {"__module__": "__main__"})
    with pytest.raises(UserError, match="algorithm '__main__:Mine' is defined in the script .*move the class"):
        small_trainer(config, algorithm=mine, mode="async")
    own = type("Own", (ActorCritic,), {"__module__": "mine"})(config.policy, env.spec, 1)
    with pytest.raises(UserError, match="its config, 'actor_critic', which is not the class .* to 'mine:Own'"):
        Trainer(own, env, PPO(config.ppo, own), mode="async")
    with pytest.raises(UserError, match="^buffer_type='vla' \\(mode='async'\\) builds .* or use mode='sync'"):
        Trainer(policy, env, algorithm, buffer_type="vla")
    assert Trainer(policy, env, algorithm, buffer_type="vla", mode="sync").settings["rollout"]["mode"] == "sync"


def test_grpo_without_groups_and_both_kinds_of_batches_are_told():
    config = load_config(SMALL)
    env = make_env(config.env, 4)
    policy = make_policy(config.policy, env.spec, chunk=1)
    with pytest.raises(ValueError, match="grpo needs rollout.n_episodes_per_batch and rollout.group_size"):
        Trainer(policy, env, GRPO(config.grpo, policy), quiet=True).train(10)
    with pytest.raises(ValueError, match="needs buffer.type=standard without buffer.size"):
        Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, episodes_per_batch=8).train(10)


class GentlePPO(PPO):
    """Of one's own: it takes PPO's settings."""


def test_a_subclass_takes_the_settings_of_ppo():
    config = load_config({"algorithm": "test_api:GentlePPO", "algorithm_config": {"gamma": 0.5}})
    assert config.algorithm_section.gamma == 0.5 and config.algorithm_section.clip_ratio == 0.2
