"""Reading of datasets: exact frames, statistics, caches, datasets of LeRobot, and damaged datasets."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from sparring.data import image_cache, statistics, video
from sparring.data.dataset import DatasetError
from sparring.data.demonstrations import Demonstrations
from sparring.demos.plan import Plan
from sparring.demos.record import record
from sparring.envs.configs import TabletopConfig
from sparring.errors import UserError

DATA, EPISODES = "data/chunk-000/file-000.parquet", "meta/episodes/chunk-000/file-000.parquet"
HEAD = "videos/observation.images.head/chunk-000/file-000.mp4"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Four episodes of seven steps, two cameras. Tests copy it."""
    env = TabletopConfig(task="push_d0", cameras=("head", "wrist"), image_size=32, object_state="hidden", threads=1)
    output = tmp_path_factory.mktemp("demonstrations") / "push"
    record(Plan(env, max_episode_steps=7, keep_failures=True), 4, output, quiet=True)
    return output


@pytest.fixture
def copy(recorded, tmp_path):
    return Path(shutil.copytree(recorded, tmp_path / "copy"))


@pytest.fixture
def without_manifest(copy):
    """Without a manifest, as datasets of other tools and of earlier versions: the content itself is checked."""
    (copy / "manifest.json").unlink()
    return copy


# ---- video


def numbered(first: int, count: int, height: int = 16, width: int = 32) -> np.ndarray:
    """`[T, H, W, 3]`: each frame has its own grey."""
    return np.broadcast_to(
        (8 + 3 * np.arange(first, first + count))[:, None, None, None], (count, height, width, 3)
    ).astype(np.uint8)


def frame_numbers(frames: np.ndarray) -> list[int]:
    return ((frames.reshape(len(frames), -1).mean(axis=1) - 8) / 3).round().astype(int).tolist()


@pytest.mark.parametrize("pixel_format", ["yuv420p", "yuv444p"])
def test_every_frame_of_joined_clips_is_decoded(tmp_path, pixel_format):
    """Clips of various lengths, one of a single frame; decoding starts at every frame."""
    lengths, clips, first = [5, 1, 8, 3, 20], [], 0
    for number, length in enumerate(lengths):
        clips.append(tmp_path / f"{number}.mp4")
        video.encode(clips[-1], numbered(first, length), 25, pixel_format)
        first += length
    video.join(tmp_path / "all.mp4", clips, tmp_path)
    for start in range(sum(lengths)):
        count = min(4, sum(lengths) - start)
        frames = video.decode(tmp_path / "all.mp4", start / 25, count, 25, 16, 32)
        assert frame_numbers(frames) == list(range(start, start + count))


def test_frames_are_scaled_when_read(tmp_path):
    video.encode(tmp_path / "x.mp4", numbered(0, 3, 48, 64), 25, "yuv420p")
    frames = video.decode(tmp_path / "x.mp4", 0, 3, 25, 24, 24)
    assert frames.shape == (3, 24, 24, 3) and frame_numbers(frames) == [0, 1, 2]


