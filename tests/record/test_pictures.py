"""Videos and images: contents, encoding, index, links, Rerun recordings."""

import io
import json
import os
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest
from PIL import Image

from sparring.collect.camera import Episode, EpisodeVideo
from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.phases.phase import Progress
from sparring.phases.replay import Prediction
from sparring.record import videos as videos_module
from sparring.record.overlay import Scene, filmstrip, write_png
from sparring.record.recorder import Recorder
from sparring.record.videos import VideoWriter, _by_camera, _episode_scene, _prediction_scene, _write_video

SPEC = EnvSpec(
    {}, 2, task_names=("reach",), instructions=("touch the ball",), control_hz=10.0, video_cameras=("head", "wrist")
)
GREEN, RED = (52, 168, 104), (222, 74, 66)


def video_of(steps=3, success=True, values=(1.0, 2.0, 3.0)) -> EpisodeVideo:
    """Frames with brightness 10, 11, ... (head) and 200 (wrist), rendered lazily."""
    pictures = [np.concatenate([plain(10 + t), plain(200)], axis=1) for t in range(steps + 1)]
    return EpisodeVideo(
        [lambda picture=picture: picture for picture in pictures],
        Episode(env=4, task=0, reward=0.75, steps=steps, success=success),
        np.full(steps, 0.25),
        np.array(values),
        np.arange(2.0 * steps).reshape(steps, 2),
        np.arange(3.0 * steps).reshape(steps, 3),
    )


def plain(brightness, size=64):
    return np.full((size, size, 3), brightness, np.uint8)


def prediction_of(decisions=5) -> Prediction:
    true = np.stack([plain(100 + t, 16) for t in range(decisions)])
    rewards, numbers = np.full(decisions, 2.0), np.zeros((decisions, 2))
    return Prediction({"head": true - 3}, {"head": true}, rewards, numbers, numbers, 0, 5.0)


def read_video(path):
    """ffmpeg's metadata and the frames `[T, H, W, 3]`."""
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    return meta, np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


def test_png_is_lossless(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.array(Image.open(write_png(tmp_path / "sub" / "a.png", picture))), picture)
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["a.png"]


def test_videos_are_h264_with_all_frames_even_with_odd_size(tmp_path):
    pictures = [np.full((33, 51, 3), 8 * i, np.uint8) for i in range(12)]
    path = _write_video(tmp_path / "v.mp4", iter(pictures), fps=10)
    meta, decoded = read_video(path)
    assert meta["codec"] == "h264" and meta["size"] == (52, 34) and meta["fps"] == 10
    assert len(decoded) == 12 and abs(int(decoded[6, :33, :51].mean()) - 48) < 4
    probe = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path)], capture_output=True, text=True)
    # browsers can play it, and stream it because the index comes before the frames
    content = path.read_bytes()
    assert "yuv420p" in probe.stderr and content.index(b"moov") < content.index(b"mdat")
    assert [file.name for file in tmp_path.iterdir()] == ["v.mp4"]


def test_missing_or_failing_encoder_is_reported_and_leaves_no_file(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="v.mp4': ffmpeg failed"):
        _write_video(tmp_path / "v.mp4", [plain(1)] * 3, fps=-1)
    assert list(tmp_path.iterdir()) == []

    def nowhere():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", nowhere)
    with pytest.raises(UserError, match="No ffmpeg exe could be found"):
        _write_video(tmp_path / "v.mp4", [plain(1)], 10)


@pytest.mark.parametrize("reads", [True, False])
def test_hanging_encoder_is_killed(tmp_path, monkeypatch, reads):
    """Even if it reads no more frames."""
    encoder = tmp_path / "ffmpeg"
    encoder.write_text(f"#!/bin/sh\n{'cat > /dev/null;' if reads else ''} exec sleep 1000\n")
    encoder.chmod(0o755)
    monkeypatch.setattr(videos_module, "find_ffmpeg", lambda: str(encoder))
    monkeypatch.setattr(videos_module, "LONGEST_S", 0.5)
    with pytest.raises(UserError, match=r"ffmpeg failed \(.* 0.5 seconds\)"):
        _write_video(tmp_path / "v.mp4", [plain(1)] * 50, 10)


