"""A diverging run ends within the update: error, saved minibatch, kept checkpoint, no crash."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from test_run_fails import SMALL, fails_after, run_in, saved

from sparring.cli.main import main
from sparring.errors import Diverged

EACH = SMALL | {"training": {"iterations": 5, "save_every": 1}}
FINETUNE = ["train", "finetune", "env.name=gym:CartPole-v1", "device=cpu", "policy.hidden=[8]", "rollout.n_envs=2"]
FINETUNE += ["rollout.steps=8", "rollout.render_episodes=0", "ppo.mini_batch_size=8", "training.iterations=2"]


def spoil_values(run) -> None:
    """NaN values of the critic from the second minibatch of the next update on."""
    evaluate, calls = run.phase.policy.evaluate, []

    def spoiled(td):
        scored = evaluate(td)
        calls.append(td["value"].clone())
        return scored.set("value", scored["value"] * (torch.nan if len(calls) >= 2 else 1.0))

    run.phase.policy.evaluate, run.minibatches = spoiled, calls


def spoil_actions(run) -> None:
    act, step, run.steps = run.phase.policy.act, run.phase.env.backend.step, 0

    def count(action):
        run.steps += 1
        return step(action)

    run.phase.policy.act = lambda td: (acted := act(td)).set("action", acted["action"] * torch.inf)
    run.phase.env.backend.step = count


def diverges_after(updates: int, run, breaks) -> str:
    with pytest.raises(Diverged) as raised:
        fails_after(updates, run, breaks)
    return str(raised.value)


def test_minibatch_and_last_good_checkpoint_are_kept(tmp_path):
    run = run_in(tmp_path, EACH)
    message = diverges_after(3, run, spoil_values)
    assert "the loss is nan in gradient step 2 of this update" in message and "lower ppo.policy_lr=0.001" in message
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["why"]) == ("crashed", message)
    with safe_open(tmp_path / "diverged.safetensors", "pt") as file:
        about, names = file.metadata(), set(file.keys())
        assert torch.equal(file.get_tensor("value"), run.minibatches[1])
    assert {"observation/state", "action", "advantage", "return", "next/executed"} <= names
    assert (about["update"], about["gradient_step"], about["loss"]) == ("4", "2", "nan")
    assert "diverged.safetensors" in (tmp_path / "train.log").read_text()


def test_actions_that_are_not_finite_are_not_executed(tmp_path):
    run = run_in(tmp_path, SMALL)
    message = diverges_after(2, run, spoil_actions)
    assert message == "training has diverged: actions of the policy are NaN or infinite; lower ppo.policy_lr=0.001"
    assert run.steps == 0 and saved(tmp_path) == []
    with safe_open(tmp_path / "diverged.safetensors", "pt") as file:
        assert file.metadata() == {"update": "3"} and file.get_tensor("observation/state").shape == (4, 2)
        assert not file.get_tensor("action").isfinite().any()


def test_huge_rewards_are_reported(tmp_path, capsys):
    words = ["env.name=gym_doubles:Breaks", "env.kwargs={how: huge, length: 20}", "--output", str(tmp_path)]
    assert main([*FINETUNE, *words]) == 1
    message = capsys.readouterr().err
    assert "check the training data: the largest number in return is 9.2e+29; or lower ppo.policy_lr=" in message


def test_skipped_steps_are_counted(tmp_path):
    run = run_in(tmp_path, EACH | {"training": {"iterations": 2, "skip_nonfinite_steps": 5}})
    evaluate, calls = run.phase.policy.evaluate, []

    def spoiled_once(td):
        calls.append(td)
        scored = evaluate(td)
        return scored.set("value", scored["value"] * torch.nan) if len(calls) == 4 else scored

    run.phase.policy.evaluate = spoiled_once
    assert run.run()
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["train/steps_skipped"] for line in lines] == [1, 0]
    taken = [line["train/gradient_steps"] for line in lines]
    assert taken[0] == taken[1] - 1 and all(line["avg_loss"] is not None for line in lines)


def test_diverged_command_exits_with_1_and_one_line(tmp_path, capsys):
    assert main([*FINETUNE, "ppo.policy_lr=1e30", "--output", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "sparring: training has diverged: " in message and message.rstrip().endswith("lower ppo.policy_lr=1e+30")


@pytest.mark.timeout(600)
def test_no_learning_rate_crashes_a_phase(tmp_path):
    """A part of `benchmarks/chaos.py divergence`, which tests all phases at all decades."""
    script = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
    words = ["divergence", "--only", "teacher", "imitate", "--rates", "1e-3", "1e5", "1e30", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "chaos_divergence.json").read_text())["cases"]
    assert all(case["complete"] for case in cases.values())
    verdicts = {name: [cell["verdict"] for cell in case["rates"].values()] for name, case in cases.items()}
    assert verdicts["teacher"] == ["trained", "diverged", "diverged"] and verdicts["imitate"][0] == "trained"