def test_a_video_that_is_too_short_or_invalid_is_refused(tmp_path):
    video.encode(tmp_path / "x.mp4", numbered(0, 3), 25, "yuv420p")
    with pytest.raises(UserError, match="x.mp4' has only 2 of the 5 frames from 0.04 s on"):
        video.decode(tmp_path / "x.mp4", 1 / 25, 5, 25, 16, 32)
    (tmp_path / "y.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match="y.mp4': ffmpeg failed "):
        video.decode(tmp_path / "y.mp4", 0, 1, 25, 16, 32)


# ---- statistics


def test_statistics_of_numbers():
    values = np.random.default_rng(0).normal(size=(500, 3))
    found = statistics.number_statistics(values)
    assert found["count"].tolist() == [500]
    for name, expected in {
        "mean": values.mean(0), "std": values.std(0), "min": values.min(0), "max": values.max(0),
        "q01": np.quantile(values, 0.01, axis=0), "q99": np.quantile(values, 0.99, axis=0),
    }.items():  # fmt: skip
        assert np.array_equal(found[name], expected)
    assert statistics.number_statistics(np.array([True, False]))["mean"].tolist() == [0.5]


def test_statistics_of_images_are_those_of_their_pixels():
    frames = np.random.default_rng(1).integers(10, 200, (5, 8, 6, 3), dtype=np.uint8)
    frames[..., 1] //= 2
    found = statistics.image_statistics(statistics.pixel_counts(frames), 5)
    pixels = frames.reshape(-1, 3) / 255
    assert found["count"].tolist() == [5] and found["mean"].shape == (3, 1, 1)
    for name in ("mean", "std", "min", "max"):
        assert np.allclose(found[name].ravel(), getattr(pixels, name)(axis=0), atol=1e-12)
    expected = np.quantile(pixels, 0.9, axis=0, method="inverted_cdf")
    assert np.allclose(found["q90"].ravel(), expected, atol=1e-12)


def test_statistics_of_a_dataset(without_manifest):
    demos = Demonstrations(without_manifest)
    assert set(demos.statistics) == {"observation/state", "action"}
    assert np.allclose(demos.statistics["action"]["q01"], np.quantile(demos.numbers("action"), 0.01, axis=0))
    saved = json.loads((without_manifest / "meta/stats.json").read_text())
    images = np.stack([demos.images("head", episode) for episode in range(4)])
    # [E, T, 3, H, W]; the video is lossy
    assert np.allclose(np.ravel(saved["observation.images.head"]["mean"]), images.mean((0, 1, 3, 4)) / 255, atol=0.01)
    # saved statistics are used, missing ones are computed
    saved["action"]["mean"] = [9.0] * 7
    del saved["action"]["q99"]
    (without_manifest / "meta/stats.json").write_text(json.dumps(saved))
    again = Demonstrations(without_manifest).statistics["action"]
    assert again["mean"].tolist() == [9.0] * 7
    assert np.array_equal(again["q99"], demos.statistics["action"]["q99"])
    (without_manifest / "meta/stats.json").write_text(json.dumps({"action": {"mean": [1.0]}}))
    with pytest.raises(UserError, match="mean of action has 1 entries, expected 7"):
        Demonstrations(without_manifest).statistics  # noqa: B018


# ---- episodes


def test_an_episode_has_the_keys_of_the_contract(recorded):
    demos = Demonstrations(recorded, cameras=["wrist"])
    assert (len(demos), demos.steps, demos.fps, demos.control_mode) == (4, 28, 25, "delta_qpos")
    td = demos.episode(2)
    shapes = {"/".join(key) if isinstance(key, tuple) else key: (tuple(value.shape), value.dtype)
              for key, value in td.items(True, True)}  # fmt: skip
    assert shapes == {
        "observation/state": ((7, 30), torch.float32),
        "observation/image/wrist": ((7, 3, 32, 32), torch.uint8),
        "observation/task": ((7,), torch.int64),
        "action": ((7, 1, 7), torch.float32),
        "is_first": ((7,), torch.bool),
        "next/reward": ((7, 1), torch.float32),
        "next/success": ((7,), torch.bool),
        "next/done": ((7,), torch.bool),
    }
    assert td["is_first"].tolist() == [True] + 6 * [False]
    assert td["next", "done"].tolist() == 6 * [False] + [True]
    assert demos.instructions[td["observation", "task"][0]] == demos.instruction(2)
    with pytest.raises(IndexError):
        demos.episode(4)


def test_images_belong_to_their_steps(recorded):
    """The wrist camera moves: each frame is closest to the original of its own step."""
    from sparring.envs.backend import EpisodeSeeds
    from sparring.envs.tabletop.backend import Tabletop

    demos = Demonstrations(recorded, image_size=32)
    env = Tabletop(TabletopConfig(task="push_d0", cameras=("wrist",), image_size=32, threads=1), 4, 7)
    obs, originals = env.reset(EpisodeSeeds(0, total_envs=4)), []
    for t in range(7):
        originals.append(obs["image/wrist"])
        obs = env.step(np.stack([demos.episode(episode)["action"][t].numpy() for episode in range(4)])).observation
    for episode in range(4):
        read = demos.images("wrist", episode).astype(float)
        distances = [[np.abs(read[t] - original[episode]).mean() for original in originals] for t in range(7)]
        assert np.argmin(distances, axis=1).tolist() == list(range(7))


def test_the_cache_is_decoded_once_and_has_the_same_images(copy, monkeypatch):
    plain = Demonstrations(copy, image_size=16)
    cached = Demonstrations(copy, image_size=16, cache=True)
    assert cached.image_cache("head").shape == (28, 3, 16, 16)
    for episode in range(4):
        assert (plain.episode(episode) == cached.episode(episode)).all()
        assert np.array_equal(cached.image_cache("head")[7 * episode : 7 * episode + 7], plain.images("head", episode))
    with pytest.raises(UserError, match="open it with cache=True"):
        plain.image_cache("head")

    def forbidden(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(video, "decode", forbidden)
    again = Demonstrations(copy, image_size=16, cache=True)
    assert np.array_equal(again.images("wrist", 3), cached.images("wrist", 3))
    # another size, or other videos, need another cache
    with pytest.raises(AssertionError, match="decoded again"):
        Demonstrations(copy, image_size=32, cache=True)
    (copy / HEAD).touch()
    with pytest.raises(AssertionError, match="decoded again"):
        Demonstrations(copy, image_size=16, cache=True)


# ---- datasets of other tools


def foreign(folder: Path) -> Path:
    """As LeRobot writes them: several files, variable lists, tasks in a pandas index, episodes within a video."""
    states = np.arange(36, dtype=np.float32).reshape(9, 4)
    features = {
        "observation.state": {"dtype": "float32", "shape": [4], "names": {"motors": ["a", "b", "c", "d"]}},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "observation.image": {"dtype": "video", "shape": [3, 16, 32], "names": ["channels", "height", "width"]},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    }
    for name in ("frame_index", "episode_index", "index", "task_index"):
        features[name] = {"dtype": "int64", "shape": [1], "names": None}
    info = {"codebase_version": "v3.0", "robot_type": None, "total_episodes": 3, "total_frames": 9, "total_tasks": 2,
            "fps": 10, "features": features, "data_path": "data/c{chunk_index:d}/f{file_index:d}.parquet",
            "video_path": "videos/{video_key}/c{chunk_index:d}/f{file_index:d}.mp4"}  # fmt: skip
    # episodes of 4, 3 and 2 frames; the second file of data holds the last two, the second video the last one
    starts, lengths = [0, 4, 7], [4, 3, 2]
    index = np.arange(9)
    episode = np.repeat([0, 1, 2], lengths)
    within = index - np.repeat(starts, lengths)

    def write(path, columns):
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), path)

    for place, rows in (("c0/f0", slice(0, 4)), ("c2/f1", slice(4, 9))):
        write(
            folder / f"data/{place}.parquet",
            {
                "observation.state": states[rows].tolist(),
                "action": states[rows, :2].tolist(),
                "timestamp": (within[rows] / 10).astype(np.float32),
                "frame_index": within[rows],
                "episode_index": episode[rows],
                "index": index[rows],
                "task_index": np.repeat([1, 0, 1], lengths)[rows],
            },
        )
    clips = folder / "videos/observation.image"
    for place, first, count in (("c0/f0", 0, 7), ("c0/f1", 0, 12)):
        (clips / place).parent.mkdir(parents=True, exist_ok=True)
        video.encode(clips / f"{place}.mp4", numbered(first, count), 10, "yuv420p")
    columns = {"episode_index": [0, 1, 2], "length": lengths, "tasks": [["fold"], ["open"], ["fold"]]}
    columns |= {"data/chunk_index": [0, 2, 2], "data/file_index": [0, 1, 1]}
    columns |= {f"videos/observation.image/{name}": values for name, values in {
        "chunk_index": [0, 0, 0], "file_index": [0, 0, 1], "from_timestamp": [0.0, 0.4, 0.9]}.items()}  # fmt: skip
    for number, rows in enumerate((slice(0, 1), slice(1, 3))):
        write(folder / f"meta/episodes/chunk-00{number}/file-000.parquet", {k: v[rows] for k, v in columns.items()})
    write(folder / "meta/tasks.parquet", {"task_index": [0, 1], "__index_level_0__": ["open", "fold"]})
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def test_each_camera_may_have_its_own_size_which_need_not_be_square(recorded):
    sizes = {"head": (36, 48), "wrist": (40, 24)}
    demos = Demonstrations(recorded, image_size=sizes)
    assert {camera: demos.images(camera, 0).shape for camera in sizes} == {
        camera: (7, 3, *size) for camera, size in sizes.items()
    }