@pytest.mark.parametrize(("own_nice", "expected"), [(0, 10), (15, 15)])
def test_encoder_has_at_least_the_nice_value_of_the_run(tmp_path, monkeypatch, own_nice, expected):
    nice_values = []

    def refuse(which, pid, nice):
        nice_values.append(nice)
        raise PermissionError

    monkeypatch.setattr(os, "getpriority", lambda which, pid: own_nice)
    monkeypatch.setattr(os, "setpriority", refuse)
    assert _write_video(tmp_path / "v.mp4", [plain(1)] * 2, 10).exists() and nice_values == [expected]


def test_frames_are_rendered_during_encoding(tmp_path, monkeypatch):
    """Only a few frames are in memory, for videos of any length."""
    alive, most = set(), 0

    class Counted(np.ndarray):
        def __del__(self):
            alive.discard(self.number)

    def rendered():
        nonlocal most
        for number in range(20):
            frame = plain(number).view(Counted)
            frame.number = number
            alive.add(number)
            most = max(most, len(alive))
            yield frame

    _write_video(tmp_path / "v.mp4", rendered(), 10)
    assert most <= 4


def test_failed_rendering_leaves_no_video(tmp_path):
    def torn():
        yield plain(1)
        raise ValueError("cannot draw")

    with pytest.raises(ValueError, match="cannot draw"):
        _write_video(tmp_path / "v.mp4", torn(), 10)
    assert not (tmp_path / "v.mp4").exists()


def test_contact_sheet_shows_first_and_last_frame():
    pictures = [np.full((2, 3, 3), i, np.uint8) for i in range(20)]
    strip = filmstrip(pictures)
    # 2 rows of 2 pixels and 3 columns of 3, 8 apart
    assert strip.shape == (12, 25, 3) and (strip[2:10] == 250).all() and (strip[:, 3:11] == 250).all()
    assert strip[0, 0, 0] == 0 and strip[-1, -1, 0] == 19
    assert filmstrip(pictures[:1]).shape == (12, 25, 3)


def test_captions_show_step_reward_and_value():
    video = video_of().rendered()
    views = _by_camera(video.frames, SPEC.video_cameras)
    scene = _episode_scene(video, views, SPEC)
    assert scene.title == "reach: touch the ball" and scene.success is True and scene.fps == 10
    assert scene.captions == [
        ("step 0/3", "reward 0.00", "sum 0.00", "value 1.00"),
        ("step 1/3", "reward 0.25", "sum 0.25", "value 2.00"),
        ("step 2/3", "reward 0.25", "sum 0.50", "value 3.00"),
        ("step 3/3", "reward 0.25", "sum 0.75", "value 3.00"),
    ]
    # without the separator between cameras
    assert [(name, len(pictures), pictures[1].shape) for name, pictures in scene.rows[0]] == [
        ("head", 4, (60, 60, 3)),
        ("wrist", 4, (60, 60, 3)),
    ]
    assert (views["head"][2] == 12).all() and (views["wrist"][2] == 200).all()


def test_captions_omit_unknown_values():
    video = video_of(values=(np.nan,) * 3).rendered()
    scene = _episode_scene(video, _by_camera(video.frames, ()), EnvSpec({}, 2, reports_success=False))
    assert scene.captions[0] == ("step 0/3", "reward 0.00", "sum 0.00") and scene.success is None and scene.title == ""
    assert [name for name, _ in scene.rows[0]] == [""]


@pytest.mark.parametrize(("success", "colour"), [(True, GREEN), (False, RED), (None, None)])
def test_frames_show_enlarged_cameras_and_success_at_the_end(success, colour):
    tiles = [("head", [plain(10), plain(20)]), ("wrist", [plain(200), plain(210)])]
    shown = list(Scene([tiles], "touch the ball", [("step 0/1",), ("step 1/1",)], success, fps=10).frames())
    # two frames, the last one for a second
    assert len(shown) == 2 + 10 and len({frame.shape for frame in shown}) == 1
    height, width, _ = shown[0].shape
    assert height % 2 == width % 2 == 0
    # 64 -> 384, side by side, below their names
    assert np.count_nonzero((shown[0] == 10).all(2)) == np.count_nonzero((shown[1] == 210).all(2)) == 384 * 384
    below = np.flatnonzero((shown[0] == 10).all(2).any(1))[-1] + 1
    # the captions below the images differ
    assert (shown[0][below:] != shown[1][below:]).any()
    assert [(frame[0, 0] == colour).all() for frame in shown] == [False, False] + [success is not None] * 10
    if success is None:
        assert np.array_equal(shown[1], shown[-1])


