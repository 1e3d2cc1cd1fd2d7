"""Videos and pictures: what they show, that browsers play them, where they are told of."""

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


def film_of(steps=3, success=True, values=(1.0, 2.0, 3.0)) -> EpisodeVideo:
    """Its pictures are 10, 11, ... bright at the head and 200 at the wrist, drawn when they are wanted."""
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


def foretold_of(decisions=5) -> Prediction:
    true = np.stack([plain(100 + t, 16) for t in range(decisions)])
    rewards, numbers = np.full(decisions, 2.0), np.zeros((decisions, 2))
    return Prediction({"head": true - 3}, {"head": true}, rewards, numbers, numbers, 0, 5.0)


def read_video(path):
    """What ffmpeg says of it and its frames `[T, H, W, 3]`."""
    reader = imageio_ffmpeg.read_frames(str(path))
    meta = next(reader)
    width, height = meta["size"]
    return meta, np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader])


def test_png_keeps_every_pixel(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert np.array_equal(np.array(Image.open(write_png(tmp_path / "sub" / "a.png", picture))), picture)
    assert [file.name for file in (tmp_path / "sub").iterdir()] == ["a.png"]


def test_videos_are_h264_with_every_frame_also_of_odd_size(tmp_path):
    pictures = [np.full((33, 51, 3), 8 * i, np.uint8) for i in range(12)]
    path = _write_video(tmp_path / "v.mp4", iter(pictures), fps=10)
    meta, decoded = read_video(path)
    assert meta["codec"] == "h264" and meta["size"] == (52, 34) and meta["fps"] == 10
    assert len(decoded) == 12 and abs(int(decoded[6, :33, :51].mean()) - 48) < 4
    probe = subprocess.run([imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path)], capture_output=True, text=True)
    # what browsers play, and from the first bytes on: the index comes before the pictures
    content = path.read_bytes()
    assert "yuv420p" in probe.stderr and content.index(b"moov") < content.index(b"mdat")
    assert [file.name for file in tmp_path.iterdir()] == ["v.mp4"]


def test_an_encoder_that_is_missing_or_fails_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="v.mp4': ffmpeg failed"):
        _write_video(tmp_path / "v.mp4", [plain(1)] * 3, fps=-1)
    assert list(tmp_path.iterdir()) == []

    def nowhere():
        raise RuntimeError("No ffmpeg exe could be found.")

    monkeypatch.setattr(imageio_ffmpeg, "get_ffmpeg_exe", nowhere)
    with pytest.raises(UserError, match="No ffmpeg exe could be found"):
        _write_video(tmp_path / "v.mp4", [plain(1)], 10)


@pytest.mark.parametrize("reads", [True, False])
def test_an_encoder_that_hangs_is_ended(tmp_path, monkeypatch, reads):
    """Also while it takes no more pictures."""
    encoder = tmp_path / "ffmpeg"
    encoder.write_text(f"#!/bin/sh\n{'cat > /dev/null;' if reads else ''} exec sleep 1000\n")
    encoder.chmod(0o755)
    monkeypatch.setattr(videos_module, "find_ffmpeg", lambda: str(encoder))
    monkeypatch.setattr(videos_module, "LONGEST_S", 0.5)
    with pytest.raises(UserError, match=r"ffmpeg failed \(.* 0.5 seconds\)"):
        _write_video(tmp_path / "v.mp4", [plain(1)] * 50, 10)


@pytest.mark.parametrize(("own", "told"), [(0, 10), (15, 15)])
def test_encoding_never_gives_way_less_than_the_run_does(tmp_path, monkeypatch, own, told):
    asked = []

    def refused(which, pid, nice):
        asked.append(nice)
        raise PermissionError

    monkeypatch.setattr(os, "getpriority", lambda which, pid: own)
    monkeypatch.setattr(os, "setpriority", refused)
    assert _write_video(tmp_path / "v.mp4", [plain(1)] * 2, 10).exists() and asked == [told]


def test_frames_are_drawn_while_others_are_encoded(tmp_path, monkeypatch):
    """At most a few are there at a time, however long the video is."""
    there, most = set(), 0

    class Counted(np.ndarray):
        def __del__(self):
            there.discard(self.number)

    def drawn():
        nonlocal most
        for number in range(20):
            frame = plain(number).view(Counted)
            frame.number = number
            there.add(number)
            most = max(most, len(there))
            yield frame

    _write_video(tmp_path / "v.mp4", drawn(), 10)
    assert most <= 4


def test_a_film_whose_drawing_fails_leaves_no_video(tmp_path):
    def torn():
        yield plain(1)
        raise ValueError("cannot draw")

    with pytest.raises(ValueError, match="cannot draw"):
        _write_video(tmp_path / "v.mp4", torn(), 10)
    assert not (tmp_path / "v.mp4").exists()