def test_a_dataset_that_lerobot_wrote(tmp_path):
    demos = Demonstrations(foreign(tmp_path / "theirs"))
    assert (demos.cameras, demos.image_shapes, demos.lengths.tolist()) == (("image",), {"image": (16, 32)}, [4, 3, 2])
    assert [demos.instruction(episode) for episode in range(3)] == ["fold", "open", "fold"]
    assert [frame_numbers(demos.images("image", episode).transpose(0, 2, 3, 1)) for episode in range(3)] == [
        [0, 1, 2, 3], [4, 5, 6], [9, 10]
    ]  # fmt: skip
    td = demos.episode(1)
    assert td["observation", "state"][:, 0].tolist() == [16, 20, 24] and td["action"][0, 0].tolist() == [16, 17]
    assert "next" not in td
    assert np.allclose(demos.statistics["action"]["mean"], [16, 17])


def test_rows_of_uneven_length_are_refused_even_if_their_sum_is_right(tmp_path):
    file = foreign(tmp_path / "set") / "data/c0/f0.parquet"
    table = pyarrow.parquet.read_table(file, partitioning=None)
    rows = table["action"].to_pylist()
    rows[1], rows[2] = rows[1][:1], [*rows[2], 0.0]
    pyarrow.parquet.write_table(table.set_column(table.column_names.index("action"), "action", [rows]), file)
    with pytest.raises(UserError, match="f0.parquet': row 1 of 4 has 1 numbers, expected 2 each"):
        Demonstrations(file.parents[2])


