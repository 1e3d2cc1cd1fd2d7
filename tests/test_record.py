"""Numbers, pictures and progress."""

import io
import json

from sparring.record.console import Console, clock
from sparring.record.recorder import Recorder


def test_metrics_are_one_json_object_a_line_whatever_the_numbers(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write({"episode": 1, "avg_loss": float("nan"), "episode_reward": 2.5})
    first = json.loads((tmp_path / "episode_metrics.jsonl").read_text())
    assert first["avg_loss"] is None and first["episode_reward"] == 2.5 and first["timestamp"] > 1e9


def test_lines_after_a_checkpoint_are_forgotten_on_going_back(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write({"n": 1})
    state = recorder.state_dict()
    recorder.write({"n": 2})
    with recorder.metrics_file.open("a") as file:
        file.write('{"torn')
    recorder.load_state_dict(state)
    assert [json.loads(line)["n"] for line in recorder.metrics_file.read_text().splitlines()] == [1]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(None)
    recorder.write({"n": 1})
    with recorder:
        assert recorder.films is None
    assert list(tmp_path.iterdir()) == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_on_a_terminal_and_sparse_lines_in_a_pipe():
    terminal, pipe = Terminal(), io.StringIO()
    bar, lines = Console(terminal), Console(pipe, pipe_seconds=3600)
    for done in (0.25, 0.5, 1.0):
        bar.progress(done, int(done * 1000), "reward 1.00")
        lines.progress(done, int(done * 1000), "reward 1.00")
    bar.end()
    assert terminal.getvalue().count("\r") == 3 and "[##########..........]  50%" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")
    # the first and the last; the one between came too soon
    assert [line.split()[0] for line in pipe.getvalue().splitlines()] == ["25%", "100%"]
    assert "steps/s" in pipe.getvalue() and "left" in pipe.getvalue()


def test_clock():
    assert [clock(s) for s in (5, 65, 3700, float("inf"))] == ["0:05", "1:05", "1:01:40", "?"]
