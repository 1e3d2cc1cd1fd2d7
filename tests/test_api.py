"""The Python API: Trainer, load_policy, make_env; it gives the same weights as the command line."""

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
    by_command = Run(config)
    by_command.run()

    torch.manual_seed(0)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, batch_size=32, quiet=True)
    assert trainer.train(total_timesteps=192)
    evaluation = trainer.evaluate(episodes=3)
    for name, tensor in by_command.phase.model.state_dict().items():
        assert torch.equal(tensor, policy.state_dict()[name]), name
    assert evaluation.episodes == 3


def test_second_call_of_train_continues(tmp_path):
    config = load_config(SMALL)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, quiet=True)
    trainer.train(total_timesteps=64)
    trainer.train(total_timesteps=192)
    # the first rollout fits the normalisers
    assert trainer.run.phase.progress.updates == 2


def test_loaded_policy_acts_like_the_saved_one(tmp_path):
    run = Run(load_config(SMALL | {"output": str(tmp_path)}))
    run.run()
    loaded = load_policy(tmp_path)
    td = run.phase.env.reset(seed=9, split="eval")
    with torch.no_grad():
        assert torch.equal(loaded.act(td.clone())["action"], run.phase.model.act(td.clone())["action"])
    assert not loaded.training


def test_unknown_buffer_type_is_refused():
    config = load_config(SMALL)
    env = make_env(config.env, 4)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, buffer_type="ring")
    with pytest.raises(ValueError, match="buffer.type = ring .*one of: standard"):
        trainer.train(10)


def test_unknown_name_of_the_package_is_refused():
    import sparring

    with pytest.raises(AttributeError, match="it offers Trainer"):
        sparring.nonsense  # noqa: B018


@pytest.mark.parametrize("example", sorted(Path("examples").glob("[0-9]*.py")), ids=lambda path: path.name)
def test_every_example_runs(example, tmp_path):
    command = [sys.executable, str(example), "--total-timesteps", "4096", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "first actions:" in done.stdout and (tmp_path / "out" / "config.yaml").exists()


def test_trainer_with_a_run_folder_continues_and_saves_its_config(tmp_path):
    config = load_config(SMALL)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    trainer = Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, output=tmp_path, quiet=True)
    assert trainer.train(total_timesteps=64) and trainer.train(total_timesteps=192)
    assert (tmp_path / "checkpoint-2").exists()
    saved = load_config(tmp_path / "config.yaml")
    assert saved.training.total_timesteps == 192 and saved.rollout.max_episode_steps == 10


def test_run_folder_needs_env_and_policy_with_configs(tmp_path):
    from doubles import LinearPolicy, counting_env

    policy = LinearPolicy()
    with pytest.raises(ValueError, match="make env and policy with make_env and make_policy"):
        Trainer(policy, counting_env(), PPO(load_config(SMALL).ppo, policy), output=tmp_path)


def test_evaluate_checkpoint_refuses_settings_fixed_by_training(tmp_path):
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


def test_trainer_and_command_line_give_bit_equal_weights_with_grpo(tmp_path):
    rollout = {"n_envs": 4, "max_episode_steps": 5, "n_episodes_per_batch": 8, "group_size": 2, "render_episodes": 0}
    grpo = {"mini_batch_size": 16, "epochs": 2}
    training = {"total_timesteps": 80}
    config = load_config({"algorithm": "grpo", "rollout": rollout, "grpo": grpo, "training": training})
    by_command = Run(config, folder=False, quiet=True)
    by_command.run()

    torch.manual_seed(0)
    env = make_env(config.env, 4, max_episode_steps=5, group_size=2)
    policy = make_policy(config.policy, env.spec, chunk=1)
    algorithm = GRPO(config.grpo, policy)
    trainer = Trainer(policy, env, algorithm, output=tmp_path / "run", quiet=True, episodes_per_batch=8)
    assert trainer.train(total_timesteps=80)
    for name, tensor in by_command.phase.model.state_dict().items():
        assert torch.equal(tensor, policy.state_dict()[name]), name
    saved = load_config(tmp_path / "run" / "config.yaml")
    assert saved.algorithm == "grpo" and saved.grpo.epochs == 2 and saved.rollout.group_size == 2


def small_trainer(config, seed: int = 0, algorithm=PPO, **settings) -> Trainer:
    torch.manual_seed(seed)
    env = make_env(config.env, 4, max_episode_steps=10)
    policy = make_policy(config.policy, env.spec, chunk=1)
    return Trainer(policy, env, algorithm(config.ppo, policy), buffer_size=64, batch_size=32, quiet=True, **settings)


@pytest.mark.usefixtures("forked")
def test_async_training_starts_from_the_given_policy_and_continues():
    config = load_config(SMALL)
    sync = small_trainer(config)
    # async mode with staleness 0 gives the same numbers from the same initial weights
    asynchronous = small_trainer(config, mode="async", staleness=0)
    for total_timesteps in (128, 256):
        assert sync.train(total_timesteps) and asynchronous.train(total_timesteps)
        for name, tensor in sync.policy.state_dict().items():
            assert torch.equal(tensor, asynchronous.policy.state_dict()[name]), name
    assert isinstance(asynchronous.run.phase.env, RemoteEnv) and not asynchronous.algorithm.off_policy.expected
    assert asynchronous.run.phase.progress.updates == 3 and asynchronous.evaluate(episodes=2).episodes == 2
    process = asynchronous.run.phase.env.actor.child.process
    assert process.poll() is None
    asynchronous.close(), sync.close()
    assert process.poll() is not None and sync.train(257)
    with pytest.raises(UserError, match="was closed"):
        asynchronous.train(512)


@pytest.mark.usefixtures("forked")
def test_buffer_type_vla_selects_async_mode_unless_a_mode_is_given(tmp_path):
    config = load_config(SMALL)
    trainer = small_trainer(config, buffer_type="vla", output=tmp_path)
    assert trainer.train(256)
    trainer.close()
    assert isinstance(trainer.run.phase.collector, RemoteCollector) and trainer.algorithm.off_policy.expected
    saved = load_config(tmp_path / "config.yaml")
    assert (saved.rollout.mode, saved.rollout.staleness, saved.buffer.type) == ("async", 1, "vla")
    # the actor process writes its log from its start
    assert "made robots 0 to" in next((tmp_path / "logs/env").iterdir()).read_text()
    ring = small_trainer(config, buffer_type="vla", mode="sync")
    assert ring.train(64) and isinstance(ring.run.phase.buffer, VLABuffer)


def test_async_mode_refuses_parts_that_the_actor_process_cannot_create():
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


def test_grpo_without_groups_and_two_batch_kinds_are_refused():
    config = load_config(SMALL)
    env = make_env(config.env, 4)
    policy = make_policy(config.policy, env.spec, chunk=1)
    with pytest.raises(ValueError, match="grpo needs rollout.n_episodes_per_batch and rollout.group_size"):
        Trainer(policy, env, GRPO(config.grpo, policy), quiet=True).train(10)
    with pytest.raises(ValueError, match="needs buffer.type=standard without buffer.size"):
        Trainer(policy, env, PPO(config.ppo, policy), buffer_size=64, episodes_per_batch=8).train(10)


class GentlePPO(PPO):
    """A user's subclass."""


def test_subclass_of_ppo_takes_its_settings():
    config = load_config({"algorithm": "test_api:GentlePPO", "algorithm_config": {"gamma": 0.5}})
    assert config.algorithm_section.gamma == 0.5 and config.algorithm_section.clip_ratio == 0.2
