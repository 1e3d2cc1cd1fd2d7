"""`buffer.type=vla` in training: collection into a ring buffer and updates from it alternate."""

import logging
from pathlib import Path

import pytest
import torch

from sparring.algorithms.ppo import PPO
from sparring.api import Trainer
from sparring.config.schema import load_config
from sparring.envs.env import make_env
from sparring.phases.finetune import Finetune
from sparring.policies.policy import make_policy
from sparring.processes.distributed import Distributed

SMALL = {
    "rollout": {"n_envs": 3, "steps": 12, "max_episode_steps": 10},
    "ppo": {"mini_batch_size": 16, "ppo_epochs": 2},
}
CONFIGS = {
    "cartpole": {"env": {"name": "gym:CartPole-v1"}},
    "camera": {"env": {"cameras": ["head"], "image_size": 40}, "policy": {"channels": [4, 4], "image_features": 8}},
    "chunks": {"rollout": SMALL["rollout"] | {"action_steps": 3}},
}


def trained(config, **buffer) -> tuple[Finetune, list[dict]]:
    torch.manual_seed(0)
    phase = Finetune.from_config(load_config(SMALL | config | {"buffer": buffer}), Distributed("cpu"))
    metrics = [phase.step(0.0) for _ in range(3)]
    phase.env.close()
    return phase, [{k: v for k, v in m.items() if not k.endswith("_seconds")} for m in metrics]


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("rollouts", [None, 1, 2.5])
def test_training_with_a_ring_is_bit_identical_to_the_standard_buffer(config, rollouts):
    standard, expected = trained(config)
    size = None if rollouts is None else int(rollouts * 12 * 3)
    ring, metrics = trained(config, type="vla", size=size)
    assert metrics == expected
    for name, weight in standard.model.state_dict().items():
        assert torch.equal(weight, ring.model.state_dict()[name]), name
    assert ring.buffer.capacity == (12 if rollouts is None else int(rollouts * 12))
    assert len(ring.buffer) == min(36, ring.buffer.capacity)


def test_a_ring_above_the_memory_limit_is_in_the_run_folder(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "sparring"):
        expected = trained(CONFIGS["cartpole"])[1]
        config = CONFIGS["cartpole"] | {"output": str(tmp_path / "run")}
        # `ring` must stay alive: its unnamed file is deleted with it
        ring, metrics = trained(config, type="vla", memory_limit_gb=1e-6)
        assert ring.buffer.is_full() and metrics == expected
        assert f"{tmp_path / 'run'}/sparring-buffer-" in Path("/proc/self/maps").read_text()
        trained(CONFIGS["cartpole"], type="vla", memory_limit_gb=1e-6, folder=str(tmp_path / "elsewhere"))
    # the first record is of the standard buffer
    _, *messages = [record.getMessage() for record in caplog.records if record.name == "sparring.data.buffer"]
    assert messages[0].startswith("buffer: 12 x 3 transitions, ") and f" kB in {tmp_path / 'run'}," in messages[0]
    assert f" kB in {tmp_path / 'elsewhere'}," in messages[1]


def test_rollouts_are_no_longer_than_the_ring():
    config = load_config(SMALL | {"buffer": {"type": "vla", "size": 15}})
    assert config.rollout_steps == 5
    # the standard buffer is a rollout, so its size decides
    assert load_config(SMALL | {"buffer": {"size": 150}}).rollout_steps == 50
    assert load_config(SMALL | {"buffer": {"type": "vla", "size": 150}}).rollout_steps == 12


def test_the_trainer_accepts_a_ring():
    config = load_config(CONFIGS["cartpole"])
    env = make_env(config.env, num_envs=3)
    policy = make_policy(config.policy, env.spec, chunk=1)
    algorithm, ring = PPO(config.ppo, policy), {"buffer_size": 30, "buffer_type": "vla", "mode": "sync"}
    trainer = Trainer(policy, env, algorithm, quiet=True, **ring)
    # the first rollout fits the normalisers, the other two are for updates
    assert trainer.train(90)
    env.close()
    ring = trainer.run.phase.buffer
    assert (ring.capacity, len(ring), trainer.run.phase.progress.updates) == (10, 10, 2)
