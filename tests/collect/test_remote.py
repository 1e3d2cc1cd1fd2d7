"""rollout.mode=async: bit-identical to sync with staleness 0; staleness limits, pacing, resume, timeline."""

import json
import time
from functools import partial
from math import isfinite
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from metric_names import unexplained

from sparring.algorithms.gradient_step import GradientStep
from sparring.algorithms.scoring import ParityError
from sparring.collect.collector import Span
from sparring.collect.groups import GroupedEnv
from sparring.collect.remote.learner import RemoteCollector
from sparring.collect.remote.protocol import WeightsReader, WeightsWriter
from sparring.config.schema import load_config
from sparring.config.section import ConfigError
from sparring.envs.env import make_training_env
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.processes.child import usable_cores
from sparring.processes.distributed import Distributed
from sparring.processes.memory import Column, SharedMemory, _memory_folder
from sparring.processes.rows import RowFile
from sparring.runs.run import Run

pytestmark = pytest.mark.usefixtures("forked")
ROLLOUT = {"n_envs": 4, "steps": 9, "render_episodes": 0}
SMALL = {
    "env": {"name": "doubles_failing:Failing"},
    "policy": {"hidden": [16]},
    "ppo": {"mini_batch_size": 16, "ppo_epochs": 2},
    "training": {"save_every": 2, "keep_checkpoints": 10, "iterations": 5},
    "logging": {"console_level": "ERROR"},
}
ASYNC = {"mode": "async", "staleness": 0}


def config_in(folder, more=None, **rollout):
    return load_config(SMALL | {"output": str(folder), "rollout": ROLLOUT | rollout} | (more or {}))


def trained(config) -> Run:
    run = Run(config)
    try:
        assert run.run()
    finally:
        run.phase.env.close()
    return run


def weights(run) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in run.phase.model.state_dict().items()}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def all_lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]


def lines(folder) -> list[dict]:
    """Without times, the metrics of async only, and the parity, which each process measures."""
    other = ("timestamp", "row", "crc", "train/parity", "train/parity_ratio")
    return [{k: v for k, v in row.items() if k not in other and not k.startswith("perf/")} for row in all_lines(folder)]


