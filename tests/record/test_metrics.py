"""Names of metrics equal the docs; averages over processes; TensorBoard and W&B."""

import json
import re
import struct
import time
from pathlib import Path

import pytest
import torch
from metric_names import unexplained
from tensordict import TensorDict

from sparring.algorithms.scoring import Decisions
from sparring.config.schema import load_config
from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.evaluation.play import Evaluation, _Score, wilson
from sparring.processes.distributed import Distributed
from sparring.record.names import EVALUATIONS, FAMILIES, FLAT, NAMES, file_name
from sparring.runs.run import Run

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
PHASES = ("teacher", "student", "adversarial", "finetune", "imitate")
SMALL = {
    "env": {"name": "gym:CartPole-v1"},
    "policy": {"hidden": [8]},
    "rollout": {"n_envs": 2, "steps": 32, "render_episodes": 0},
    "ppo": {"mini_batch_size": 32, "ppo_epochs": 2},
    "training": {"iterations": 4, "save_every": 2},
    "evaluation": {"episodes": 2},
    "logging": {"console_level": "ERROR"},
    "device": "cpu",
}


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]


# ---- names


def test_metrics_page_equals_the_table():
    rows = re.findall(r"^\| `([^`]+)` \|(?: `[^`]+` \|)? ([^|]+) \|$", PAGE.read_text(), re.M)
    documented = {(name, meaning) for name, meaning in rows if name not in (*PHASES, "timestamp", "row", "crc")}
    table = {(key, meaning) for key, (_, meaning) in FLAT.items()} | {*NAMES.values()}
    assert documented == table | set(EVALUATIONS.items())
    assert all(meaning in PAGE.read_text() for _, meaning in FAMILIES.values())


def test_names_are_unique_and_in_known_groups():
    groups = {name.partition("/")[0] for name, _ in [*NAMES.values(), *FLAT.values()]}
    assert groups == {"rollout", "train", "world_model", "perf"}
    # two phases may report the same metric
    assert len({*NAMES.values()}) == len({name for name, _ in NAMES.values()})
    assert not {name for name, _ in NAMES.values()} & {name for name, _ in FLAT.values()}


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("clip_fraction", "train/clip_fraction"),
        ("fresh_acc", "world_model/fresh_accuracy"),
        ("behind_2", "perf/behind_2"),
        ("loss_depth", "world_model/loss_depth"),
        ("reward/rnd_normalized", "reward/rnd_normalized"),
        ("mine/own", "mine/own"),
        ("temperature", "train/temperature"),
    ],
)
def test_names_in_files(short, name):
    assert file_name(short) == name


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_metrics_of_algorithms_are_documented(tmp_path, algorithm):
    more = {"algorithm": algorithm, "output": str(tmp_path), "training": {"iterations": 2, "log_every": 2}}
    if algorithm == "grpo":
        more |= {"ppo": {}, "grpo": {"mini_batch_size": 32, "epochs": 1, "kl_coef": 0.1}}
        more |= {"rollout": {"n_envs": 2, "n_episodes_per_batch": 4, "group_size": 2, "render_episodes": 0}}
    assert Run(load_config(SMALL | more)).run()
    # log_every counts updates
    (line,) = lines(tmp_path)
    assert not unexplained(line) and line["update"] == 2
    wanted = {"train/advantage_mean", "train/advantage_std", "train/policy_loss", "train/clip_fraction", "train/parity"}
    wanted |= {"train/return_mean", "train/return_std"} if algorithm == "ppo" else {"train/groups_dropped"}
    assert wanted <= line.keys() and line["lr"] > 0
    # CartPole reports no success
    assert line["avg_acc"] is None and line["episode_reward"] > 0


# ---- several processes


class Pair(Distributed):
    """This process and another one with the values `others`."""

    def __init__(self, others):
        super().__init__("cpu")
        self.others = others

    def sum(self, tensor):
        return tensor + self.others

    def gather_objects(self, values):
        return [*values, self.others]


def test_mean_and_deviation_over_all_decisions():
    decisions = Decisions(TensorDict({"action": torch.zeros(2), "x": torch.tensor([1.0, 3.0])}, [2]))
    alone = decisions.spread("x", Distributed("cpu"))
    assert alone == {"x_mean": 2.0, "x_std": 1.0}
    # the other process has 5 and 7: count, sum, sum of squares
    both = decisions.spread("x", Pair(torch.tensor([2.0, 12.0, 74.0], dtype=torch.float64)))
    assert both == {"x_mean": 4.0, "x_std": pytest.approx(5**0.5)}


def test_line_has_means_over_processes_with_a_value(tmp_path):
    run = Run(load_config(SMALL | {"output": str(tmp_path)}))
    run.distributed = Pair({"update_seconds": 3.0, "learner_idle": 0.25})
    run.recorder.pending.update({"update_seconds": [1.0, 2.0], "loss": [4.0]})
    run.recorder.write_line(run)
    (line,) = lines(tmp_path)
    assert (line["perf/update_seconds"], line["perf/learner_idle"], line["avg_loss"]) == (2.25, 0.25, 4.0)


# ---- evaluations