def test_tasks_are_numbered_from_0(tmp_path):
    folder = foreign(tmp_path / "set")
    pyarrow.parquet.write_table(
        pyarrow.table({"task_index": [2, 1], "task": ["open", "fold"]}), folder / "meta/tasks.parquet"
    )
    with pytest.raises(UserError, match=r"meta/tasks.parquet' has task_index \[1, 2\], expected 0 to 1"):
        Demonstrations(folder)


def test_actions_of_one_entry(tmp_path):
    """LeRobot stores features of one entry as plain numbers."""
    folder = foreign(tmp_path / "one")
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["action"]["shape"] = [1]
    (folder / "meta/info.json").write_text(json.dumps(info))
    for file in folder.glob("data/*/*.parquet"):
        table = pyarrow.parquet.read_table(file, partitioning=None)
        at = table.column_names.index("action")
        single = pyarrow.array([row[0] for row in table["action"].to_pylist()], pyarrow.float32())
        pyarrow.parquet.write_table(table.set_column(at, "action", single), file)
    assert Demonstrations(folder).episode(2)["action"].tolist() == [[[28.0]], [[32.0]]]


# ---- errors


@pytest.mark.parametrize("named", ["{outside}/file", "../outside/file", "observation.images.a\0b"])
def test_names_of_features_cannot_lead_out_of_the_folder(tmp_path, named):
    outside, folder = tmp_path / "outside", foreign(tmp_path / "set")
    outside.mkdir()
    named = named.replace("{outside}", str(outside))
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][named] = info["features"].pop("observation.image")
    info["video_path"] = info["video_path"].replace("{video_key}", "observation.image")
    (folder / "meta/info.json").write_text(json.dumps(info))
    for file in folder.glob("meta/episodes/*/*.parquet"):
        table = pyarrow.parquet.read_table(file, partitioning=None)
        names = [name.replace("observation.image", named) for name in table.column_names]
        pyarrow.parquet.write_table(table.rename_columns(names), file)
    with pytest.raises(DatasetError, match="expected a name without a slash"):
        Demonstrations(folder, cache=True)
    assert list(outside.iterdir()) == []


