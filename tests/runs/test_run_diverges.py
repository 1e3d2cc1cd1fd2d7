"""A run that diverges ends within the update: what it says, what it keeps, and that it never crashes."""

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
    """The critic's, from the second minibatch of the next update on."""
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
    with pytest.raises(Diverged) as told:
        fails_after(updates, run, breaks)
    return str(told.value)


def test_the_minibatch_is_kept_and_so_is_the_last_good_checkpoint(tmp_path):
    run = run_in(tmp_path, EACH)
    said = diverges_after(3, run, spoil_values)
    assert "the loss is nan in gradient step 2 of this update" in said and "lower ppo.policy_lr=0.001" in said
    assert saved(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["why"]) == ("crashed", said)
    with safe_open(tmp_path / "diverged.safetensors", "pt") as file:
        about, names = file.metadata(), set(file.keys())
        assert torch.equal(file.get_tensor("value"), run.minibatches[1])
    assert {"observation/state", "action", "advantage", "return", "next/executed"} <= names
    assert (about["update"], about["gradient_step"], about["loss"]) == ("4", "2", "nan")
    assert "diverged.safetensors" in (tmp_path / "train.log").read_text()


def test_actions_that_are_not_finite_reach_no_robot_and_nothing_is_saved(tmp_path):
    run = run_in(tmp_path, SMALL)
    said = diverges_after(2, run, spoil_actions)
    assert said == "training has diverged: actions of the policy are NaN or infinite; lower ppo.policy_lr=0.001"
    assert run.steps == 0 and saved(tmp_path) == []
    with safe_open(tmp_path / "diverged.safetensors", "pt") as file:
        assert file.metadata() == {"update": "3"} and file.get_tensor("observation/state").shape == (4, 2)
        assert not file.get_tensor("action").isfinite().any()


def test_huge_rewards_are_named(tmp_path, capsys):
    words = ["env.name=gym_doubles:Breaks", "env.kwargs={how: huge, length: 20}", "--output", str(tmp_path)]
    assert main([*FINETUNE, *words]) == 1
    said = capsys.readouterr().err
    assert "check the training data: the largest number in return is 9.2e+29; or lower ppo.policy_lr=" in said


def test_steps_that_are_left_out_are_counted(tmp_path):
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


def test_the_command_ends_with_exit_code_1_and_the_sentence(tmp_path, capsys):
    assert main([*FINETUNE, "ppo.policy_lr=1e30", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "sparring: training has diverged: " in said and said.rstrip().endswith("lower ppo.policy_lr=1e+30")


@pytest.mark.timeout(600)
def test_no_learning_rate_crashes_a_phase(tmp_path):
    """A part of benchmarks/chaos.py divergence, which tries all phases at all decades."""
    script = Path(__file__).parents[2] / "benchmarks" / "chaos.py"
    words = ["divergence", "--only", "teacher", "imitate", "--rates", "1e-3", "1e5", "1e30", "--output", str(tmp_path)]
    done = subprocess.run([sys.executable, script, *words], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads((tmp_path / "chaos_divergence.json").read_text())["cases"]
    assert all(case["complete"] for case in cases.values())
    verdicts = {name: [cell["verdict"] for cell in case["rates"].values()] for name, case in cases.items()}
    assert verdicts["teacher"] == ["trained", "diverged", "diverged"] and verdicts["imitate"][0] == "trained"
