"""Student and adversarial in two processes: equal weights, separate episodes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import start
from test_adversarial import EXPLORER, SMALL, SPARRING, TEACHER, closed, config_of, trained

from sparring.data.episodes import EpisodeStore
from sparring.phases.build import open_episodes
from sparring.processes.distributed import Distributed
from sparring.rewards.terms import PASSES, _Regressor
from sparring.runs.checkpoint import checkpoint_folder, load_spec
from sparring.runs.folder import RunFolder
from sparring.runs.run import Run

# episodes of 7 decisions span rollouts of 4
LONGER = ["training.iterations=4", "training.log_every=1", "rollout.max_episode_steps=14", "threads=1"]
STUDENT = [*LONGER, *EXPLORER, *SMALL, "rewards.rnd=0.1"]
ADVERSARIAL = [*LONGER, *SMALL, *SPARRING, "rewards.learning_progress=1"]
PHASES = ("student", "adversarial")
# on a busy machine two processes start slowly
pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("forked")]


def phases_on_this_rank(folder):
    """Run by each of two processes."""
    torch.set_num_threads(1)
    teacher = trained(config_of("teacher", f"{folder}/teacher_rl", *TEACHER, "threads=1"))
    starts = {
        "student": [*STUDENT, f"student.teacher={folder}/teacher_rl"],
        "adversarial": [
            *ADVERSARIAL,
            f"adversarial.teacher={folder}/teacher_rl",
            f"adversarial.student={folder}/student_rl",
        ],
    }
    output = {phase: _straight_and_resumed(phase, folder, settings) for phase, settings in starts.items()}
    output["unlike"] = _with_episodes_on_one_rank(config_of("adversarial", f"{folder}/unlike", *starts["adversarial"]))
    _twice_in_the_same_folder(config_of("teacher", f"{folder}/again", *TEACHER, "threads=1", "resume=never"))
    torch.save(output, f"{folder}/rank{teacher.distributed.rank}.pt")


def _straight_and_resumed(phase: str, folder: str, settings: list[str]) -> dict:
    straight = trained(config_of(phase, f"{folder}/{phase}_rl", *settings))
    resumable = config_of(phase, f"{folder}/{phase}_halves", *settings)
    first = Run(resumable, quiet=True)
    for _ in range(2):
        first.phase.step(first.fraction)
    first.save()
    # updates after the last checkpoint are discarded
    first.phase.step(first.fraction)
    closed(first)
    explorer = straight.phase.explorer if phase == "adversarial" else straight.phase
    return {
        "weights": dict(straight.phase.model.state_dict()),
        "resumed": dict(trained(resumable).phase.model.state_dict()),
        "rewards": explorer.rewards.state_dict(),
        "progress": (straight.phase.progress.env_steps, straight.phase.progress.episodes),
        "acted": explorer.buffer.rollout()["action"].clone(),
        "evaluated": straight.evaluate() is not None,
    }


def _with_episodes_on_one_rank(config) -> dict:
    """An update in which episodes end on the first rank only, then one in which they end on both."""
    run = Run(config, quiet=True)
    phase, collector = run.phase, run.phase.explorer.collector
    phase.step(0.0)
    if not run.distributed.is_main:
        phase.replay.generations.append = lambda episode, **info: -1
        collector.drain_episodes = list
    one_sided = phase.step(0.0) | {"steps_made": phase.learner.gradient_steps}
    if not run.distributed.is_main:
        del phase.replay.generations.append, collector.drain_episodes
    phase.step(0.0)
    both = phase.step(0.0) | {"steps_made": phase.learner.gradient_steps}
    closed(run)
    return {"one_sided": one_sided, "both": both, "weights": dict(phase.model.state_dict())}


def _twice_in_the_same_folder(config) -> None:
    """Train twice in one folder; the main process moves the first run aside slowly."""
    trained(config)
    make_room = RunFolder.make_room
    RunFolder.make_room = lambda folder: (time.sleep(1.0), make_room(folder))
    trained(config)
    RunFolder.make_room = make_room


@pytest.fixture(scope="module")
def ranks(forked, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    code = (
        "import sys; from accelerate import debug_launcher; from test_phases_distributed import phases_on_this_rank;"
        "debug_launcher(phases_on_this_rank, (sys.argv[1],), num_processes=2)"
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1] / "doubles"), *sys.path])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code, str(folder)], env=environment, check=True, timeout=800)
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


def assert_equal(first, second, where=""):
    if isinstance(first, dict):
        assert first.keys() == second.keys(), where
        for name in first:
            assert_equal(first[name], second[name], f"{where}/{name}")
    elif isinstance(first, torch.Tensor):
        assert torch.equal(first, second) and bool(first.isfinite().all()), where
    else:
        assert first == second, where


@pytest.mark.parametrize("phase", PHASES)
def test_ranks_have_equal_weights_and_reward_states(ranks, phase):
    first, second = (rank[phase] for rank in ranks[1])
    assert_equal(first["weights"], second["weights"])
    # normalisers and the networks of RND and learning progress
    assert_equal(first["rewards"], second["rewards"])
    # (4 updates, and the student's rollout that fits normalisers) x 2 ranks x 2 robots x 4 decisions
    rollouts = 5 if phase == "student" else 4
    assert first["rewards"]["normalizer"]["count"] == 16 * rollouts
    name, fits = ("rnd", rollouts) if phase == "student" else ("learning_progress", rollouts * PASSES)
    learned = first["rewards"]["terms"][name]
    assert learned["fits"] == fits and learned["module"]["normalizer.count"] == 16 * rollouts


@pytest.mark.parametrize("phase", PHASES)
def test_resumed_run_is_bit_identical(ranks, phase):
    for rank in ranks[1]:
        assert_equal(rank[phase]["weights"], rank[phase]["resumed"])


@pytest.mark.parametrize("phase", PHASES)
def test_progress_counts_all_robots_and_ranks_act_differently(ranks, phase):
    first, second = (rank[phase] for rank in ranks[1])
    # 16 decisions of 2 steps, of 4 robots: 2 complete episodes each; the student's first rollout has 4 more decisions
    rollouts = {"student": 1 + 4, "adversarial": 4}[phase]
    assert first["progress"] == second["progress"] == (rollouts * 16 * 2, 4 * 2)
    assert not torch.equal(first["acted"], second["acted"])
    assert (first["evaluated"], second["evaluated"]) == (True, False)


def test_each_rank_stores_its_own_episodes_and_generations(ranks):
    stores = [
        [EpisodeStore(ranks[0] / "adversarial_rl" / f"{what}{rank}{number}", read_only=True) for rank in ("", "-1")]
        for what, number in (("episodes", ""), ("generations", "/0"), ("generations", "/1"))
    ]
    # of 4 episodes per process, every second is held out: one in each generation
    assert [[len(store) for store in pair] for pair in stores] == [[2, 2], [1, 1], [1, 1]]
    for first, second in stores:
        assert not torch.equal(first.episode(0)["action"], second.episode(0)["action"])


def test_each_rank_replays_the_teachers_episodes_of_its_rank(ranks):
    folder = str(ranks[0] / "teacher_rl")
    env = SimpleNamespace(spec=load_spec(checkpoint_folder(folder)))
    names = [open_episodes(folder, "teacher", env, rank).folder.name for rank in (0, 1, 2)]
    assert names == ["episodes", "episodes-1", "episodes"]


def untimed(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if not name.endswith("_seconds")}


def test_ranks_stay_equal_if_episodes_end_on_one_rank_only(ranks):
    first, second = (rank["unlike"] for rank in ranks[1])
    for update in ("one_sided", "both"):
        ours, theirs = (untimed(rank[update]) for rank in (first, second))
        assert_equal(ours, theirs)
    # one rank had no data, so no rank made a gradient step; both report the held-out episodes of the other
    assert first["one_sided"]["steps_made"] == 0 and first["both"]["steps_made"] == 3
    assert {"contact_share", "generations_error_now"} <= first["one_sided"].keys() and "wm_loss" in first["both"]
    assert_equal(first["weights"], second["weights"])


def test_no_rank_writes_to_a_run_that_is_moved_aside(ranks):
    for run in ("again", "again-old-1"):
        kept = [len(EpisodeStore(ranks[0] / run / name, read_only=True)) for name in ("episodes", "episodes-1")]
        assert kept == [4, 4]


def test_rank_with_few_rows_makes_as_many_fits_as_the_others():
    distributed = Distributed("cpu")
    distributed.max = lambda value: 3.0  # minibatches of the other rank
    learner = _Regressor(2, 1, torch.device("cpu"))
    learner.fit(torch.ones(2, 2), torch.ones(2, 1), distributed)
    assert learner.optimizer.state_dict()["state"][0]["step"] == 3
    assert all(bool(weight.isfinite().all()) for weight in learner.parameters())


def test_complete_chain_in_two_processes(tmp_path):
    process = start(tmp_path, "--gpus", "2")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    assert json.loads((tmp_path / "all.json").read_text()).keys() == {"teacher", *PHASES, "crc"}
    for phase in ("teacher", *PHASES):
        folder = tmp_path / f"{phase}_rl"
        state = torch.load(folder / "checkpoint-1/training_state.pt", weights_only=True)
        assert len(state["processes"]) == 2 and (folder / "evaluation.json").is_file()
        # both processes: 4 robots, one episode of 8 steps each; the student's first ones fit normalisers
        line = json.loads((folder / "episode_metrics.jsonl").read_text().splitlines()[-1])
        rollouts = 2 if phase == "student" else 1
        assert (line["total_steps"], line["episode"]) == (32 * rollouts, 4 * rollouts)
    assert (tmp_path / "adversarial_rl/episodes-1").is_dir() and "adversarial" in output
