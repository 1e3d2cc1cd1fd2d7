"""pi0 from the command line: updates in the built-in env, resume, evaluation and errors."""

import json
import shutil

import pytest
import tiny_pi0
import torch

from sparring.api import load_policy
from sparring.cli.main import main
from sparring.policies.lora import _learned as adapter_weights
from sparring.policies.lora import load_adapters, save_adapters
from sparring.runs.checkpoint import read_weights

SHORT = [
    "env.cameras=[head,wrist]",
    "env.image_size=32",
    "env.task=[reach_d0,push_d0]",
    "rollout.n_envs=2",
    "rollout.action_steps=2",
    "buffer.size=8",
    "ppo.mini_batch_size=4",
    "ppo.ppo_epochs=1",
    "rollout.max_episode_steps=6",
    "evaluation.episodes=2",
    "evaluation.baseline=false",
    "env.threads=1",
    "threads=1",
    "device=cpu",
    "policy.name=pi0",
    "policy.lora_r=2",
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_pi0.write(tmp_path_factory.mktemp("pi0"), states=64, actions=16)


def test_a_run_updates_resumes_and_is_evaluated(checkpoint, tmp_path):
    run = tmp_path / "run"
    arguments = ["train", "finetune", "--output", str(run), *SHORT, f"policy.model_path={checkpoint}"]
    arguments += ["training.iterations=2", "training.save_every=1"]
    assert main(arguments) == 0
    lines = [json.loads(line) for line in (run / "episode_metrics.jsonl").read_text().splitlines()]
    assert all(line["train/parity"] < 1e-4 for line in lines)
    straight = read_weights(run / "checkpoint-2/model.safetensors")
    shutil.rmtree(run / "checkpoint-2")
    assert main(arguments) == 0
    again = read_weights(run / "checkpoint-2/model.safetensors")
    assert straight.keys() == again.keys() and all(torch.equal(straight[key], again[key]) for key in again)
    base = read_weights(checkpoint / "model.safetensors")
    policy = load_policy(run)
    # the base weights are unchanged, the adapters are not
    assert torch.equal(policy.model.action_out_proj.base_layer.weight, base["action_out_proj.weight"])
    learned = adapter_weights(policy.model)
    assert all(w.abs().max() > 0 for key, w in learned.items() if "action_out_proj.lora_B" in key)
    save_adapters(policy.model, tmp_path / "adapters")
    first = load_policy(run / "checkpoint-1")
    load_adapters(first.model, tmp_path / "adapters")
    assert all(torch.equal(w, learned[key]) for key, w in adapter_weights(first.model).items())
    assert main(["eval", str(run), "--episodes", "2"]) == 0


def test_errors_are_reported_before_anything_is_written(checkpoint, tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["train", "finetune", "--output", str(run), *SHORT]
    assert main(arguments) == 2
    assert "policy.model_path is not set" in capsys.readouterr().err
    small = tiny_pi0.write(tmp_path / "small")
    assert main([*arguments, f"policy.model_path={small}"]) == 2
    assert "(max_state_dim)" in capsys.readouterr().err
    assert not run.exists()