def test_filmstrip_shows_first_and_last():
    pictures = [np.full((2, 3, 3), i, np.uint8) for i in range(20)]
    strip = filmstrip(pictures)
    # 2 rows of 2 pixels and 3 columns of 3, 8 apart
    assert strip.shape == (12, 25, 3) and (strip[2:10] == 250).all() and (strip[:, 3:11] == 250).all()
    assert strip[0, 0, 0] == 0 and strip[-1, -1, 0] == 19
    assert filmstrip(pictures[:1]).shape == (12, 25, 3)


def test_captions_say_what_led_to_each_picture():
    video = film_of().rendered()
    views = _by_camera(video.frames, SPEC.video_cameras)
    scene = _episode_scene(video, views, SPEC)
    assert scene.title == "reach: touch the ball" and scene.success is True and scene.fps == 10
    assert scene.captions == [
        ("step 0/3", "reward 0.00", "sum 0.00", "value 1.00"),
        ("step 1/3", "reward 0.25", "sum 0.25", "value 2.00"),
        ("step 2/3", "reward 0.25", "sum 0.50", "value 3.00"),
        ("step 3/3", "reward 0.25", "sum 0.75", "value 3.00"),
    ]
    # without the line between them
    assert [(name, len(pictures), pictures[1].shape) for name, pictures in scene.rows[0]] == [
        ("head", 4, (60, 60, 3)),
        ("wrist", 4, (60, 60, 3)),
    ]
    assert (views["head"][2] == 12).all() and (views["wrist"][2] == 200).all()


def test_what_nobody_knows_is_not_said():
    video = film_of(values=(np.nan,) * 3).rendered()
    scene = _episode_scene(video, _by_camera(video.frames, ()), EnvSpec({}, 2, reports_success=False))
    assert scene.captions[0] == ("step 0/3", "reward 0.00", "sum 0.00") and scene.success is None and scene.title == ""
    assert [name for name, _ in scene.rows[0]] == [""]


@pytest.mark.parametrize(("success", "colour"), [(True, GREEN), (False, RED), (None, None)])
def test_frames_hold_all_cameras_enlarged_and_end_with_the_verdict(success, colour):
    tiles = [("head", [plain(10), plain(20)]), ("wrist", [plain(200), plain(210)])]
    shown = list(Scene([tiles], "touch the ball", [("step 0/1",), ("step 1/1",)], success, fps=10).frames())
    # two moments, and the last one for a second
    assert len(shown) == 2 + 10 and len({frame.shape for frame in shown}) == 1
    height, width, _ = shown[0].shape
    assert height % 2 == width % 2 == 0
    # 64 -> 384, each beside the other, below their names
    assert np.count_nonzero((shown[0] == 10).all(2)) == np.count_nonzero((shown[1] == 210).all(2)) == 384 * 384
    below = np.flatnonzero((shown[0] == 10).all(2).any(1))[-1] + 1
    # text, which is not over the pictures, tells the moments apart
    assert (shown[0][below:] != shown[1][below:]).any()
    assert [(frame[0, 0] == colour).all() for frame in shown] == [False, False] + [success is not None] * 10
    if success is None:
        assert np.array_equal(shown[1], shown[-1])


def test_every_evaluation_has_videos_of_its_own(tmp_path):
    """Also where no episode ended between two; where none is played, updates are what is counted."""
    videos = VideoWriter(tmp_path)
    for episodes, updates in ((0, 5), (5, 6), (5, 7)):
        videos.evaluation([film_of(), film_of()], Progress(updates=updates, episodes=episodes), SPEC)
    videos.finish()
    assert {path.stem for path in (tmp_path / "videos").glob("*.mp4")} == {
        *("episode_000005_0", "episode_000005_1", "episode_000005_000006_0", "episode_000005_000006_1"),
        *("episode_000005_000007_0", "episode_000005_000007_1"),
    }


def test_long_titles_are_cut_and_large_pictures_stay():
    tiles = [("", [plain(7, 500)])]
    (first, *_) = Scene([tiles], "a very long story " * 20, [("step 0",)], None, fps=1).frames()
    assert np.count_nonzero((first == 7).all(2)) == 500 * 500 and first.shape[1] < 560


def test_a_film_becomes_a_video_a_strip_and_a_line(tmp_path):
    told = []
    videos = VideoWriter(tmp_path, on_video=lambda *video: told.append(video))
    progress = Progress(updates=7, env_steps=1, episodes=32)
    videos.rollouts([film_of()], progress, SPEC)
    videos.evaluation([film_of(success=False)], progress, SPEC)
    # what comes later changes nothing
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
    assert told == [(tmp_path / line["file"], line) for line in (first, second)]
    meta, decoded = read_video(tmp_path / second["file"])
    # 4 pictures, the last for a second; the frame around it is red
    assert meta["codec"] == "h264" and meta["size"][0] >= 2 * 384 and len(decoded) == 4 + 10
    assert np.abs(decoded[-1][2, 2].astype(int) - RED).max() < 40
    assert Image.open(tmp_path / first["strip"]).size == (3 * 128 + 16, 2 * 64 + 8)


