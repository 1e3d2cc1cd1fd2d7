"""Two gloo ranks on the CPU train one policy."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparring.errors import PeerGone, UserError
from sparring.processes.distributed import Distributed, pick_device
from sparring.runs.checkpoint import find_checkpoint

pytestmark = pytest.mark.usefixtures("forked")


def one_update_on_this_rank(folder):
    """Run by each of two processes."""
    torch.set_num_threads(1)
    from sparring.config.schema import load_config
    from sparring.runs.run import Run

    settings = {
        "device": "cpu",
        "output": folder,
        "rollout": {"n_envs": 2, "steps": 16, "max_episode_steps": 10},
        "ppo": {"mini_batch_size": 8, "ppo_epochs": 2, "target_kl": 0.01},
        "training": {"iterations": 3},
        "logging": {"console_level": "ERROR"},
    }
    run = Run(load_config(settings))
    states = run.phase.collector
    run.run()
    rank = run.distributed.rank
    stopped = Run(load_config(settings | {"output": f"{folder}/stopped"}))
    for _ in range(2):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    resumed = Run(load_config(settings | {"output": f"{folder}/stopped"}))
    resumed.run()
    torch.save(
        {
            "weights": run.phase.model.state_dict(),
            "resumed": resumed.phase.model.state_dict(),
            "first_action": states.root["observation", "state"],
            "progress": (run.phase.progress.updates, run.phase.progress.env_steps),
        },
        f"{folder}/rank{rank}.pt",
    )


def updates_by_episodes_on_this_rank(folder):
    """Episodes of CartPole differ in length, so the ranks have different numbers of decisions."""
    torch.set_num_threads(1)
    from sparring.config.schema import load_config
    from sparring.runs.run import Run

    results = {}
    for algorithm in ("ppo", "grpo"):
        settings = {
            "device": "cpu",
            "algorithm": algorithm,
            "env": {"name": "gym:CartPole-v1"},
            "rollout": {"n_envs": 2, "n_episodes_per_batch": 4, "group_size": 2},
            algorithm: {"mini_batch_size": 16, "micro_batch_size": 5},
            "training": {"iterations": 3},
            "logging": {"console_level": "ERROR"},
        }
        run = Run(load_config(settings), folder=False, quiet=True)
        run.run()
        results[algorithm] = {
            "weights": run.phase.model.state_dict(),
            "decisions": int(run.phase.buffer.rollout()["valid"].sum()),
            "progress": (run.phase.progress.episodes, run.phase.progress.env_steps),
        }
    settings = {
        "device": "cpu",
        "env": {"name": "gym:Pendulum-v1"},
        "policy": {"name": "flow", "method": "flow_sde_one_step", "width": 16, "heads": 2, "layers": 1},
        "rollout": {"n_envs": 2, "steps": 8, "action_steps": 2},
        "ppo": {"mini_batch_size": 8, "ppo_epochs": 2},
        "training": {"iterations": 2},
        "logging": {"console_level": "ERROR"},
    }
    run = Run(load_config(settings), folder=False, quiet=True)
    run.run()
    results["flow"] = {
        "weights": run.phase.model.state_dict(),
        "noise": run.phase.buffer.rollout()["trace", "first"],
        "progress": (run.phase.progress.updates, run.phase.progress.env_steps),
    }
    torch.save(results, f"{folder}/rank{run.distributed.rank}.pt")


def waits_on_this_rank(folder):
    """Seconds that the main process waits in a collective and in a barrier for a rank that is five seconds late."""
    here = Path(folder) / f"here-{os.environ['RANK']}"
    here.touch()
    # start together: on a busy machine the ranks start at different times, with the same limit
    while len(list(here.parent.glob("here-*"))) < 2:
        time.sleep(0.01)
    distributed, waited = Distributed("cpu", watchdog_s=0.3), {}
    for name, wait in (("barrier", distributed.barrier), ("collective", lambda: distributed.max(1.0))):
        distributed.barrier()
        if distributed.rank == 1:
            time.sleep(5)
        began, why = time.monotonic(), ""
        try:
            wait()
        except PeerGone as error:
            why = str(error)
        waited[name] = (time.monotonic() - began, why)
    torch.save(waited, f"{folder}/rank{distributed.rank}.pt")


def on_two_ranks(function, folder) -> list:
    code = (
        "import sys; from accelerate import debug_launcher; "
        f"from {function.__module__} import {function.__name__} as work; "
        "debug_launcher(work, (sys.argv[1],), num_processes=2)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "doubles"), *sys.path])}
    subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, check=True, timeout=300)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture(scope="module")
def two_ranks(forked, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return folder, on_two_ranks(one_update_on_this_rank, folder)


def test_collective_without_launcher_waits_for_ten_times_the_watchdog_limit(tmp_path):
    """A barrier waits longer, because the main process evaluates and saves."""
    script = tmp_path / "ranks.py"
    # gloo's threads may still wait for the other rank; then a normal exit sometimes aborts
    lines = (
        "import os",
        "from test_distributed import waits_on_this_rank as wait",
        f"wait({str(tmp_path)!r})",
        "os._exit(0)",
    )
    script.write_text("\n".join(lines))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    subprocess.run(command, env=environment, check=True, timeout=120)
    main = torch.load(tmp_path / "rank0.pt")
    (long, fine), (short, why) = main["barrier"], main["collective"]
    assert long > 4 and not fine
    assert 2.5 < short < 4.9 and "did not reach this collective; if it was only slow, raise" in why


def test_ranks_with_different_numbers_of_decisions_have_equal_weights(tmp_path):
    first, second = on_two_ranks(updates_by_episodes_on_this_rank, tmp_path)
    for algorithm in ("ppo", "grpo"):
        one, other = first[algorithm], second[algorithm]
        assert one["decisions"] != other["decisions"]
        assert one["progress"] == other["progress"] and one["progress"][0] == (1 + 3) * 2 * 4
        for name, tensor in one["weights"].items():
            assert torch.equal(tensor, other["weights"][name]) and tensor.isfinite().all(), name
    # also with a flow policy, with separate noise per rank
    one, other = first["flow"], second["flow"]
    assert not torch.equal(one["noise"], other["noise"])
    assert one["progress"] == other["progress"] == (2, (1 + 2) * 2 * 2 * 8 * 2)
    assert all(torch.equal(tensor, other["weights"][name]) for name, tensor in one["weights"].items())


def test_weights_and_statistics_are_bit_identical(two_ranks):
    _, (first, second) = two_ranks
    assert first["weights"].keys() == second["weights"].keys()
    for name in first["weights"]:
        assert torch.equal(first["weights"][name], second["weights"][name]), name
    # statistics of both ranks' robots: 4 rollouts (one before the first update) x 2 ranks x 2 robots x 16 decisions
    assert first["weights"]["encoder.normalizer.count"] == 256


def test_resumed_ranks_are_bit_identical(two_ranks):
    _, ranks = two_ranks
    for rank in ranks:
        for name, tensor in rank["weights"].items():
            assert torch.equal(tensor, rank["resumed"][name]), name


def test_ranks_have_different_robots_and_common_counts(two_ranks):
    _, (first, second) = two_ranks
    assert not torch.equal(first["first_action"], second["first_action"])
    assert first["progress"] == second["progress"] == (3, 256)


def test_only_the_main_rank_logs_and_saves(two_ranks):
    folder, _ = two_ranks
    lines = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3]
    (log,) = folder.glob("logs/rl_training_*.log")
    assert json.loads((folder / "status.json").read_text())["state"] == "finished" and log.is_file()
    state = torch.load(folder / "checkpoint-3" / "training_state.pt", weights_only=True)
    assert len(state["processes"]) == 2


@pytest.mark.usefixtures("not_forked")
def test_gpus_launches_processes_and_resumes_with_equal_number_only(tmp_path):
    command = [sys.executable, "-m", "sparring", "train", "finetune", "--output", str(tmp_path / "run"), "device=cpu"]
    command += ["--envs", "2", "rollout.steps=8", "training.iterations=1", "evaluation.episodes=2", "env.threads=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--gpus", "2"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("run folder:") == 1
    assert (tmp_path / "run" / "evaluation.json").exists()
    alone = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert alone.returncode == 2 and "use --gpus 2" in alone.stderr and "Traceback" not in alone.stderr


@pytest.mark.usefixtures("not_forked")
def test_dry_run_of_several_processes_prints_once_and_warns():
    command = [sys.executable, "-m", "sparring", "train", "finetune", "--dry-run", "rollout", "--gpus", "2"]
    command += ["--envs", "2", "rollout.steps=4", "env.threads=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("dry run of 'finetune'") == 1 and done.stderr.count("nothing is written") == 1
    assert done.stdout.startswith("--gpus 2, but no GPU is visible: 2 processes share the CPU")


def test_stopped_processes_save_and_exit_together(tmp_path):
    """SIGINT to all processes, as in a terminal; then SIGTERM to the launcher only."""
    command = [sys.executable, "-m", "sparring", "train", "finetune", "--output", str(tmp_path / "run"), "device=cpu"]
    command += ["--envs", "2", "rollout.steps=8", "env.threads=1", "--gpus", "2", "total_timesteps=10000000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def start():
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True)
        for line in process.stderr:
            if "steps" in line and "%" in line:
                return process
        raise AssertionError("it ended before it made progress")

    first = start()
    os.killpg(first.pid, signal.SIGINT)
    err = first.communicate(timeout=60)[1]
    assert first.returncode == 130 and "The same command resumes it" in err and "Traceback" not in err
    saved = find_checkpoint(tmp_path / "run")
    second = start()
    second.terminate()
    err = second.communicate(timeout=60)[1]
    assert second.returncode == 130 and "Traceback" not in err
    assert int(find_checkpoint(tmp_path / "run").name.rpartition("-")[2]) > int(saved.name.rpartition("-")[2])


def test_devices_and_processes_must_agree(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match="device=cuda: this process sees 0 CUDA devices"):
        Distributed("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="--gpus 2: only 1 GPUs are visible"):
        Distributed("cuda")
    with pytest.raises(UserError, match="names one GPU for 2 processes"):
        Distributed("cuda:0")


def test_operations_of_a_single_process_change_nothing():
    alone = Distributed("cpu")
    gradient = torch.ones(3)
    alone.average_(gradient), alone.broadcast_weights(torch.nn.Linear(1, 1))
    assert gradient.tolist() == [1, 1, 1] and alone.is_main
    assert alone.mean({"a": 2.0}) == {"a": 2.0} and alone.max(3.0) == 3.0 and alone.gather_objects([1]) == [1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_missing_device_is_refused():
    assert pick_device("auto") == "cpu"
    with pytest.raises(UserError, match="device=cuda:1: this process sees 0 CUDA devices.*set device=cpu"):
        pick_device("cuda:1")