WITH = "; it was recorded with env."
RATE = "; set imitate.fps=resample (for absolute actions) or imitate.fps=ignore"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"cameras": ["head", "left_wrist"]},
            "cameras: expected head, left_wrist, found head, wrist; use env.cameras=[head,wrist]",
        ),
        ({"state_dim": 32}, f"entries of observation.state: expected 32, found 30{WITH}task=[push_d0]"),
        ({"action_dim": 4}, f"entries of an action: expected 4, found 7{WITH}control_mode=delta_qpos"),
        ({"fps": 30}, f"frames/s: expected 30, found 25{RATE}"),
        ({"control_mode": "qpos"}, f"control mode: expected qpos, found delta_qpos{WITH}control_mode=delta_qpos"),
    ],
    ids=lambda value: "",
)
def test_each_mismatch_with_the_config_is_refused(recorded, asked, message):
    with pytest.raises(UserError) as refused:
        Demonstrations(recorded, **asked)
    first, *mistakes = str(refused.value).splitlines()
    assert mistakes == [message] and first.startswith(f"'{recorded}' does not match the config; ")


def test_all_mismatches_are_reported_together(tmp_path):
    with pytest.raises(UserError) as refused:
        Demonstrations(foreign(tmp_path / "theirs"), action_dim=7, fps=25, control_mode="qpos", state_dim=4)
    assert str(refused.value).splitlines()[1:] == [
        "entries of an action: expected 7, found 2",
        f"frames/s: expected 25, found 10{RATE}",
        "control mode: expected qpos, found none",
    ]


def edited(name, edit):
    """A damage: a changed column of a parquet file."""

    def make(folder):
        file = folder / (EPISODES if name == "length" else DATA)
        table = pyarrow.parquet.read_table(file, partitioning=None)
        values = table[name].to_pylist()
        at = table.column_names.index(name)
        column = pyarrow.array(edit(values), table.schema.field(name).type)
        pyarrow.parquet.write_table(table.set_column(at, name, column), file)

    return make


def with_info(**changes):
    """A damage: other entries in meta/info.json."""

    def make(folder):
        info = json.loads((folder / "meta/info.json").read_text())
        (folder / "meta/info.json").write_text(json.dumps({k: v for k, v in (info | changes).items() if v is not None}))

    return make


def cut(name):
    def make(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:200])

    return make


def removed(name):
    return lambda folder: (folder / name).unlink()


def without_column(name):
    def make(folder):
        table = pyarrow.parquet.read_table(folder / DATA, partitioning=None)
        pyarrow.parquet.write_table(table.drop_columns([name]), folder / DATA)

    return make


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def pipe(name):
    """A damage: a pipe, which blocks whoever opens it."""

    def make(folder):
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


