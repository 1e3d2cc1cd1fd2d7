"""A resumed run is bit-identical to an uninterrupted one."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch
from small_runs import status_in

from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.config.text import saved_settings
from sparring.errors import UserError
from sparring.runs.checkpoint import checkpoints, find_checkpoint
from sparring.runs.run import Run

pytestmark = pytest.mark.usefixtures("forked")
SMALL = {
    "rollout": {"n_envs": 3, "steps": 12, "max_episode_steps": 10, "render_episodes": 0},
    "ppo": {"mini_batch_size": 16, "ppo_epochs": 2},
    "training": {"save_every": 1, "keep_checkpoints": 10, "iterations": 5},
    "logging": {"console_level": "ERROR"},
}
NATIVE = {"name": "native_vla", "image_size": 32, "patch_size": 16, "vision_layers": 1, "layers": 1}
CASES = {
    "tabletop": {},
    "pendulum": {"env": {"name": "gym:Pendulum-v1"}},
    "cartpole in workers": {"env": {"name": "gym:CartPole-v1", "vectorize": "process", "workers": 2}},
    "camera": {"env": {"cameras": ["head"], "image_size": 40}, "policy": {"channels": [4, 4], "image_features": 8}},
    "chunks": {"rollout": SMALL["rollout"] | {"action_steps": 3}},
    "by episodes": {"rollout": {"n_envs": 2, "n_episodes_per_batch": 4}, "env": {"name": "gym:CartPole-v1"}},
    "grpo": {
        "algorithm": "grpo",
        "ppo": {},
        "grpo": {"mini_batch_size": 16, "epochs": 2, "kl_coef": 0.1},
        "rollout": {"n_envs": 4, "n_episodes_per_batch": 8, "group_size": 2, "max_episode_steps": 5},
    },
    "flow": {
        "policy": {"name": "flow", "method": "flow_noise", "width": 16, "heads": 2, "layers": 1, "sampling_steps": 2},
        "rollout": SMALL["rollout"] | {"action_steps": 3},
    },
    "flow by grpo": {
        "policy": {"name": "flow", "method": "denoising_mdp", "width": 16, "heads": 2, "layers": 1, "horizon": 4},
        "algorithm": "grpo",
        "ppo": {},
        "grpo": {"mini_batch_size": 16, "epochs": 2, "kl_coef": 0.1},
        "rollout": {"n_envs": 4, "n_episodes_per_batch": 8, "group_size": 2, "max_episode_steps": 5},
    },
    "memory": {
        "policy": NATIVE | {"memory_size": 7},
        "env": {"cameras": ["head"], "image_size": 40},
        "rollout": SMALL["rollout"] | {"action_steps": 3, "steps": 5},
    },
    "memory by grpo": {
        "policy": NATIVE | {"memory_size": 7},
        "algorithm": "grpo",
        "ppo": {},
        "grpo": {"mini_batch_size": 16, "epochs": 2, "kl_coef": 0.1},
        "rollout": {"n_envs": 4, "n_episodes_per_batch": 8, "group_size": 2, "max_episode_steps": 5},
    },
    "critic warm-up": {"ppo": SMALL["ppo"] | {"critic_warmup_updates": 4}},
    "gsde": {"policy": {"distribution": "gsde", "sde_sample_freq": 5}},
    "evaluations between": {"evaluation": {"every": 2, "episodes": 3}},
    "schedules": {"ppo": SMALL["ppo"] | {"lr_schedule": "cosine", "warmup_updates": 2, "clip_schedule": "linear"}},
}


def config_in(folder, **more):
    return load_config(SMALL | {"output": str(folder)} | more)


def run_to_the_end(config) -> Run:
    run = Run(config)
    assert run.run()
    run.phase.env.close()
    return run


def weights(run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.phase.model.state_dict().items()}


def lines(folder) -> list[dict]:
    """Without times and the parity, which a new process measures on its complete first rollout."""
    timed = ("timestamp", "row", "crc", "perf/steps_per_second", "train/parity", "train/parity_ratio")
    rows = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in timed and not k.endswith("_seconds")} for row in rows]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_resumed_run_is_bit_identical(tmp_path, case):
    straight = run_to_the_end(config_in(tmp_path / "straight", **case))
    stopped = Run(config_in(tmp_path / "stopped", **case))
    for _ in range(3):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    stopped.phase.env.close()
    resumed = run_to_the_end(config_in(tmp_path / "stopped", **case))
    assert resumed.phase.progress == straight.phase.progress
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")[3:]


@pytest.mark.usefixtures("not_forked")
def test_killed_run_resumes_bit_identically(tmp_path):
    """With a killed process; the metrics file has no repeated line."""
    straight = run_to_the_end(config_in(tmp_path / "straight"))
    child = textwrap.dedent("""
        import json, os, signal, sys
        import torch
        torch.set_num_threads(1)
        from sparring.runs.run import Run
        from sparring.config.schema import load_config
        run = Run(load_config(json.loads(sys.argv[1])))
        step = run.phase.step
        def step_until_3(fraction):
            if run.phase.progress.updates == 3:
                run.recorder.write(run.phase.progress, {"written": 1.0})
                os.kill(os.getpid(), signal.SIGKILL)
            return step(fraction)
        run.phase.step = step_until_3
        run.run()
    """)
    settings = json.dumps(SMALL | {"output": str(tmp_path / "killed")})
    killed = subprocess.run([sys.executable, "-c", child, settings], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    assert find_checkpoint(tmp_path / "killed").name == "checkpoint-3"
    resumed = run_to_the_end(config_in(tmp_path / "killed"))
    for name, tensor in weights(straight).items():
        assert torch.equal(tensor, weights(resumed)[name]), name
    assert lines(tmp_path / "killed") == lines(tmp_path / "straight")


def test_second_process_in_a_run_folder_is_refused(tmp_path):
    child = textwrap.dedent("""
        import json, sys
        import torch
        torch.set_num_threads(1)
        from sparring.runs.run import Run
        from sparring.config.schema import load_config
        run = Run(load_config(json.loads(sys.argv[1])))
        step = run.phase.step
        def step_and_wait(fraction):
            metrics = step(fraction)
            if run.phase.progress.updates == 3:
                print("at 3", flush=True)
                sys.stdin.read()
            return metrics
        run.phase.step = step_and_wait
        run.run()
    """)
    config = config_in(tmp_path / "run")
    words = [sys.executable, "-c", child, json.dumps(SMALL | {"output": config.output})]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes) as first:
        assert first.stdout.readline() == b"at 3\n"
        before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        for resume in ("auto", "never"):
            with pytest.raises(
                UserError, match="another process is training there; wait until it is done, stop it, or"
            ):
                Run(config.model_copy(update={"resume": resume}))
        assert before == {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        first.kill()
    # a killed process does not block the folder
    assert run_to_the_end(config).phase.progress.updates == 5


def test_second_run_of_a_process_in_a_folder_waits_for_the_first(tmp_path):
    first, second = Run(config_in(tmp_path / "run")), Run(config_in(tmp_path / "run"))
    step = first.phase.step

    def step_while_another_tries(fraction):
        with pytest.raises(UserError, match="another process is training there"):
            second.run()
        return step(fraction)

    first.phase.step = step_while_another_tries
    assert first.run() and first.phase.progress.updates == 5
    first.evaluate()
    for run in (first, second):
        run.phase.env.close()
    assert run_to_the_end(config_in(tmp_path / "run")).phase.progress.updates == 5


def test_env_without_state_starts_new_episodes_with_a_warning(tmp_path, monkeypatch, caplog):
    from sparring.envs.gym_batch import GymBatch

    monkeypatch.setattr(GymBatch, "state", lambda self: None)
    env = {"name": "gym:Pendulum-v1"}
    first = Run(config_in(tmp_path, env=env))
    first.phase.step(0.0)
    begun_with = first.phase.buffer.get(flatten=False)["observation", "state"][0].clone()
    first.save()
    monkeypatch.setattr("sparring.runs.run.log.warning", lambda *words: messages.append(words[-1]))
    messages = []
    again = Run(config_in(tmp_path, env=env))
    assert len(messages) == 1 and "robots start new episodes" in messages[0]
    assert again.phase.progress.updates == 1
    again.phase.step(0.2)
    # new episodes, not the earlier ones
    assert not torch.equal(again.phase.buffer.get(flatten=False)["observation", "state"][0], begun_with)


def test_pending_metrics_survive_a_stop(tmp_path):
    training = SMALL["training"] | {"log_every": 5}
    run_to_the_end(config_in(tmp_path / "straight", training=training))
    stopped = Run(config_in(tmp_path / "stopped", training=training))
    step = stopped.phase.step

    def step_and_stop(fraction):
        if stopped.phase.progress.updates == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(fraction)

    stopped.phase.step = step_and_stop
    assert not stopped.run()
    run_to_the_end(config_in(tmp_path / "stopped", training=training))
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")
    assert len(lines(tmp_path / "stopped")) == 1


def test_run_killed_during_a_save_resumes_bit_identically(tmp_path):
    straight = run_to_the_end(config_in(tmp_path / "straight"))
    child = textwrap.dedent("""
        import json, os, signal, sys
        from pathlib import Path
        import torch
        torch.set_num_threads(1)
        from sparring.runs.run import Run
        from sparring.config.schema import load_config
        run = Run(load_config(json.loads(sys.argv[1])))
        whole_save = torch.save
        def half_a_save(state, file):
            whole_save(state, file)
            if run.phase.progress.updates == 3:
                file.flush()
                os.truncate(run.folder / ".partial-checkpoint-3/training_state.pt", 1000)
                os.kill(os.getpid(), signal.SIGKILL)
        torch.save = half_a_save
        run.run()
    """)
    settings = json.dumps(SMALL | {"output": str(tmp_path / "killed")})
    killed = subprocess.run([sys.executable, "-c", child, settings], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / "killed" / ".partial-checkpoint-3").exists()
    resumed = run_to_the_end(config_in(tmp_path / "killed"))
    assert not (tmp_path / "killed" / ".partial-checkpoint-3").exists()
    assert all(torch.equal(tensor, weights(resumed)[name]) for name, tensor in weights(straight).items())


def test_missed_evaluation_is_made_after_a_resume(tmp_path, monkeypatch):
    settings = {"training": {"iterations": 4, "save_every": 2}, "evaluation": {"episodes": 2, "every": 2}}
    straight = run_to_the_end(config_in(tmp_path / "straight", **settings))
    killed = Run(config_in(tmp_path / "killed", **settings))

    def kill(_):
        raise KeyboardInterrupt

    # update 2 is saved before
    monkeypatch.setattr(killed.evaluator, "_evaluate_here", kill)
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    found = {}
    for folder in (straight.folder, run_to_the_end(config_in(tmp_path / "killed", **settings)).folder):
        rows = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
        found[folder] = [(row["update"], row["eval/reward"]) for row in rows]
    assert [update for update, _ in found[straight.folder]] == [2, 4]
    assert found[killed.folder] == found[straight.folder]
    # the evaluation is not repeated
    run_to_the_end(config_in(tmp_path / "killed", **settings))
    assert len((killed.folder / "evaluations.jsonl").read_text().splitlines()) == 2


def test_partial_files_are_removed_on_start(tmp_path):
    finished = run_to_the_end(config_in(tmp_path))
    left = finished.folder / ".partial-checkpoint-2"
    left.mkdir()
    (left / "spec.json").write_text("{}")
    video = finished.folder / "videos" / "episode_000014.partial"
    video.parent.mkdir(exist_ok=True)
    video.write_bytes(b"half")
    Run(config_in(tmp_path))
    assert not left.exists() and not video.exists()


def test_finished_run_is_not_trained_again(tmp_path):
    first = run_to_the_end(config_in(tmp_path))
    again = run_to_the_end(config_in(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(weights(first).values(), weights(again).values(), strict=True))
    assert len(lines(tmp_path)) == 5


def test_status_is_written_with_each_checkpoint(tmp_path):
    """Even with short updates, so that a killed run has a correct status."""
    run, seen = Run(config_in(tmp_path, training={"iterations": 3, "save_every": 1})), []
    run.recorder.record_next_video = lambda run: seen.append(status_in(tmp_path)["progress"]["updates"])
    assert run.run() and seen == [0, 1, 2, 3]


LIMITS = {"num_episodes": (6, 12), "total_timesteps": (100, 200), "iterations": (3, 5)}


@pytest.mark.parametrize(("limit", "values"), LIMITS.items())
def test_larger_limit_continues_a_run(tmp_path, limit, values):
    short, long = ({"iterations": None, "save_every": 1, limit: value} for value in values)
    straight = run_to_the_end(config_in(tmp_path / "straight", training=long))
    run_to_the_end(config_in(tmp_path / "run", training=short))
    more = {"evaluation": {"episodes": 7}, "threads": 1, "device": "cpu"}
    further = run_to_the_end(
        config_in(tmp_path / "run", training=long | {"save_every": 2, "keep_checkpoints": 5}, **more)
    )
    assert further.phase.progress == straight.phase.progress
    assert all(torch.equal(a, b) for a, b in zip(weights(straight).values(), weights(further).values(), strict=True))
    assert lines(tmp_path / "run") == lines(tmp_path / "straight")
    saved = saved_settings(tmp_path / "run")
    assert saved[f"training.{limit}"] == values[1] and saved["training.save_every"] == 2
    assert saved["evaluation.episodes"] == 7
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == "finished" and status["progress"]["fraction"] == 1
    with pytest.raises(UserError, match=r"policy_lr: 0\.001 in the folder, 0\.01 now"):
        Run(config_in(tmp_path / "run", training=long, ppo=SMALL["ppo"] | {"policy_lr": 0.01}))


def test_changed_limit_is_logged_with_its_schedules(tmp_path, monkeypatch):
    messages = []
    monkeypatch.setattr("sparring.runs.run.log.info", lambda words, *values: messages.append(words % values))
    ppo = SMALL["ppo"] | {"lr_schedule": "linear"}
    run_to_the_end(config_in(tmp_path, ppo=ppo, training={"iterations": 2}))
    run_to_the_end(config_in(tmp_path, ppo=ppo, training={"iterations": 4}))
    assert (
        "the limit is now 4 updates, it was 2 updates; schedules now run over 4 updates and continue from 50% "
        "(was 100%): ppo.lr_schedule"
    ) in messages
    last = json.loads((tmp_path / "episode_metrics.jsonl").read_text().splitlines()[-1])
    assert last["lr"] == pytest.approx(0.001 * 0.25)
    # a limit below the progress: nothing is trained, and the saved config stays
    messages.clear()
    run = Run(config_in(tmp_path, ppo=ppo, training={"iterations": 3}))
    run.announce()
    assert run.run() and run.phase.progress.updates == 4
    run.phase.env.close()
    nothing = "4 updates are done already, more than 3: nothing to train; set training.iterations to more than 4"
    assert nothing in messages and not any("the end" in line or "the limit is" in line for line in messages)
    assert saved_settings(tmp_path)["training.iterations"] == 4


def test_limit_that_is_already_passed_changes_nothing(tmp_path, capsys):
    words = ["train", "finetune", "env.name=gym:CartPole-v1", "policy.hidden=[8]", "--envs", "4", "rollout.steps=64"]
    words += ["device=cpu", "evaluation.episodes=2", "rollout.render_episodes=0", "--output", str(tmp_path)]
    assert main([*words, "--num_episodes", "1"]) == 0
    played = json.loads((tmp_path / "status.json").read_text())["progress"]["episodes"]
    assert played > 3
    kept, found = (tmp_path / "evaluation.json").stat().st_mtime_ns, (tmp_path / "evaluations.jsonl").read_text()
    capsys.readouterr()
    for limit, than in ((3, "more than 3"), (2, "more than 2"), (played, "which is the limit")):
        assert main([*words, "--num_episodes", str(limit)]) == 0
        out, err = capsys.readouterr()
        nothing = f"{played} episodes are done already, {than}: nothing to train; set training.num_episodes "
        assert nothing in err and "held-out" not in err and out == ""
        # the saved config stays
        assert saved_settings(tmp_path)["training.num_episodes"] == 1
    assert (tmp_path / "evaluation.json").stat().st_mtime_ns == kept
    assert (tmp_path / "evaluations.jsonl").read_text() == found
    # the command of a finished run evaluates it; so does another limit if there is no evaluation yet
    assert main([*words, "--num_episodes", "1"]) == 0 and "finetune is done" in capsys.readouterr().out
    (tmp_path / "evaluations.jsonl").unlink()
    assert main([*words, "--num_episodes", "2"]) == 0
    assert "finetune is done" in capsys.readouterr().out


def test_resume_with_other_workers_is_bit_identical(tmp_path):
    env = CASES["cartpole in workers"]["env"]
    straight = run_to_the_end(config_in(tmp_path / "straight", env=env))
    run_to_the_end(config_in(tmp_path / "run", env=env, training={"iterations": 2}))
    further = run_to_the_end(config_in(tmp_path / "run", env=env | {"workers": 3}))
    assert all(torch.equal(a, b) for a, b in zip(weights(straight).values(), weights(further).values(), strict=True))


def test_branch_from_a_last_checkpoint_keeps_its_update(tmp_path):
    run_to_the_end(config_in(tmp_path / "one"))
    last = checkpoints(tmp_path / "one")[-1]
    branch = run_to_the_end(config_in(tmp_path / "two", resume=str(last)))
    assert [path.name for path in checkpoints(tmp_path / "two")] == [last.name]
    assert branch.phase.progress.updates == int(last.name.rpartition("-")[2])


def test_pretrained_loads_weights_only(tmp_path):
    first = run_to_the_end(config_in(tmp_path / "first"))
    second = Run(config_in(tmp_path / "second", pretrained=str(tmp_path / "first" / "checkpoint-5")))
    assert second.phase.progress.updates == 0
    assert all(torch.equal(tensor, weights(second)[name]) for name, tensor in weights(first).items())


def test_old_checkpoints_are_removed_and_the_last_state_is_saved(tmp_path):
    training = SMALL["training"] | {"save_every": 2, "keep_checkpoints": 2}
    run_to_the_end(config_in(tmp_path, training=training))
    assert [c.name for c in checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-5"]


def test_limits_end_a_run(tmp_path):
    by_steps = SMALL["training"] | {"iterations": None, "total_timesteps": 100}
    assert run_to_the_end(config_in(tmp_path / "a", training=by_steps)).phase.progress.env_steps == 108
    by_episodes = SMALL["training"] | {"iterations": None, "num_episodes": 6}
    assert run_to_the_end(config_in(tmp_path / "b", training=by_episodes)).phase.progress.episodes == 6
