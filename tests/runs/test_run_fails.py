"""A run whose robots or policy fail is saved, unless it failed during an update."""

import json
from types import SimpleNamespace

import pytest
import torch

from sparring.config.schema import load_config
from sparring.errors import PeerGone
from sparring.processes.distributed import fail_together
from sparring.runs.checkpoint import checkpoints
from sparring.runs.run import Run

SMALL = {
    "env": {"name": "doubles_failing:Failing"},
    "policy": {"hidden": [16]},
    "rollout": {"n_envs": 4, "steps": 9, "render_episodes": 0},
    "ppo": {"mini_batch_size": 16, "ppo_epochs": 2},
    "training": {"iterations": 5, "save_every": 1000},
    "device": "cpu",
}
TEACHER = {
    "phase": "teacher",
    "env": {"task": "explore", "cameras": ["head", "wrist"], "image_size": 16, "threads": 1},
    "world_model": {"name": "doubles_world_model:CopyingWorldModel"},
    "rollout": {"n_envs": 3, "steps": 4, "max_episode_steps": 9, "action_steps": 2},
    "teacher": {"gradient_steps": 2, "batch_size": 2},
    "training": {"bptt_length": 2, "iterations": 5, "log_every": 1, "save_every": 1000},
    "device": "cpu",
}
CASES = {
    "finetune": SMALL,
    "in groups": SMALL | {"rollout": SMALL["rollout"] | {"groups": 2}},
    "by episodes": SMALL | {"rollout": {"n_envs": 4, "n_episodes_per_batch": 8, "render_episodes": 0}},
    "teacher": TEACHER,
}


def fail(*_):
    raise ZeroDivisionError("the gripper fell off")


def run_in(folder, settings=SMALL) -> Run:
    return Run(load_config(settings | {"output": str(folder)}))


def fails_after(updates: int, run: Run, breaks) -> None:
    """Call `breaks(run)` after `updates` updates, before the next one; the run must raise."""
    step = run.phase.step

    def step_or_break(fraction):
        if run.phase.progress.updates == updates:
            breaks(run)
        return step(fraction)

    run.phase.step = step_or_break
    with pytest.raises(ZeroDivisionError, match="fell off"):
        run.run()


def break_robots(run: Run) -> None:
    """Envs fail after two more decisions, and their state cannot be saved."""
    for env in getattr(run.phase.env, "envs", [run.phase.env]):
        step, left = env.backend.step, iter(range(2))
        env.backend.step = lambda action, step=step, left=left: step(action) if next(left, None) is not None else fail()
        env.backend.state = fail


def break_policy(run: Run) -> None:
    run.phase.policy.act = fail


def break_update(run: Run) -> None:
    run.phase.algorithm.update = fail


def spoil_weights(run: Run) -> None:
    next(run.phase.policy.parameters()).data.fill_(torch.nan)
    break_policy(run)


def spoil_normalizer(run: Run) -> None:
    name, buffer = next(
        (name, b) for name, b in run.phase.policy.named_buffers() if b.is_floating_point() and b.numel() > 1
    )
    buffer.fill_(torch.nan)
    run.phase.policy.act = fail


def saved(folder) -> list[str]:
    return [path.name for path in checkpoints(folder)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_failure_of_robots_saves_and_the_run_resumes(tmp_path, case):
    run = run_in(tmp_path, case)
    fails_after(3, run, break_robots)
    assert "failed after 3 updates; saved. The same command resumes it." in (tmp_path / "train.log").read_text()
    assert saved(tmp_path) == ["checkpoint-3"]
    learned = {name: tensor.clone() for name, tensor in run.phase.model.state_dict().items()}
    (getattr(run.phase, "close", None) or run.phase.env.close)()
    again = run_in(tmp_path, case)
    assert again.phase.progress == run.phase.progress and again.phase.progress.updates == 3
    assert all(torch.equal(tensor, learned[name]) for name, tensor in again.phase.model.state_dict().items())
    assert again.run()
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3, 4, 5]
    (getattr(again.phase, "close", None) or again.phase.env.close)()


def test_failure_of_act_saves_a_checkpoint(tmp_path):
    fails_after(2, run_in(tmp_path), break_policy)
    assert saved(tmp_path) == ["checkpoint-2"]
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["why"]) == ("crashed", "ZeroDivisionError: the gripper fell off")


@pytest.mark.parametrize(
    ("updates", "breaks"),
    [(2, break_update), (2, spoil_weights), (2, spoil_normalizer), (0, break_robots)],
    ids=["update", "NaN", "normaliser", "start"],
)
def test_failure_during_an_update_is_not_saved(tmp_path, updates, breaks):
    fails_after(updates, run_in(tmp_path), breaks)
    assert saved(tmp_path) == []


def test_later_failure_of_an_update_is_not_saved(tmp_path):
    """The policy fails once, then an update of the same run object."""
    run = run_in(tmp_path)
    act = run.phase.policy.act
    fails_after(2, run, break_policy)
    run.phase.policy.act = act
    fails_after(3, run, break_update)
    assert saved(tmp_path) == ["checkpoint-2"]


def test_rank_without_its_peers_does_not_save(tmp_path):
    """Processes can only save together."""
    run = run_in(tmp_path)
    run.phase.collector.collect = lambda buffer: (_ for _ in ()).throw(PeerGone("process 1 has gone"))
    run.phase.progress.updates = 2
    with pytest.raises(PeerGone):
        run.run()
    assert saved(tmp_path) == []


def test_peer_gone_keeps_the_original_error_as_cause():
    def barrier():
        raise PeerGone("process 1 has gone")

    with pytest.raises(PeerGone) as raised, fail_together(SimpleNamespace(barrier=barrier)):
        fail()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
