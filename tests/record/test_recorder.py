"""The recorder: metrics, evaluations, timeline, sinks."""

import json
import threading

from sparring.collect.collector import Span
from sparring.phases.phase import Progress
from sparring.record.recorder import Recorder


def test_metrics_are_valid_json_for_any_numbers(tmp_path):
    recorder = Recorder(tmp_path)
    metrics = {"loss": float("nan"), "episode_reward": 2.5, "success_rate": 0.5, "mine": float("inf"), "a/b": 1.0}
    recorder.write(Progress(3, 40, 7), metrics, accuracy="success_rate")
    line = json.loads((tmp_path / "episode_metrics.jsonl").read_text())
    assert line.pop("timestamp") > 1e9 and len(line.pop("crc")) == 8 and line.pop("row") == 1
    assert line == {
        "episode": 7,
        "avg_loss": None,
        "avg_acc": 0.5,
        "episode_reward": 2.5,
        "total_steps": 40,
        "lr": None,
        "update": 3,
        "rollout/success_rate": 0.5,
        "train/mine": None,
        "a/b": 1.0,
    }


def test_resume_removes_lines_after_the_checkpoint(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(Progress(updates=1), {})
    recorder.timeline([Span("learner", "learn", 1.0, 2.0, version=0)])
    state = recorder.state_dict()
    recorder.write(Progress(updates=2), {})
    recorder.timeline([Span("learner", "learn", 2.0, 3.0, version=1)])
    file = tmp_path / "episode_metrics.jsonl"
    with file.open("a") as lines:
        lines.write('{"torn')
    recorder.load_state_dict(state, 1)
    assert [json.loads(line)["update"] for line in file.read_text().splitlines()] == [1]
    assert [json.loads(line)["version"] for line in (tmp_path / "timeline.jsonl").read_text().splitlines()] == [0]


def test_resume_removes_later_evaluations_only(tmp_path):
    recorder = Recorder(tmp_path)
    for update in (2, 4, 6):
        recorder.evaluation(Progress(update, 10 * update, update), {"success_rate": update / 10, "reward": None})
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"update": 8, "torn')
    assert [line["update"] for line in recorder.evaluations()] == [2, 4, 6]
    # the evaluation of update 4 came after its checkpoint
    recorder.load_state_dict({"metrics_rows": 0, "timeline_rows": 0, "evaluations_rows": 0}, 4)
    assert [line["update"] for line in recorder.evaluations()] == [2, 4]
    # a second evaluation of an update replaces the first
    recorder.evaluation(Progress(4, 40, 4), {"success_rate": 0.9})
    first, second = recorder.evaluations()
    assert second.pop("timestamp") >= first["timestamp"] > 1e9 and first["eval/reward"] is None
    assert second == {"update": 4, "total_steps": 40, "episode": 4, "eval/success_rate": 0.9}


def test_resume_reports_lost_and_altered_rows(tmp_path):
    recorder = Recorder(tmp_path)
    for update in (1, 2, 3):
        recorder.write(Progress(updates=update), {"loss": 0.5})
        recorder.evaluation(Progress(updates=update), {"reward": 1.0})
        recorder.timeline([Span("learner", "learn", 1.0, 2.0, version=update)])
    state, file = recorder.state_dict(), tmp_path / "episode_metrics.jsonl"
    assert recorder.load_state_dict(state, 3) == []
    file.write_text(file.read_text().replace("0.5", "0.7", 1)[:-9])
    (tmp_path / "timeline.jsonl").unlink()
    (tmp_path / "evaluations.jsonl").write_text((tmp_path / "evaluations.jsonl").read_text().replace("1.0", "9.0", 1))
    received = recorder.load_state_dict(state, 3)
    names = ["episode_metrics.jsonl", "episode_metrics.jsonl", "timeline.jsonl", "evaluations.jsonl"]
    assert [line.split("'")[1] for line in received] == [str(tmp_path / name) for name in names]
    assert "rows after update 2 are lost (1 of 3)" in received[0] and "row 1 is altered" in received[1]
    assert "rows after the beginning are lost (3 of 3)" in received[2] and "row 1 is altered" in received[3]
    assert [row["update"] for row in recorder.evaluations()] == [2, 3]
    recorder.write(Progress(updates=4), {})
    assert [json.loads(line)["update"] for line in file.read_text().splitlines()] == [1, 2, 4]


class Deaf:
    """A sink that accepts one line and then fails."""

    def __init__(self):
        self.received, self.closed = [], []

    def write(self, update, numbers):
        if self.received:
            raise ConnectionError("nobody there")
        self.received.append((update, numbers))

    def video(self, name, path):
        self.received.append((name, path))

    def close(self, failed):
        self.closed.append(failed)


def test_failing_sink_is_reported_once_and_dropped(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr("sparring.record.recorder.log.warning", lambda text, *words: warned.append(text % words))
    sink = Deaf()
    recorder = Recorder(tmp_path, [sink])
    path = tmp_path / "videos" / "rollout_1.mp4"
    recorder.videos.on_video(path, {})
    recorder.write(Progress(1, 8, 2), {"loss": 1.0, "entropy": float("nan"), "parity": 0.5}, "nothing")
    # names with groups; only finite numbers
    numbers = {"rollout/episodes": 2, "train/loss": 1.0, "rollout/env_steps": 8, "train/update": 1, "train/parity": 0.5}
    assert sink.received == [(1, numbers), ("rollout_1", path)]
    for update in (2, 3):
        recorder.write(Progress(update), {"loss": 1.0})
    recorder.close()
    assert warned == ["Deaf failed and gets no more numbers: nobody there"]
    assert len((tmp_path / "episode_metrics.jsonl").read_text().splitlines()) == 3 and sink.closed == []


def test_hanging_sink_is_dropped(tmp_path, monkeypatch):
    warned, go = [], threading.Event()
    monkeypatch.setattr("sparring.record.recorder.log.warning", lambda text, *words: warned.append(text % words))
    monkeypatch.setattr("sparring.record.recorder._SINK_S", 0.1)
    sink = Deaf()
    sink.write = lambda *_: go.wait(60)
    recorder = Recorder(tmp_path, [sink])
    for update in (1, 2):
        recorder.write(Progress(update), {"loss": 1.0})
    go.set()
    assert warned == ["Deaf failed and gets no more numbers: no answer for 0.1 seconds"]
    assert len((tmp_path / "episode_metrics.jsonl").read_text().splitlines()) == 2


def test_sinks_are_closed_once_with_the_outcome():
    sink = Deaf()
    recorder = Recorder(None, [sink])
    recorder.close(failed=True)
    recorder.close()
    assert sink.closed == [True]


def test_recorder_without_a_folder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(None)
    recorder.write(Progress(), {})
    recorder.evaluation(Progress(), {})
    with recorder:
        assert recorder.videos is None
    assert list(tmp_path.iterdir()) == []
