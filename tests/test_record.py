"""Numbers, pictures and progress."""

import io
import json
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from sparring.phases.phase import Progress
from sparring.record.console import Console, clock
from sparring.record.pictures import NoVideoEncoder, filmstrip, write_png, write_video
from sparring.record.recorder import Recorder


def test_metrics_are_one_json_object_a_line_whatever_the_numbers(tmp_path):
    recorder = Recorder(tmp_path)
    metrics = {"loss": float("nan"), "episode_reward": 2.5, "success_rate": 0.5, "mine": float("inf"), "a/b": 1.0}
    recorder.write(Progress(3, 40, 7), metrics, accuracy="success_rate")
    line = json.loads((tmp_path / "episode_metrics.jsonl").read_text())
    assert line.pop("timestamp") > 1e9
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


def test_lines_after_a_checkpoint_are_forgotten_on_going_back(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(Progress(updates=1), {})
    state = recorder.state_dict()
    recorder.write(Progress(updates=2), {})
    with recorder.metrics_file.open("a") as file:
        file.write('{"torn')
    recorder.load_state_dict(state, 1)
    assert [json.loads(line)["update"] for line in recorder.metrics_file.read_text().splitlines()] == [1]


def test_evaluations_of_updates_to_come_are_forgotten_on_going_back_and_others_are_not(tmp_path):
    recorder = Recorder(tmp_path)
    for update in (2, 4, 6):
        recorder.evaluation(Progress(update, 10 * update, update), {"success_rate": update / 10, "reward": None})
    with recorder.evaluations_file.open("a") as file:
        file.write('{"update": 8, "torn')
    assert [line["update"] for line in recorder.evaluations()] == [2, 4, 6]
    # update 4 was evaluated after it was saved
    recorder.load_state_dict({"metrics_bytes": 0}, 4)
    assert [line["update"] for line in recorder.evaluations()] == [2, 4]
    # once more, of the same update: it counts once
    recorder.evaluation(Progress(4, 40, 4), {"success_rate": 0.9})
    first, second = recorder.evaluations()
    assert second.pop("timestamp") >= first["timestamp"] > 1e9 and first["eval/reward"] is None
    assert second == {"update": 4, "total_steps": 40, "episode": 4, "eval/success_rate": 0.9}


class Deaf:
    """Takes one line."""

    def __init__(self):
        self.told, self.closed = [], []

    def write(self, update, numbers):
        if self.told:
            raise ConnectionError("nobody there")
        self.told.append((update, numbers))

    def video(self, name, path):
        self.told.append((name, path))

    def close(self, failed):
        self.closed.append(failed)


def test_a_sink_that_fails_is_told_of_once_and_training_goes_on(tmp_path, monkeypatch):
    warned = []
    monkeypatch.setattr("sparring.record.recorder.log.warning", lambda text, *words: warned.append(text % words))
    deaf = Deaf()
    recorder = Recorder(tmp_path, [deaf])
    recorder.write(Progress(1, 8, 2), {"loss": 1.0, "entropy": float("nan"), "parity": 0.5}, "nothing")
    path = recorder.video("rollout_1", [np.zeros((16, 16, 3), np.uint8)], 10)
    # by their groups, and only what is a number
    numbers = {"rollout/episodes": 2, "train/loss": 1.0, "rollout/env_steps": 8, "train/update": 1, "train/parity": 0.5}
    assert deaf.told == [(1, numbers), ("rollout_1", path)]
    for update in (2, 3):
        recorder.write(Progress(update), {"loss": 1.0})
    recorder.close()
    assert warned == ["Deaf failed and gets no more numbers: nobody there"]
    assert len(recorder.metrics_file.read_text().splitlines()) == 3 and deaf.closed == []


def test_sinks_are_told_how_it_ended_once():
    sink = Deaf()
    recorder = Recorder(None, [sink])
    recorder.close(failed=True)
    recorder.close()
    assert sink.closed == [True]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorder = Recorder(None)
    recorder.write(Progress(), {})
    recorder.evaluation(Progress(), {})
    assert recorder.image("a", np.zeros((2, 2, 3), np.uint8)) is None
    assert recorder.video("a", [np.zeros((2, 2, 3), np.uint8)], 10) is None
    assert list(tmp_path.iterdir()) == []


def test_png_keeps_every_pixel(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.array(Image.open(write_png(tmp_path / "sub" / "a.png", picture))), picture)


def test_videos_are_h264_with_every_frame_also_of_odd_size(tmp_path):
    frames = [np.full((33, 51, 3), 8 * i, np.uint8) for i in range(12)]
    path = write_video(tmp_path / "v.mp4", frames, fps=10)
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    decoded = [np.frombuffer(frame, np.uint8) for frame in reader]
    assert meta["codec"] == "h264" and meta["size"] == (52, 34) and meta["fps"] == 10
    assert len(decoded) == 12
    assert abs(int(decoded[6].mean()) - 48) < 4
    probe = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path)], capture_output=True, text=True)
    assert "yuv420p" in probe.stderr  # what browsers play


def test_a_missing_encoder_is_told(tmp_path, monkeypatch):
    def nowhere():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", nowhere)
    with pytest.raises(NoVideoEncoder, match="no videos: No ffmpeg exe could be found"):
        write_video(tmp_path / "v.mp4", [np.zeros((2, 2, 3), np.uint8)], 10)


def test_filmstrip_shows_first_and_last():
    frames = [np.full((2, 3, 3), i, np.uint8) for i in range(20)]
    strip = filmstrip(frames)
    # 2 rows of 2 pixels and 3 columns of 3, 8 apart
    assert strip.shape == (12, 25, 3) and (strip[2:10] == 250).all() and (strip[:, 3:11] == 250).all()
    assert strip[0, 0, 0] == 0 and strip[-1, -1, 0] == 19
    assert filmstrip(frames[:1]).shape == (12, 25, 3)


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