@pytest.mark.parametrize("link", ["videos/index.jsonl", "videos/a.mp4", "samples/a.png", "partial", "hidden partial"])
def test_nothing_is_written_through_a_link_of_somebody_elses_folder(tmp_path, link):
    precious, run = tmp_path / "precious", tmp_path / "run"
    precious.write_text("kept")
    links = {"partial": ["videos/a.partial", "samples/a.partial"]}
    links["hidden partial"] = ["videos/.a.mp4.partial", "samples/.a.png.partial"]
    for name in links.get(link, [link]):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).symlink_to(precious)
    writer = VideoWriter(run)
    writer.record_video("a", "eval", film_of(), Progress(), SPEC)
    writer.finish()
    assert precious.read_text() == "kept"
    assert (run / "videos/a.mp4").is_symlink() == (link == "videos/a.mp4")


def test_predictions_stand_beside_the_truth(tmp_path):
    scene = _prediction_scene(foretold_of(), SPEC)
    assert [name for name, _ in scene.rows[0]] == ["head, predicted", "head, true"] and scene.fps == 5
    assert scene.captions[1] == ("decision 2/5", "reward 2.00", "sum 4.00", "error 3.0 of 255")
    videos = VideoWriter(tmp_path)
    videos.prediction(foretold_of(), Progress(updates=2, episodes=10), SPEC)
    videos.finish()
    (line,) = map(json.loads, (tmp_path / "videos" / "index.jsonl").read_text().splitlines())
    assert line["file"] == "videos/episode_000010.mp4" and line["strip"] == "samples/episode_0010_pred_vs_gt.png"
    assert (line["kind"], line["success"], line["reward"], line["steps"]) == ("prediction", None, 10.0, 5)
    picture = np.asarray(Image.open(tmp_path / line["strip"]))
    assert picture.shape == (16, 32, 3) and (picture[:, :16] == 99).all() and (picture[:, 16:] == 102).all()
    assert len(read_video(tmp_path / line["file"])[1]) == 5 + 5


def test_a_recorder_waits_for_its_films_also_when_something_fails(tmp_path):
    with pytest.raises(ZeroDivisionError), Recorder(tmp_path) as recorder:
        recorder.videos.rollouts([film_of()], Progress(1, 1, 1), SPEC)
        raise ZeroDivisionError
    assert (tmp_path / "videos" / "rollout_000001_4.mp4").exists()


def test_a_video_is_told_of_when_it_is_there_to_be_looked_at(tmp_path, monkeypatch):
    told = []

    def look(message, *arguments):
        told.append((message % arguments, arguments[0].exists() and len(read_video(arguments[0])[1])))

    monkeypatch.setattr(videos_module.log, "info", look)
    videos = VideoWriter(tmp_path)
    videos.rollouts([film_of()], Progress(1, 1, 1), SPEC)
    videos.prediction(foretold_of(), Progress(1, 1, 1), SPEC)
    videos.finish()
    names = ("rollout_000001_4.mp4", "episode_000001.mp4")
    assert [said.split(": ")[1] for said, _ in told] == [str(tmp_path / "videos" / name) for name in names]
    assert all(frames >= 4 for _, frames in told)


def test_what_rerun_reads_is_what_was_filmed(tmp_path):
    rerun_chunk = pytest.importorskip("rerun.chunk")
    videos = VideoWriter(tmp_path, rerun=True)
    videos.rollouts([film_of()], Progress(1, 1, 1), SPEC)
    videos.prediction(foretold_of(), Progress(1, 1, 1), SPEC)
    videos.finish()
    with pytest.warns(match="no footer"):  # which comes when the process ends
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


def test_a_run_that_goes_on_keeps_the_recording_it_had(tmp_path):
    pytest.importorskip("rerun")
    for _ in range(2):
        videos = VideoWriter(tmp_path, rerun=True)
        videos.rollouts([film_of()], Progress(1, 1, 1), SPEC)
        videos.finish()
    assert sorted(path.name for path in tmp_path.glob("*.rrd")) == ["recording-2.rrd", "recording.rrd"]


def test_videos_are_made_as_often_as_there_is_time(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("sparring.record.videos.time.monotonic", lambda: now[0])
    videos = VideoWriter(tmp_path, share=0.02)
    # none is known yet: two of them are taken to need 3 s
    now[0] += 149
    assert not videos.affords(2) and videos.affords(1)
    now[0] += 1
    assert videos.affords(2)
    videos.encoder.done, videos.encoder.seconds = 2, 2.0
    assert videos.affords(1) and not videos.affords(2)
    assert VideoWriter(tmp_path, share=1.0).affords(1000) and not VideoWriter(tmp_path, share=0.0).affords(1)