def test_evaluations_do_not_overwrite_videos_of_each_other(tmp_path):
    """Even if no episode ended between two evaluations; then the number of updates is in the name."""
    videos = VideoWriter(tmp_path)
    for episodes, updates in ((0, 5), (5, 6), (5, 7)):
        videos.evaluation([video_of(), video_of()], Progress(updates=updates, episodes=episodes), SPEC)
    videos.finish()
    assert {path.stem for path in (tmp_path / "videos").glob("*.mp4")} == {
        *("episode_000005_0", "episode_000005_1", "episode_000005_000006_0", "episode_000005_000006_1"),
        *("episode_000005_000007_0", "episode_000005_000007_1"),
    }


def test_long_titles_are_cut_and_large_images_keep_their_size():
    tiles = [("", [plain(7, 500)])]
    (first, *_) = Scene([tiles], "a very long story " * 20, [("step 0",)], None, fps=1).frames()
    assert np.count_nonzero((first == 7).all(2)) == 500 * 500 and first.shape[1] < 560


def test_recording_writes_a_video_a_contact_sheet_and_an_index_line(tmp_path):
    calls = []
    videos = VideoWriter(tmp_path, on_video=lambda *video: calls.append(video))
    progress = Progress(updates=7, env_steps=1, episodes=32)
    videos.rollouts([video_of()], progress, SPEC)
    videos.evaluation([video_of(success=False)], progress, SPEC)
    # later changes have no effect
    progress.updates = 8
    videos.finish()
    first, second = map(json.loads, (tmp_path / "videos" / "index.jsonl").read_text().splitlines())
    assert first == {
        "file": "videos/rollout_000007_4.mp4",
        "kind": "rollout",
        "settings": "",
        "update": 7,
        "episode": 32,
        "task": "reach",
        "success": True,
        "reward": 0.75,
        "steps": 3,
        "cameras": ["head", "wrist"],
        "strip": "samples/rollout_000007_4.png",
    }
    assert (second["file"], second["kind"], second["success"]) == (
        "videos/episode_000032_000007_0.mp4",
        "evaluation",
        False,
    )
    assert calls == [(tmp_path / line["file"], line) for line in (first, second)]
    meta, decoded = read_video(tmp_path / second["file"])
    # 4 frames, the last for a second; its border is red
    assert meta["codec"] == "h264" and meta["size"][0] >= 2 * 384 and len(decoded) == 4 + 10
    assert np.abs(decoded[-1][2, 2].astype(int) - RED).max() < 40
    assert Image.open(tmp_path / first["strip"]).size == (3 * 128 + 16, 2 * 64 + 8)


@pytest.mark.parametrize("link", ["videos/index.jsonl", "videos/a.mp4", "samples/a.png", "partial", "hidden partial"])
def test_videos_are_not_written_through_links(tmp_path, link):
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("kept")
    links = {"partial": ["videos/a.partial", "samples/a.partial"]}
    links["hidden partial"] = ["videos/.a.mp4.partial", "samples/.a.png.partial"]
    for name in links.get(link, [link]):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(precious)
    writer = VideoWriter(run)
    writer.record_video("a", "eval", video_of(), Progress(), SPEC)
    writer.finish()
    assert precious.read_text() == "kept"
    assert (run / "videos/a.mp4").is_symlink() == (link == "videos/a.mp4")


def test_predictions_are_shown_with_the_true_frames(tmp_path):
    scene = _prediction_scene(prediction_of(), SPEC)
    assert [name for name, _ in scene.rows[0]] == ["head, predicted", "head, true"] and scene.fps == 5
    assert scene.captions[1] == ("decision 2/5", "reward 2.00", "sum 4.00", "error 3.0 of 255")
    videos = VideoWriter(tmp_path)
    videos.prediction(prediction_of(), Progress(updates=2, episodes=10), SPEC)
    videos.finish()
    (line,) = map(json.loads, (tmp_path / "videos" / "index.jsonl").read_text().splitlines())
    assert line["file"] == "videos/episode_000010.mp4" and line["strip"] == "samples/episode_0010_pred_vs_gt.png"
    assert (line["kind"], line["success"], line["reward"], line["steps"]) == ("prediction", None, 10.0, 5)
    picture = np.asarray(Image.open(tmp_path / line["strip"]))
    assert picture.shape == (16, 32, 3) and (picture[:, :16] == 99).all() and (picture[:, 16:] == 102).all()
    assert len(read_video(tmp_path / line["file"])[1]) == 5 + 5