CASES = {
    "small": {},
    "chunks": {"rollout": ROLLOUT | {"action_steps": 3}},
    "by episodes": {"rollout": ROLLOUT | {"n_episodes_per_batch": 8}},
    "grpo": {
        "algorithm": "grpo",
        "ppo": {},
        "grpo": {"mini_batch_size": 16, "epochs": 2, "kl_coef": 0.1},
        "rollout": ROLLOUT | {"n_episodes_per_batch": 8, "group_size": 2},
    },
    "ring": {"buffer": {"type": "vla", "size": 100}},
    "level": {"ppo": SMALL["ppo"] | {"normalize_value": True}},
    "tabletop": {"env": {"name": "tabletop"}, "rollout": ROLLOUT | {"max_episode_steps": 6}},
    "camera": {
        "env": {"name": "tabletop", "cameras": ["head"], "image_size": 40},
        "policy": {"channels": [4, 4], "image_features": 8},
        "rollout": ROLLOUT | {"max_episode_steps": 6},
        "threads": 1,
    },
    "flow": {
        "policy": {"name": "flow", "method": "flow_noise", "width": 16, "heads": 2, "layers": 1, "sampling_steps": 2},
        "rollout": ROLLOUT | {"action_steps": 3},
    },
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_async_with_staleness_0_is_bit_identical_to_sync(tmp_path, case):
    rollout = case.get("rollout", ROLLOUT)
    sync = trained(config_in(tmp_path / "sync", case))
    remote = trained(config_in(tmp_path / "async", case | {"rollout": rollout | ASYNC}))
    assert_equal(weights(sync), weights(remote))
    assert sync.phase.progress == remote.phase.progress
    assert lines(tmp_path / "sync") == lines(tmp_path / "async")
    assert len(lines(tmp_path / "sync")) == 5


@pytest.mark.usefixtures("not_forked")
def test_async_groups_with_staleness_0_are_bit_identical_to_sync(tmp_path):
    sync = trained(config_in(tmp_path / "sync", groups=2))
    remote = trained(config_in(tmp_path / "async", groups=2, **ASYNC))
    assert_equal(weights(sync), weights(remote))
    assert lines(tmp_path / "sync") == lines(tmp_path / "async")


def test_groups_change_neither_seeds_nor_noise(tmp_path):
    whole, grouped = (Run(config_in(tmp_path / str(groups), groups=groups)) for groups in (1, 2))
    for run in (whole, grouped):
        run.phase.collect_and_learn(0.0, learns=False)
    one, other = (run.phase.buffer.rollout() for run in (whole, grouped))
    assert torch.equal(one["observation", "state"][0], other["observation", "state"][0])
    # other batch sizes may round differently
    for key in one.keys(True, True):
        assert torch.allclose(one[key].double(), other[key].double(), atol=1e-5), key
    assert whole.phase.progress.env_steps == grouped.phase.progress.env_steps == 36
    # each of the four robots has ended one episode
    assert whole.phase.progress.episodes == grouped.phase.progress.episodes == 4
    for run in (whole, grouped):
        run.phase.env.close()


def test_groups_share_the_cores_by_default(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda who: range(8))
    for given, threads in ((0, 4), (3, 3)):
        env = {"env": {"name": "tabletop", "threads": given}}
        run = Run(config_in(tmp_path / str(given), env, groups=2))
        assert [group.config.threads for group in run.phase.env.envs] == [threads, threads]
        run.phase.env.close()


def test_groups_share_the_cores_in_worker_processes(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "doubles")
    monkeypatch.setattr("os.sched_getaffinity", lambda who: range(6))
    monkeypatch.setattr("sparring.envs.env.make_env", lambda env, *args, **where: SimpleNamespace(workers=env.workers))
    seat = SimpleNamespace(device="cpu", rank=0, world_size=1)
    env = {"name": "gym_doubles:Breaks", "vectorize": "process"}
    for given, workers in ((0, 2), (5, 5)):
        config = load_config({"env": env | {"workers": given}, "rollout": ROLLOUT | {"groups": 3, "n_envs": 6}})
        assert make_training_env(config, seat).workers == workers


def test_usable_cores_are_those_of_the_cpu_affinity(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda who: {1, 5, 6})
    assert [usable_cores(parts) for parts in (1, 2, 5)] == [3, 1, 1]


def test_episodes_of_groups_have_global_robot_numbers(tmp_path):
    run = Run(config_in(tmp_path, groups=2))
    run.phase.collector.collect(run.phase.buffer)
    assert [episode.env for episode in run.phase.collector.drain_episodes()] == [0, 1, 2, 3]
    run.phase.env.close()


def test_all_groups_are_closed_if_one_fails():
    closed = []

    def close(group):
        closed.append(group)
        if group == 1:
            raise OSError("the arm is stuck")

    envs = [SimpleNamespace(close=partial(close, g), num_envs=1, device=None, config=None) for g in range(3)]
    with pytest.raises(OSError, match="stuck"):
        GroupedEnv(envs).close()
    assert closed == [0, 1, 2]


def case_with_images(size: int) -> dict:
    case = CASES["camera"]
    return {key: case[key] for key in ("policy", "threads")} | {"env": case["env"] | {"image_size": size}}


@pytest.mark.parametrize(
    "groups, more", [(1, {}), (2, {}), (2, case_with_images(112))], ids=["one", "two", "large pictures"]
)
def test_resumed_async_run_is_bit_identical(tmp_path, groups, more):
    rollout = ASYNC | {"groups": groups}
    straight = trained(config_in(tmp_path / "straight", more, **rollout))
    stopped = Run(config_in(tmp_path / "stopped", more, **rollout))
    for _ in range(3):
        stopped.phase.step(stopped.fraction)
    # 2 robots x 3 x 112 x 112 bytes are large enough to go through shared memory
    states = stopped.phase.collector._states
    assert {key[:3] for key in states.tensors} == {("groups", g, "root") for g in "01"} if more else states is None
    stopped.save()
    stopped.phase.env.close()
    resumed = trained(config_in(tmp_path / "stopped", more, **rollout))
    assert_equal(weights(straight), weights(resumed))
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")[3:]


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_stays_within_its_limit(tmp_path, staleness):
    more = {"training": SMALL["training"] | {"iterations": 12}}
    run = Run(config_in(tmp_path, more, mode="async", staleness=staleness))
    update, behind = run.phase.algorithm.update, []

    def record_and_update(rollout, fraction):
        version = rollout["version"].unique()
        assert len(version) == 1
        behind.append(run.phase.algorithm.version - int(version))
        return update(rollout, fraction)

    run.phase.algorithm.update = record_and_update
    assert run.run()
    run.phase.env.close()
    assert max(behind) <= staleness and min(behind) >= 0
    # staleness would be 0 only if the actor process waited for each update
    assert max(behind) >= 1
    written = all_lines(tmp_path)
    assert not unexplained(written[-1])
    # the log of the actor process is kept, including lines from before the folder existed
    log = next(tmp_path.glob("logs/env/env_*.log")).read_text()
    assert "actor process: DEBUG made robots 0 to 3 of 4: doubles_failing:Failing" in log
    assert [row["perf/staleness"] for row in written] == behind
    assert all(row[f"perf/behind_{versions}"] == 1.0 for row, versions in zip(written, behind, strict=True))
    names = ("queue_depth", "actor_idle", "actor_wait_seconds", "simulate_seconds", "infer_seconds")
    assert {f"perf/{name}" for name in names} <= written[-1].keys()
    assert 0 <= written[-1]["perf/learner_idle"] <= 1


def test_stale_rollouts_pass_the_parity_gate_of_the_actor_process(tmp_path):
    run = Run(config_in(tmp_path, mode="async", staleness=2, least_ess=0.0))
    rows = [run.phase.step(0.0) for _ in range(4)]
    run.phase.env.close()
    assert rows[-1]["staleness"] >= 1 and rows[-1]["parity_skipped"] == 0 and rows[-1]["parity"] < 1e-4


@pytest.mark.parametrize("case", ["by episodes", "grpo", "ring", "flow"])
def test_stale_rollouts_pass_the_parity_gate_with_every_algorithm(tmp_path, case):
    rollout = CASES[case].get("rollout", ROLLOUT) | {"mode": "async", "staleness": 2}
    run = Run(config_in(tmp_path, CASES[case] | {"rollout": rollout}))
    rows = [run.phase.step(0.0) for _ in range(4)]
    run.phase.env.close()
    assert max(row["staleness"] for row in rows) >= 1
    assert all(row["parity_skipped"] == 0 and row["parity"] < 1e-4 and isfinite(row["loss"]) for row in rows), rows


def test_inconsistent_scores_fail_the_parity_gate(tmp_path):
    more = {"policy": {"name": "doubles_failing:InconsistentScores"}}
    run = Run(config_in(tmp_path, more, mode="async", staleness=2))
    # the learner's gate sees on-policy decisions only
    run.phase.algorithm.policy.evaluate = lambda td: ActorCritic.evaluate(run.phase.policy, td)
    before = weights(run)
    with pytest.raises(ParityError, match="drift"):
        run.phase.step(0.0)
    run.phase.env.close()
    # no gradient step was made; only the normalisers were fitted before
    parameters = dict(run.phase.model.named_parameters())
    assert_equal({name: before[name] for name in parameters}, {name: weights(run)[name] for name in parameters})


def test_low_ess_lowers_the_allowed_staleness(tmp_path):
    more = {"ppo": SMALL["ppo"] | {"policy_lr": 3e-2}, "training": SMALL["training"] | {"iterations": 12}}
    trained(config_in(tmp_path, more, mode="async", staleness=2, least_ess=0.99))
    written = all_lines(tmp_path)
    assert {row["perf/staleness_allowed"] for row in written} >= {0.0, 2.0}
    # the rollout in progress was kept; the next one waited
    paced = [i for i, row in enumerate(written) if row["perf/staleness_allowed"] == 0]
    assert any(row["perf/staleness"] == 0 for row in written[paced[0] :])
    # every line has staleness and ESS, stale or not
    rows = [[row[name] for name in ("perf/staleness_mean", "perf/staleness_max", "train/ess")] for row in written]
    on_policy = [row["perf/staleness"] == 0 for row in written]
    assert [row == [0, 0, 1] for row in rows] == on_policy and True in on_policy and False in on_policy


@pytest.mark.parametrize(
    "ess_values, allowed",
    [
        ([0.49], 1),
        ([0.5], 2),
        ([0.4, 0.4, 0.4], 0),
        # after one decrease two good updates in a row are needed, after two decreases four
        ([0.1, 0.76], 1),
        ([0.1, 0.76, 0.76], 2),
        ([0.1, 0.76, 0.74, 0.76], 1),
        ([0.1, 0.1, 1.0, 1.0, 1.0], 0),
        ([0.1, 0.1, 1.0, 1.0, 1.0, 1.0], 1),
    ],
)
def test_pacing_follows_the_ess(ess_values, allowed):
    collector = RemoteCollector(SimpleNamespace(actor=None), None, staleness=2, least_ess=0.5)
    for ess in ess_values:
        collector.version = collector._rollout_version = collector.version + 1
        collector.pace(ess)
    assert collector.allowed == allowed


def test_rollouts_begun_before_a_change_do_not_lower_staleness_again():
    collector = RemoteCollector(SimpleNamespace(actor=None), None, staleness=4, least_ess=0.5)
    # (version, version of the rollout) of updates: a rollout that began before the change does not count
    allowed = []
    for collector.version, collector._rollout_version in ((4, 0), (5, 1), (6, 4), (7, 5), (8, 5)):
        collector.pace(0.1)
        allowed.append(collector.allowed)
    assert allowed == [3, 3, 3, 2, 2]


def test_update_without_ess_does_not_change_pacing(tmp_path):
    run = Run(config_in(tmp_path, mode="async", staleness=2))
    collector = run.phase.collector
    collector.allowed = 0
    # like GRPO if all groups have equal rewards
    run.phase.algorithm.update = lambda rollout, fraction: {}
    for _ in range(3):
        run.phase.step(0.0)
    run.phase.env.close()
    assert collector.allowed == 0


def test_resumed_run_keeps_its_pacing(tmp_path):
    config = config_in(tmp_path, mode="async", staleness=3, least_ess=0.1)
    stopped = Run(config)
    stopped.phase.step(0.0)
    collector = stopped.phase.collector
    collector.allowed, collector._good, collector._good_needed = 0, 2, 32
    stopped.save()
    stopped.phase.env.close()
    resumed = Run(config)
    rows = [resumed.phase.step(0.0) for _ in range(5)]
    resumed.phase.env.close()
    assert [row["staleness"] for row in rows] == [row["staleness_allowed"] for row in rows] == [0] * 5
    collector = resumed.phase.collector
    assert (collector._good, collector._good_needed) == (7, 32)


def test_collector_state_is_that_of_the_last_learned_rollout(tmp_path):
    run = Run(config_in(tmp_path, **ASYNC))
    run.phase.step(0.0)
    before = run.phase.collector.state_dict()
    # like a run in which another process fails now
    run.phase.collect()
    assert run.phase.collector.state_dict()["env_steps"] == before["env_steps"] == 72
    run.phase.learn(0.0)
    run.phase.collector.weights_changed()
    assert run.phase.collector.state_dict()["env_steps"] == 108
    run.phase.env.close()


def test_stale_run_resumes_and_counts_steps_once(tmp_path):
    config = config_in(tmp_path, mode="async", staleness=2)
    stopped = Run(config)
    for _ in range(3):
        stopped.phase.step(stopped.fraction)
    stopped.save()
    steps = stopped.phase.progress.env_steps
    stopped.phase.env.close()
    resumed = trained(config)
    # rollouts that no update used are collected again and counted once; one rollout fitted normalisers
    assert steps == 4 * 36 and resumed.phase.progress.env_steps == 6 * 36


def test_timeline_shows_simulation_during_learning(tmp_path):
    env = {"env": SMALL["env"] | {"slow": 0.01}}
    more = env | {"training": SMALL["training"] | {"iterations": 8}, "ppo": SMALL["ppo"] | {"ppo_epochs": 20}}
    trained(config_in(tmp_path, more, mode="async"))
    spans = [Span(**row) for row in RowFile(tmp_path / "timeline.jsonl").read()]
    collector = {"wait", "load", "collect", "reset", "infer", "simulate", "complete", "gate", "share", "report"}
    learner = {"wait", "take", "learn", "publish"}
    assert {span.stage for span in spans if span.who == "collector"} == collector
    assert {span.stage for span in spans if span.who == "learner"} == learner
    # versions of the weights before each update; version 1 has the normalisers of the first rollout
    assert [span.version for span in spans if span.stage == "learn"] == list(range(1, 9))
    assert sum(span.stage == "simulate" for span in spans) >= 8 * 9
    assert overlap(spans, ("learner", "learn"), ("collector", "simulate")) > 0.05


def test_inference_of_one_group_overlaps_simulation_of_another(tmp_path):
    run = Run(config_in(tmp_path, {"env": SMALL["env"] | {"slow": 0.02}}, groups=2))
    act = run.phase.policy.act

    def act_slowly(td):
        time.sleep(0.02)
        return act(td)

    run.phase.policy.act = act_slowly
    metrics = run.phase.collect()
    run.phase.env.close()
    # 9 decisions of 2 groups: 0.36 s of inference, 0.18 s of simulation per group
    assert metrics["infer_seconds"] > 0.36 and metrics["simulate_seconds"] > 0.18
    spans = run.phase.drain_spans()
    assert overlap(spans, ("collector 0", "simulate"), ("collector 1", "infer")) > 0.1
    assert overlap(spans, ("collector 1", "simulate"), ("collector 0", "infer")) > 0.1


def overlap(spans, one, other) -> float:
    """Seconds in which both stages ran."""
    ours, actor_memory = ([s for s in spans if (s.who, s.stage) == kind] for kind in (one, other))
    return sum(max(0.0, min(a.end, b.end) - max(a.begin, b.begin)) for a in ours for b in actor_memory)


@pytest.mark.usefixtures("not_forked")
def test_videos_are_recorded_in_async_mode(tmp_path):
    more = {"env": {"name": "tabletop", "threads": 1}}
    run = Run(config_in(tmp_path, more, max_episode_steps=6, mode="async", staleness=0))
    run.phase.record_video(1)
    for _ in range(2):
        run.phase.step(0.0)
    (video,) = run.phase.drain_videos()
    run.phase.env.close()
    # the first episode: a frame before it and one per step
    assert video.episode.env == 0 and video.episode.steps == 6 and len(video.frames) == 7
    assert video.frames[0].shape[-1] == 3 and (video.frames[0] != video.frames[-1]).any()


def test_incompatible_settings_are_refused(tmp_path):
    wrong = {
        "async is for finetune": ("teacher", {"mode": "async"}),
        "is for rollout.mode=async": ("finetune", {"staleness": 2}),
        "4 robots cannot be divided into 3 groups; expected one of 1, 2, 4, or rollout.n_envs=3 or 6": (
            "finetune",
            {"groups": 3},
        ),
        "cannot be combined with rollout.n_episodes_per_batch": ("finetune", {"groups": 2, "n_episodes_per_batch": 4}),
    }
    for rows, (phase, rollout) in wrong.items():
        with pytest.raises(ConfigError, match=rows):
            load_config({"rollout": ROLLOUT | rollout}, phase=phase)


def test_least_ess_without_correction_is_refused():
    with pytest.raises(ConfigError, match=r"^rollout.least_ess = 0.7 .*: ppo.correction=none "):
        load_config({"rollout": ROLLOUT | {"mode": "async", "least_ess": 0.7}, "ppo": {"correction": "none"}})
    # without pacing the setting is allowed
    config = load_config({"rollout": ROLLOUT | {"mode": "async", "least_ess": 0}, "ppo": {"correction": "none"}})
    assert config.rollout.least_ess == 0


def test_only_changed_weights_are_sent_again():
    learner, actor = (torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    learner[0].weight.requires_grad_(False)
    with torch.no_grad():
        for tensor in learner.state_dict().values():
            tensor.fill_(3)
    writer = WeightsWriter(learner, version=4)
    reader = WeightsReader(writer.handle(), actor)
    assert_equal(dict(learner.state_dict()), dict(actor.state_dict()))
    assert writer.names == [name for name in learner.state_dict() if name != "0.weight"]
    with torch.no_grad():
        for tensor in learner.state_dict().values():
            tensor += 1
    assert reader.load() == 4 and torch.equal(actor[0].bias, learner[0].bias - 1)
    writer.write(5)
    assert reader.load() == 5
    assert torch.equal(actor[0].bias, learner[0].bias)
    assert torch.equal(actor[1].running_mean, learner[1].running_mean)
    # a frozen tensor is sent once
    assert torch.equal(actor[0].weight, learner[0].weight - 1)


def test_version_overwritten_during_reading_is_read_again(monkeypatch):
    learner, actor = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    writer = WeightsWriter(learner, version=0)
    reader = WeightsReader(writer.handle(), actor)
    reader.load()
    names = reader.names

    class Interrupted(list):
        """After the first tensor of version 1 was copied, versions 2 and 3 are written."""

        def __iter__(self):
            yield names[0]
            if writer.shared.tensors["snapshot", "control"][1] < 3:
                for version in (2, 3):
                    write(version)
            yield names[1]

    def write(version):
        with torch.no_grad():
            for tensor in learner.parameters():
                tensor.fill_(version)
        writer.write(version)

    write(1)
    reader.names = Interrupted(names)
    assert reader.load() == 3
    assert all((tensor == 3).all() for tensor in actor.parameters())


def test_copied_weights_have_the_alignment_of_the_learners():
    """Matrix kernels depend on the address modulo 64 bytes and round differently."""
    learner, actor = torch.nn.Linear(3, 5), torch.nn.Linear(3, 5)
    GradientStep([{"params": [*learner.parameters()][::-1], "lr": 1.0}], Distributed("cpu"), 1.0, "lr=1")
    writer = WeightsWriter(learner, version=0)
    WeightsReader(writer.handle(), actor)
    assert (
        [p.data_ptr() % 64 for p in actor.parameters()] == [p.data_ptr() % 64 for p in learner.parameters()] == [20, 0]
    )
    assert_equal(dict(learner.state_dict()), dict(actor.state_dict()))


def test_shared_memory_file_is_removed_after_attaching():
    learner_memory = SharedMemory.make({("x",): Column((2, 3), torch.float32), ("flag",): Column((), torch.bool)})
    file = learner_memory.handle.file
    actor_memory = SharedMemory.attach(learner_memory.handle)
    assert not file.exists()
    learner_memory.tensors["x",][1, 2] = 5
    assert actor_memory.tensors["x",][1, 2] == 5 and actor_memory.tensors["flag",].shape == ()


def test_weights_use_buffer_folder_if_shared_memory_is_full(tmp_path, monkeypatch):
    room = {_memory_folder(): 1000}
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=room.get(folder, 10**9)))
    run = Run(config_in(tmp_path / "small", **ASYNC))
    with pytest.raises(UserError, match="weights needs .* has 1000 bytes free; choose another buffer.folder"):
        run.phase.step(0.0)
    run.phase.env.close()
    elsewhere = tmp_path / "elsewhere"
    trained(config_in(tmp_path / "large", {"buffer": {"folder": str(elsewhere)}}, **ASYNC))
    assert list(elsewhere.iterdir()) == []