def test_numbers_of_an_evaluation():
    def score(successes, episodes, reward):
        return _Score(wilson(successes, episodes), reward, 0.0, 5.0)

    tasks = {"push": score(1, 2, 1.0), "lift": score(2, 2, 3.0), "all": score(3, 4, 2.0)}
    evaluation = Evaluation(4, 0, {"policy": tasks, "random": {"all": score(0, 4, -1.0)}}, [], EnvSpec({}, 1))
    numbers = evaluation.numbers()
    assert (numbers["episodes"], numbers["success_rate"], numbers["reward"], numbers["steps"]) == (4, 0.75, 2.0, 5.0)
    assert numbers["success_low"] == wilson(3, 4).low and numbers["success_high"] == wilson(3, 4).high
    assert (numbers["push/success_rate"], numbers["lift/reward"], numbers["random_success_rate"]) == (0.5, 3.0, 0.0)
    assert (numbers["push/success_low"], numbers["push/success_high"]) == (wilson(1, 2).low, wilson(1, 2).high)
    assert (numbers["random_success_low"], numbers["random_success_high"]) == (0.0, wilson(0, 4).high)
    assert "all/reward" not in numbers
    evaluation.scores, evaluation.spec = {"policy": {"task": score(0, 4, 2.0)}}, EnvSpec({}, 1, reports_success=False)
    numbers = evaluation.numbers()
    assert numbers["success_rate"] is numbers["success_low"] is numbers["success_high"] is None
    assert numbers["reward"] == 2.0 and "task/reward" not in numbers and "random_reward" not in numbers


# ---- TensorBoard and W&B


@pytest.mark.parametrize(
    ("setting", "package", "extra"),
    [
        ({"tensorboard": True}, "tensorboard", "tensorboard"),
        ({"mode": "offline"}, "wandb", "wandb"),
        ({"rerun": True}, "rerun-sdk", "rerun"),
    ],
)
def test_missing_package_is_reported_before_the_run_is_built(tmp_path, monkeypatch, setting, package, extra):
    monkeypatch.setattr("sparring.record.recorder.find_spec", lambda name: None)
    monkeypatch.setattr("sparring.runs.run.resolve", lambda *_: pytest.fail("built"))
    config = load_config(SMALL | {"output": str(tmp_path / "run"), "logging": setting})
    with pytest.raises(UserError, match=rf'needs the package {package}: pip install "sparring\[{extra}\]"'):
        Run(config)
    assert not (tmp_path / "run").exists()


def stopped_and_resumed(folder, logging: dict) -> list[dict]:
    """A run that fails in update 4, resumes from the checkpoint of update 2, and ends."""
    config = load_config(SMALL | {"output": str(folder), "logging": SMALL["logging"] | logging})
    first = Run(config)
    step, updates = first.phase.step, first.phase.progress

    def step_thrice(fraction):
        if updates.updates == 3:
            raise UserError("enough")
        return step(fraction)

    first.phase.step = step_thrice
    with pytest.raises(UserError, match="enough"):
        first.run()
    second = Run(config)
    assert second.run() and second.phase.progress.updates == 4
    second.evaluate()
    second.recorder.close()
    return lines(folder)


def test_tensorboard_has_every_line_once_after_a_resume(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    written = stopped_and_resumed(tmp_path, {"tensorboard": True})
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for key, tag in (("train/policy_loss", "train/policy_loss"), ("avg_loss", "train/loss"), ("lr", "train/lr")):
        shown = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in shown] == [1, 2, 3, 4]
        assert [value for _, value in shown] == pytest.approx([line[key] for line in written])
    assert [event.step for event in events.Scalars("eval/reward")] == [4]
    assert "eval/success_rate" not in events.Tags()["scalars"]


def history(file: Path, rows: int) -> list[tuple[int, dict]]:
    """(step, numbers) of `rows` rows in a `.wandb` file, which W&B's process may still be writing."""
    deadline = time.monotonic() + 20
    while len(found := _rows(file)) < rows and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _rows(file: Path) -> list[tuple[int, dict]]:
    """The file is a LevelDB log: protocol buffers in blocks."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, rows = file.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):
            break
        parts.append(data[at + 7 : at + 7 + size])
        at += 7 + size
        # a complete record, or its last part
        if kind in (1, 4):
            record = Record.FromString(b"".join(parts))
            parts = []
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.append((record.history.step.num, {key: json.loads(value) for key, value in items.items()}))
    return rows


def test_wandb_continues_its_run_after_a_resume(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    written = stopped_and_resumed(tmp_path, {"mode": "offline", "project": "arms", "name": "first"})
    parts = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    # parts of two processes, with the run id in wandb/id
    number = (tmp_path / "wandb/id").read_text()
    assert [part.name for part in parts] == [f"run-{number}.wandb"] * 2
    first, second = history(parts[0], 3), history(parts[1], 2)
    assert [step for step, _ in first] == [1, 2, 3] and [step for step, _ in second] == [3, 4]
    for step, row in [*first[:2], *second]:
        line = written[step - 1]
        assert (row["train/loss"], row["train/parity"]) == pytest.approx((line["avg_loss"], line["train/parity"]))
    assert second[-1][1]["eval/reward"] > 0 and "eval/reward" not in second[0][1]


def test_wandb_logs_videos_with_the_current_step(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    from sparring.record.recorder import _WeightsAndBiases

    names = ("rollout_000003_0", "rollout_000003_1", "episode_000008_000003_0", "episode_000008")
    for name in names:
        (tmp_path / f"{name}.mp4").write_bytes(name.encode())
    sink = _WeightsAndBiases(load_config({"logging": {"mode": "offline"}}).logging, tmp_path, {})
    sink.write(3, {"train/loss": 1.0})
    for name in names:
        sink.video(name, tmp_path / f"{name}.mp4")
    sink.write(4, {"train/loss": 2.0})
    sink.close(failed=False)
    (part,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    (step, third), (next_step, fourth) = history(part, 2)
    assert (step, next_step, fourth["train/loss"]) == (3, 4, 2.0) and "videos/rollout_0/path" not in fourth
    for key, name in zip(("rollout_0", "rollout_1", "episode_0", "episode"), names, strict=True):
        assert (part.parent / "files" / third[f"videos/{key}/path"]).read_bytes() == name.encode()
        assert third[f"videos/{key}/caption"] == name