def test_recorder_finishes_videos_after_an_exception(tmp_path):
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path) as recorder:
        recorder.videos.rollouts([video_of()], Progress(1, 1, 1), SPEC)
        raise ZeroDivisionError
    assert (tmp_path / "videos" / "rollout_000001_4.mp4").exists()


def test_video_is_logged_after_it_is_written(tmp_path, monkeypatch):
    calls = []

    def record_message(message, *arguments):
        calls.append((message % arguments, arguments[0].exists() and len(read_video(arguments[0])[1])))

    monkeypatch.setattr(videos_module.log, "info", record_message)
    videos = VideoWriter(tmp_path)
    videos.rollouts([video_of()], Progress(1, 1, 1), SPEC)
    videos.prediction(prediction_of(), Progress(1, 1, 1), SPEC)
    videos.finish()
    names = ("rollout_000001_4.mp4", "episode_000001.mp4")
    assert [text.split(": ")[1] for text, _ in calls] == [str(tmp_path / "videos" / name) for name in names]
    assert all(frames >= 4 for _, frames in calls)


def test_rerun_recording_has_frames_and_values(tmp_path):
    rerun_chunk = pytest.importorskip("rerun.chunk")
    videos = VideoWriter(tmp_path, rerun=True)
    videos.rollouts([video_of()], Progress(1, 1, 1), SPEC)
    videos.prediction(prediction_of(), Progress(1, 1, 1), SPEC)
    videos.finish()
    with pytest.warns(match="no footer"):  # the footer is written at the exit of the process
        reader = rerun_chunk.RrdReader(tmp_path / "recording.rrd")
    read = {}
    for chunk in reader.stream().to_chunks():
        batch = chunk.to_record_batch()
        read[chunk.entity_path] = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    robot, model = "/rollout_000001_4", "/episode_000001"
    assert {path for path in read if not path.startswith("/__")} == {
        *(f"{robot}/{part}" for part in ("camera/head", "camera/wrist", "state", "action", "reward", "value")),
        *(f"{model}/{part}" for part in ("true/head", "predicted/head", "state", "action", "reward")),
    }
    assert read[f"{robot}/reward"]["step"] == [1, 2, 3]
    assert read[f"{robot}/reward"]["Scalars:scalars"] == [[0.25]] * 3
    assert read[f"{robot}/action"]["Scalars:scalars"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
    assert read[f"{robot}/camera/head"]["step"] == [0, 1, 2, 3]
    assert read[f"{model}/predicted/head"]["decision"] == [1, 2, 3, 4, 5]
    assert brightness(read[f"{robot}/camera/head"]) == [10, 11, 12, 13]
    assert brightness(read[f"{model}/predicted/head"]) == [97, 98, 99, 100, 101]


def brightness(column) -> list[int]:
    pictures = [bytes(blob) for (blob,) in column["EncodedImage:blob"]]
    return [round(float(np.asarray(Image.open(io.BytesIO(picture))).mean())) for picture in pictures]


def test_resumed_run_keeps_the_earlier_recording(tmp_path):
    pytest.importorskip("rerun")
    for _ in range(2):
        videos = VideoWriter(tmp_path, rerun=True)
        videos.rollouts([video_of()], Progress(1, 1, 1), SPEC)
        videos.finish()
    assert sorted(path.name for path in tmp_path.glob("*.rrd")) == ["recording-2.rrd", "recording.rrd"]


def test_number_of_videos_follows_the_time_share(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("sparring.record.videos.time.monotonic", lambda: now[0])
    videos = VideoWriter(tmp_path, share=0.02)
    # before any video, two are assumed to need 3 s
    now[0] += 149
    assert not videos.affords(2) and videos.affords(1)
    now[0] += 1
    assert videos.affords(2)
    videos.encoder.done, videos.encoder.seconds = 2, 2.0
    assert videos.affords(1) and not videos.affords(2)
    assert VideoWriter(tmp_path, share=1.0).affords(1000) and not VideoWriter(tmp_path, share=0.0).affords(1)