NAN = float("nan")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited("action", lambda rows: rows[:9] + [[NAN] * 7] + rows[10:]),
         "action contains NaN or infinity in 1 of 28 frames, first in episode 1, frame 2"),
        (edited("observation.state", lambda rows: [[float("inf")] * 30] + rows[1:]), "observation.state contains NaN"),
        (edited("next.reward", lambda rows: [None] + rows[1:]), "next.reward contains NaN or infinity in 1 of 28"),
        (edited("timestamp", lambda rows: [2 * t for t in rows]), "timestamps differ by up to 0.240 s from 25"),
        (edited("frame_index", lambda rows: rows[::-1]), "the rows are not the frames of the episodes in time order"),
        (edited("task_index", lambda rows: [-1] * 28), "task_index -1 is negative"),
        (edited("task_index", lambda rows: [99] * 28), "task_index 99 is too large: the dataset has "),
        (edited("length", lambda rows: [7, 7, 7, 9]), "has 28 rows of data, but its episodes have 30 frames"),
        (without_column("action"), "file-000.parquet' has no column action; found observation.state, next.reward"),
        (with_info(total_frames=29), "has 28 rows of data, but its episodes have 28 frames and meta/info"),
        (with_info(total_episodes=5), "lists 4 episodes in meta/episodes, but meta/info.json has total_"),
        (with_info(codebase_version="v1.6"), "is a LeRobotDataset v1.6, expected v2.x or v3.0; convert it with "),
        (with_info(fps=None), "info.json' has no fps"),
        (with_info(features={}), "has no feature timestamp, "),
        (cut("meta/info.json"), "meta/info.json' cannot be read ("),
        (cut("meta/stats.json"), "meta/stats.json' cannot be read ("),
        (cut(DATA), "file-000.parquet' cannot be read ("),
        (cut(EPISODES), "meta/episodes/chunk-000/file-000.parquet' cannot be read ("),
        (removed("meta/info.json"), "has no meta/info.json; expected a LeRobotDataset"),
        (removed("meta/tasks.parquet"), "meta/tasks.parquet' cannot be read ("),
        (removed(DATA), "file-000.parquet' cannot be read ("),
        (removed(EPISODES), "has no meta/episodes/chunk-*/file-*.parquet"),
        (removed(HEAD), "file-000.mp4' with images of observation.images.head is missing"),
        (with_info(fps="x"), "has fps 'x', expected frames per second > 0"),
        (with_info(features=[1]), "is damaged or not a LeRobotDataset (AttributeError"),
        (with_info(data_path="../{chunk_index}"), "has data_path '../{chunk_index}', expected a path within"),
        (with_info(data_path="{chunk_index:0999999999d}"), "with the fields {chunk_index}"),
        (with_info(total_frames=[1]), "its episodes have 28 frames and meta/info.json has total_frames [1]"),
        (edited("length", lambda rows: [7, 7, 7, 10**15]), "its episodes have 1000000000000021 frames"),
        (edited("length", lambda rows: [7, 14, -7, 14]), "lists no episode, or one without frames"),
        (written("meta/info.json", "[]"), "it contains a list, expected keys with values"),
        (written("meta/info.json", "[" * 10**5), "meta/info.json' cannot be read ("),
        (written("meta/stats.json", '{"action": {"mean": "x"}}'), "stats.json': action: expected numbers"),
        (written("meta/sparring.json", '{"env": []}'), "meta/sparring.json': env, seed, noise"),
        (pipe("meta/info.json"), "meta/info.json' cannot be read (not a regular file)"),
        (pipe(DATA), "file-000.parquet' cannot be read (not a regular file)"),
        (pipe(HEAD), "images of observation.images.head is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_damaged_dataset_is_refused_when_it_is_opened(without_manifest, damage, message):
    damage(without_manifest)
    with pytest.raises(UserError) as refused:
        Demonstrations(without_manifest)
    assert message in str(refused.value)


def test_a_damaged_video_is_refused_when_it_is_read(without_manifest):
    cut(HEAD)(without_manifest)
    demos = Demonstrations(without_manifest)
    with pytest.raises(DatasetError, match="file-000.mp4': ffmpeg failed .* \\(episode 0, camera head\\)"):
        demos.episode(0)
    with pytest.raises(DatasetError, match="file-000.mp4': ffmpeg failed"):
        Demonstrations(without_manifest, cache=True)
    assert not list(without_manifest.with_name("copy.cache").glob("*.npy"))
    assert Demonstrations(without_manifest, cameras=["wrist"]).episode(0).batch_size == (7,)
    # the file may even be missing
    (without_manifest / HEAD).unlink()
    assert Demonstrations(without_manifest, cameras=["wrist"]).episode(0).batch_size == (7,)


@pytest.mark.parametrize("size", [0, -5, 2.5, "a", True])
def test_an_invalid_image_size_is_refused_before_anything_is_read(size):
    with pytest.raises(ValueError, match=f"image_size={size!r}: expected a whole number >= 1"):
        Demonstrations("nowhere", image_size=size)


def test_a_camera_that_was_not_opened_is_refused(recorded):
    demos = Demonstrations(recorded, cameras=["head"])
    for ask in (demos.image_cache, lambda camera: demos.images(camera, 0)):
        with pytest.raises(DatasetError, match=r"opened with cameras \['head'\], without 'wrist'"):
            ask("wrist")


@pytest.mark.parametrize("left", [0, 40, 5000])
def test_a_truncated_cache_is_rebuilt(copy, left):
    whole = np.array(Demonstrations(copy, cameras=["head"], image_size=16, cache=True).image_cache("head"))
    (file,) = copy.with_name("copy.cache").glob("*.npy")
    os.truncate(file, left)
    again = Demonstrations(copy, cameras=["head"], image_size=16, cache=True)
    assert np.array_equal(again.image_cache("head"), whole)
    # earlier versions stored no checksums after the images
    os.truncate(file, file.stat().st_size - 4 * 4)
    again = Demonstrations(copy, cameras=["head"], image_size=16, cache=True)
    assert np.array_equal(again.image_cache("head"), whole)


# ---- checksums


def flip(file: Path, generator: np.random.Generator) -> None:
    """Flip one bit and keep the size and times of the file."""
    data, before = bytearray(file.read_bytes()), file.stat()
    data[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


FILES = ["meta/info.json", "meta/stats.json", "meta/sparring.json", "meta/tasks.parquet", EPISODES, DATA, HEAD]


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_refused_and_the_file_is_named(copy, name):
    generator, whole = np.random.default_rng(0), (copy / name).read_bytes()
    for _ in range(8):
        flip(copy / name, generator)
        with pytest.raises(DatasetError) as refused:
            Demonstrations(copy).images("head", 0)
        assert f"{name} does not match its checksum; copy it again" in str(refused.value)
        (copy / name).write_bytes(whole)
    Demonstrations(copy).images("head", 0)


def test_a_flipped_bit_in_the_manifest_changes_nothing_or_is_refused(copy):
    whole, expected = (copy / "manifest.json").read_bytes(), Demonstrations(copy).numbers("action")
    generator, refused = np.random.default_rng(1), 0
    for _ in range(40):
        flip(copy / "manifest.json", generator)
        try:
            assert np.array_equal(Demonstrations(copy).numbers("action"), expected)
        except UserError as error:
            refused += "manifest.json" in str(error)
        (copy / "manifest.json").write_bytes(whole)
    assert refused > 20


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (removed("meta/stats.json"), "meta/stats.json is missing"),
        (removed("meta/sparring.json"), "meta/sparring.json is missing"),
        (cut(EPISODES), "file-000.parquet has 200 bytes, expected"),
        (pipe(DATA), "file-000.parquet is not a regular file"),
        (lambda folder: shutil.copy(folder / EPISODES, (folder / EPISODES).with_name("file-001.parquet")),
         "meta/episodes/chunk-000/file-001.parquet is not in manifest.json"),
        (lambda folder: shutil.copy(folder / HEAD.replace("head", "wrist"), folder / HEAD), "file-000.mp4 has "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_files_that_differ_from_the_manifest_are_refused(copy, damage, message):
    damage(copy)
    with pytest.raises(DatasetError, match=message):
        Demonstrations(copy, cache=True)


def test_videos_of_unused_cameras_are_not_read(copy):
    flip(copy / HEAD, np.random.default_rng(2))
    assert Demonstrations(copy, cameras=["wrist"]).episode(0).batch_size == (7,)


def test_a_flipped_bit_in_the_cache_is_reported_and_repaired(copy, monkeypatch):
    warnings, generator = [], np.random.default_rng(3)
    monkeypatch.setattr(image_cache.log, "warning", lambda text, *values: warnings.append(text % values))
    whole = np.array(Demonstrations(copy, cameras=["head"], image_size=16, cache=True).image_cache("head"))
    (file,) = copy.with_name("copy.cache").glob("*.npy")
    for _ in range(6):
        flip(file, generator)
        again = Demonstrations(copy, cameras=["head"], image_size=16, cache=True)
        assert np.array_equal(again.image_cache("head"), whole)
    assert len(warnings) == 6 and "its frames are decoded again" in warnings[0]


def test_the_cache_of_another_camera_is_not_used(copy):
    whole = np.array(Demonstrations(copy, image_size=16, cache=True).image_cache("head"))
    head, wrist = sorted(copy.with_name("copy.cache").glob("*.npy"))
    shutil.copy(wrist, head)
    assert np.array_equal(Demonstrations(copy, image_size=16, cache=True).image_cache("head"), whole)


def test_a_cache_that_cannot_be_written_is_reported(copy):
    copy.with_name("copy.cache").write_text("")
    with pytest.raises(DatasetError, match="cannot store decoded images"):
        Demonstrations(copy, cameras=["head"], cache=True)
