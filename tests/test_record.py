"""Numbers and pictures."""

import json
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from sparring.record.pictures import NoVideoEncoder, filmstrip, write_png, write_video
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
