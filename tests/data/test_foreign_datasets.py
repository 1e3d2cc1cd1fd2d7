"""Datasets of other programs: LeRobot v2.1, robomimic; their keys, rates, units and images; and damaged ones."""

import io
import json
import struct
import zlib
from dataclasses import replace

import h5py
import numpy as np
import pyarrow.parquet
import pytest
import torch
from foreign_datasets import TASKS, ReachEnv, episodes, grey, lerobot_v21, robomimic
from PIL import Image

from sparring.data.chunks import ActionChunks
from sparring.data.dataset import DatasetError, read_dataset
from sparring.data.demonstrations import Demonstrations
from sparring.data.mapping import KeyMap
from sparring.envs.configs import GymConfig
from sparring.envs.env import make_env
from sparring.errors import UserError

EPISODES = episodes(5)
ACTIONS = np.concatenate([episode["action"] for episode in EPISODES])
LENGTHS = [len(episode["action"]) for episode in EPISODES]
BOTH = {"observation.state": "state", "observation.environment_state": "state"}


@pytest.fixture(scope="module")
def v21(tmp_path_factory):
    return lerobot_v21(tmp_path_factory.mktemp("lerobot") / "set", EPISODES)


@pytest.fixture(scope="module")
def hdf5(tmp_path_factory):
    recorded = episodes(12)
    return robomimic(tmp_path_factory.mktemp("robomimic") / "demo.hdf5", recorded, language=True, valid=(1, 10))


def spec_of(**kwargs):
    env = make_env(GymConfig(name="foreign_datasets:ReachEnv", kwargs=kwargs), 1)
    env.close()
    return env.spec


# ---- formats


def test_lerobot_v21_is_read_exactly(v21):
    demos = Demonstrations(v21)
    assert demos.dataset.kind == "LeRobotDataset v2.1" and demos.lengths.tolist() == LENGTHS and demos.fps == 20
    np.testing.assert_array_equal(demos.numbers("action"), ACTIONS)
    assert [demos.instruction(number) for number in range(5)] == [TASKS[number % 3] for number in range(5)]
    assert demos.recorded_shapes == {"top": (48, 80)} and demos.action_names == ["x", "y"]
    for number in (0, 3):
        images = demos.images("top", number)
        expected = [grey(goal[0]) for goal in EPISODES[number]["goal"]]
        assert images.shape == (LENGTHS[number], 3, 48, 80)
        # the video is lossy
        np.testing.assert_allclose(images.mean((1, 2, 3)), expected, atol=2)
    np.testing.assert_allclose(demos.statistics["action"]["mean"], ACTIONS.mean(0), rtol=1e-5)


def test_images_inside_tables_are_exact_and_names_may_be_others(tmp_path):
    """As in the datasets of openpi: keys `state`, `actions`, `wrist_image`."""
    names = {"position": "state", "action": "actions", "camera": "wrist_image"}
    demos = Demonstrations(lerobot_v21(tmp_path / "set", EPISODES, names=names, embedded=True), cache=True)
    assert demos.cameras == ("wrist_image",) and demos.mapping.roles["actions"] == "action"
    assert demos.mapping.keys("state") == ["observation.environment_state", "state"]
    for number, episode in enumerate(EPISODES):
        greys = np.array([grey(goal[0]) for goal in episode["goal"]])
        np.testing.assert_array_equal(demos.images("wrist_image", number), np.broadcast_to(
            greys[:, None, None, None], (len(greys), 3, 48, 80)))  # fmt: skip


def test_robomimic_is_read_in_the_order_of_the_numbers(hdf5):
    recorded, demos = episodes(12), Demonstrations(hdf5)
    assert demos.fps == 20 and len(demos) == 12
    np.testing.assert_array_equal(demos.numbers("action"), np.concatenate([e["action"] for e in recorded]))
    # all vectors are the state, in the order of their names
    expected = [np.concatenate([e[name] for e in recorded]) for name in ("position", "goal")]
    np.testing.assert_array_equal(demos.numbers("observation.state"), np.concatenate(expected, axis=1))
    assert [demos.instruction(number) for number in (0, 1, 10)] == [TASKS[0], TASKS[1], TASKS[1]]
    np.testing.assert_array_equal(demos.images("view_image", 10)[0], grey(recorded[10]["goal"][0, 0]))
    after = demos.episode(10)["next"]
    assert after["done"].tolist() == [False] * (len(after) - 1) + [True] and after["reward"][-1].item() == 1
    use = dict(demos.mapping.describe())
    assert use["obs/view_depth"].endswith("is no vector, point cloud or uint8 image")
    assert use["states"] == "not used: not an observation, action or reward"
    assert use["obs/goal"] == "float64 [2] -> state[2:4]"


def test_the_split_of_a_robomimic_file_is_used(hdf5):
    training, held_out = Demonstrations(hdf5).split(0.5)
    assert held_out.numbers_of_episodes.tolist() == [1, 10]
    assert training.numbers_of_episodes.tolist() == [0, *range(2, 10), 11]
    whole = Demonstrations(hdf5)
    for number, own in enumerate((1, 10)):
        assert (held_out.episode(number) == whole.episode(own)).all()


def test_held_out_episodes_cover_a_dataset_that_is_sorted_by_task(v21):
    training, held_out = Demonstrations(v21).split(0.4)
    assert held_out.numbers_of_episodes.tolist() == [1, 3] and training.numbers_of_episodes.tolist() == [0, 2, 4]
    _, few = Demonstrations(v21).split(0.01)
    assert few.numbers_of_episodes.tolist() == [2]
    with pytest.raises(DatasetError, match="has 1 episode, and 1 would be held out; record more"):
        Demonstrations(v21).select(np.array([0])).split(0.1)


@pytest.mark.parametrize("language", ["ep_meta", "problem_info", None])
def test_instructions_of_hdf5_files(tmp_path, language):
    file = robomimic(tmp_path / "x.hdf5", EPISODES[:2], language=language == "ep_meta", control_freq=None)
    if language == "problem_info":
        with h5py.File(file, "a") as opened:
            opened["data"].attrs["problem_info"] = json.dumps({"language_instruction": "close it"})
    demos = Demonstrations(file)
    expected = {"ep_meta": TASKS[1], "problem_info": "close it", None: ""}
    assert demos.instruction(1) == expected[language] and demos.fps is None
    assert demos.mapping.keys("instruction") == (["task"] if language else [])


# ---- keys


def test_state_entries_with_the_names_of_the_env_are_joined_in_its_order(hdf5):
    mapping = KeyMap(read_dataset(hdf5), {}, spec_of(image=True))
    assert mapping.keys("state") == ["obs/agent_pos", "obs/goal"]
    # view_image and view are the same name
    assert mapping.cameras == {"view": "obs/view_image"} and mapping.keys("instruction") == []
    assert "the env does not observe it" in dict(mapping.describe())["task"]


def test_an_ambiguous_state_is_refused_with_the_setting(v21):
    with pytest.raises(DatasetError) as refused:
        Demonstrations(v21, spec=spec_of(), state_dim=4)
    expected = "expected 4, found 2; vectors: observation.state [2], observation.environment_state [2]; set "
    assert expected + "imitate.keys={observation.state: state, observation.environment_state: state}" in str(
        refused.value
    )
    demos = Demonstrations(v21, keys=BOTH, spec=spec_of(), state_dim=4)
    joined = np.concatenate([EPISODES[2]["position"], EPISODES[2]["goal"]], axis=1)
    np.testing.assert_array_equal(demos.episode(2)["observation", "state"], joined)


def test_the_only_camera_left_is_taken_and_several_are_refused(v21, tmp_path):
    spec = spec_of(image=True)
    assert KeyMap(read_dataset(v21), BOTH, spec).cameras == {"view": "observation.images.top"}
    file = robomimic(tmp_path / "x.hdf5", EPISODES[:2])
    with h5py.File(file, "a") as opened:
        for demo in opened["data"].values():
            demo.move("obs/view_image", "obs/left")
            demo["obs/right"] = demo["obs/left"][:]
    with pytest.raises(DatasetError, match=r"expected view, found .*; set imitate.keys=\{obs/left: image/view\}"):
        Demonstrations(file, ["view"], spec=spec)
    demos = Demonstrations(file, ["view"], keys={"obs/right": "image/view"}, spec=spec)
    assert demos.mapping.cameras == {"view": "obs/right"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"nothing": "state"}, "has no such key; it has observation.images.top, observation.state"),
        ({"action": "wheel"}, "expected image/NAME, state, points, privileged, instruction, action or ignore"),
        ({"action": "image/head"}, r"has float64 \[2\] there; expected images"),
        ({"observation.images.top": "state"}, "has images 48 x 80 there; expected vectors"),
        ({"observation.state": "instruction"}, "there; expected texts"),
        ({"observation.state": "points"}, "there; expected point clouds"),
        ({"action": "ignore"}, "has no key action or actions; set imitate.keys={KEY: action} with one of obs"),
    ],
)
def test_impossible_roles_are_refused(v21, keys, message):
    with pytest.raises(DatasetError, match=message):
        Demonstrations(v21, keys=keys)


def test_two_cameras_cannot_have_one_role(tmp_path):
    file = robomimic(tmp_path / "x.hdf5", EPISODES[:2])
    with h5py.File(file, "a") as opened:
        for demo in opened["data"].values():
            demo["obs/other"] = demo["obs/view_image"][:]
    keys = {"obs/other": "image/a", "obs/view_image": "image/a"}
    with pytest.raises(DatasetError, match="obs/other and obs/view_image have the same role image/a; keep one"):
        Demonstrations(file, keys=keys)


def test_point_clouds_and_texts_of_steps(tmp_path):
    file = robomimic(tmp_path / "x.hdf5", EPISODES[:2])
    clouds = [np.random.default_rng(n).normal(size=(len(e["action"]), 7, 3)) for n, e in enumerate(EPISODES[:2])]
    with h5py.File(file, "a") as opened:
        for number, cloud in enumerate(clouds):
            opened[f"data/demo_{number}/obs/cloud"] = cloud
    demos = Demonstrations(file, points=5)
    np.testing.assert_allclose(demos.episode(1)["observation", "points"], clouds[1][:, :5], rtol=1e-6)
    assert dict(demos.mapping.describe())["obs/cloud"] == "float64 [7, 3] -> points"


def test_a_text_column_can_be_the_instruction(tmp_path):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:2])
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["language"] = {"dtype": "string", "shape": [1], "names": None}
    (folder / "meta/info.json").write_text(json.dumps(info))
    for number, file in enumerate(sorted(folder.glob("data/*/*.parquet"))):
        table = pyarrow.parquet.read_table(file, partitioning=None)
        words = [f"words {number} {t // 2}" for t in range(len(table))]
        pyarrow.parquet.write_table(table.append_column("language", pyarrow.array(words)), file)
    demos = Demonstrations(folder, keys={"language": "instruction"})
    chunks = ActionChunks([demos], 1, spec_with_text())
    rows = chunks.observation(torch.tensor([0, 2, LENGTHS[0]]))["instruction"]
    shown = [bytes(row.numpy()).rstrip(b"\0").decode() for row in rows]
    assert shown == ["words 0 0", "words 0 1", "words 1 0"]


def spec_with_text():
    spec = spec_of(text=True)
    return replace(spec, observation={"instruction": spec.observation["instruction"]})


# ---- rates and units


@pytest.mark.parametrize(
    ("fps", "expected"),
    [(10, [0, 2, 4, 6]), (20, [0, 1, 2, 3, 4, 5, 6]), (40, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]), (8, [0, 2, 5])],
)
def test_resampling_takes_the_step_that_was_current(tmp_path, fps, expected):
    seven = {name: values[:7] for name, values in next(e for e in EPISODES if len(e["action"]) >= 7).items()}
    folder = lerobot_v21(tmp_path / "set", [seven, seven])
    demos = Demonstrations(folder, fps=fps, resample=True, cache=True)
    np.testing.assert_array_equal(demos.episode(1)["action"][:, 0], seven["action"][expected])
    assert demos.lengths.tolist() == [len(expected)] * 2 and demos.fps == fps
    greys = [grey(seven["goal"][t, 0]) for t in expected]
    np.testing.assert_allclose(demos.images("top", 1).mean((1, 2, 3)), greys, atol=2)
    changed = f"steps are resampled from 20 to {fps} per second: {2 * len(expected)} steps"
    assert any(changed in line for line in demos.report()) == (fps != 20)


def test_another_rate_is_refused_unless_it_is_unknown(v21, tmp_path):
    with pytest.raises(DatasetError, match="frames/s: expected 25, found 20; set imitate.fps=resample"):
        Demonstrations(v21, fps=25)
    file = robomimic(tmp_path / "x.hdf5", EPISODES[:2], control_freq=None)
    assert "steps/s unknown" in next(iter(Demonstrations(file, fps=25).report()))


def test_actions_of_an_env_become_those_of_the_contract(v21):
    """The env's 0, 5 and 10 are -1, 0 and 1."""
    demos = Demonstrations(v21, keys=BOTH, spec=spec_of())
    np.testing.assert_allclose(demos.numbers("action"), ACTIONS / 5 - 1, atol=1e-6)
    assert demos.warnings == []
    np.testing.assert_allclose(demos.statistics["action"]["max"], (ACTIONS / 5 - 1).max(0), atol=1e-6)


def test_actions_that_the_env_clips_are_reported(v21):
    demos = Demonstrations(v21, keys=BOTH, spec=spec_of(scale=5.0))
    share = (ACTIONS[:, 0] > 5.005).mean()
    expected = f"action[0] is {ACTIONS[:, 0].min():.3g} to {ACTIONS[:, 0].max():.3g}, the env accepts 0 to 5: it clips "
    assert f"{v21}: {expected}{share:.1%} of the steps" in demos.warnings


def test_actions_of_a_discrete_env_are_its_choices(tmp_path):
    spec = make_env(GymConfig(name="gym:CartPole-v1"), 1).spec
    file = robomimic(tmp_path / "x.hdf5", EPISODES[:2])
    with pytest.raises(DatasetError, match="the env has the choices 0 to 1"):
        Demonstrations(file, spec=spec)


def test_images_of_another_shape_are_scaled_and_the_report_says_it(v21):
    demos = Demonstrations(v21, ["top"], {"top": (24, 24)}, cache=True)
    assert demos.image_cache("top").shape == (sum(LENGTHS), 3, 24, 24)
    line = "image/top is scaled from 48 x 80 to 24 x 24, which changes the aspect ratio by 67%"
    assert any(line in text for text in demos.report())


# ---- damage


def without(name):
    return lambda path: (path / name).unlink()


def written(name, text):
    return lambda path: (path / name).write_text(text)


V21_VIDEO = "videos/chunk-001/observation.images.top/episode_000002.mp4"
V21_DATA = "data/chunk-000/episode_000001.parquet"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("meta/episodes.jsonl"), "meta/episodes.jsonl' cannot be read"),
        (without("meta/tasks.jsonl"), "meta/tasks.jsonl' cannot be read"),
        (without(V21_DATA), "episode_000001.parquet' cannot be read"),
        (without(V21_VIDEO), "with images of observation.images.top is missing"),
        (written("meta/episodes.jsonl", "{"), "meta/episodes.jsonl' cannot be read"),
        (written("meta/episodes.jsonl", "[1]\n"), "it contains a list, expected keys with values"),
        (written("meta/episodes.jsonl", '{"episode_index": 1, "length": 3}\n'), "expected each of the episodes 0 to 0"),
        (written("meta/episodes.jsonl", '{"length": 3}\n'), "is damaged or not a LeRobotDataset"),
        (written("meta/episodes.jsonl", ""), "lists no episode"),
        (written("meta/tasks.jsonl", '{"task_index": 4, "task": "x"}\n'), r"has task_index \[4\], expected 0 to 0"),
        (written("meta/tasks.jsonl", '{"task_index": 0, "task": "x"}\n'), "task_index 2 is too large"),
        (written(V21_DATA, "x"), "episode_000001.parquet' cannot be read"),
    ],
)  # fmt: skip
def test_a_damaged_v21_dataset_is_refused(tmp_path, damage, message):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:3])
    damage(folder)
    with pytest.raises(UserError, match=message) as refused:
        Demonstrations(folder)
    assert "\n" not in str(refused.value)


def test_a_damaged_image_in_a_table_is_refused(tmp_path):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:2], embedded=True)
    file = folder / V21_DATA
    table = pyarrow.parquet.read_table(file.with_name("episode_000000.parquet"), partitioning=None)
    at = table.column_names.index("observation.images.top")
    rows = table["observation.images.top"].to_pylist()
    rows[3] = {"bytes": rows[3]["bytes"][:40], "path": None}
    changed = table.set_column(at, "observation.images.top", pyarrow.array(rows))
    pyarrow.parquet.write_table(changed, file.with_name("episode_000000.parquet"))
    with pytest.raises(DatasetError, match="image 3 of observation.images.top in episode 0 cannot be decoded"):
        Demonstrations(folder, cache=True)


def edited(edit):
    def make(path):
        with h5py.File(path, "a") as file:
            edit(file)

    return make


def cut(path):
    path.write_bytes(path.read_bytes()[:3000])


def replaced(name, values):
    def edit(file):
        del file[name]
        file[name] = values

    return edited(edit)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is damaged or no HDF5 file of robomimic"),
        (lambda path: path.write_bytes(b""), "is damaged or no HDF5 file of robomimic"),
        (edited(lambda file: file.pop("data")), "has no episodes data/demo_<i>"),
        (edited(lambda file: file["data/demo_0"].pop("obs")), "has no observations .obs.; add them with dataset"),
        (edited(lambda file: file["data/demo_1"].pop("actions")), "demo_1 has no array 'actions'"),
        (edited(lambda file: file["data/demo_1/obs"].pop("goal")), "demo_1 has no array 'obs/goal'"),
        (edited(lambda file: file["data/demo_1/obs"].pop("view_image")), "demo_1 has no array 'obs/view_image'"),
        (replaced("data/demo_1/obs/goal", np.zeros((1, 2))), "demo_1/obs/goal has 1 rows, its actions have "),
        (replaced("data/demo_1/obs/goal", np.zeros((LENGTHS[1], 4))), r"demo_1/obs/goal has rows of \(4,\), demo_0 of"),
        (replaced("data/demo_1/actions", np.zeros((0, 2))), "demo_1 has no steps"),
        (replaced("data/demo_0/actions", np.full((LENGTHS[0], 2), np.nan)), "actions contains NaN or infinity in "),
        (edited(lambda file: file["data"].attrs.__setitem__("env_args", "{")), "the attribute env_args cannot be read"),
        (replaced("mask/valid", np.array(["demo_9"], "S8")), "mask/valid names demo_9; expected episodes"),
    ],
)  # fmt: skip
def test_a_damaged_hdf5_file_is_refused(tmp_path, damage, message):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:3], valid=(2,))
    damage(file)
    with pytest.raises(DatasetError, match=message) as refused:
        Demonstrations(file)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_no_dataset_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DatasetError, match="x.txt' is no dataset; expected the folder of a LeRobotDataset, or an HDF5"):
        Demonstrations(tmp_path / "x.txt")
    with pytest.raises(DatasetError, match="is not a folder"):
        Demonstrations(tmp_path / "nothing.hdf5")


def test_h5py_is_needed_only_for_hdf5(v21, hdf5, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    assert len(Demonstrations(v21)) == 5
    with pytest.raises(
        UserError, match=r'HDF5 files need h5py, which is not installed: pip install "sparring\[demos\]"'
    ):
        Demonstrations(hdf5)


def test_the_env_takes_what_the_expert_does():
    """The double: its demonstrations succeed."""
    assert all(episode["reward"][-1] == 1 for episode in episodes(12))
    assert isinstance(ReachEnv(text=True).reset(seed=0)[0]["words"], str)


# ---- content that is misleading or unsafe


def test_our_cameras_are_matched_by_their_exact_names_only(v21):
    """Ours with other names show something else; those of other programs are matched more loosely."""
    foreign, spec = read_dataset(v21), spec_of(image=True)
    own = replace(foreign, extras={"control_mode": None, "env": {}})
    assert KeyMap(foreign, BOTH, spec).cameras == {"view": "observation.images.top"}
    assert KeyMap(own, BOTH, spec).cameras == {}
    with pytest.raises(DatasetError, match=r"cameras: expected view, found none|cameras: expected view, found"):
        Demonstrations(own, ["view"], keys=BOTH, spec=spec)
    similar = {"observation.images.view_image": foreign.cameras["observation.images.top"]}
    assert KeyMap(replace(own, cameras=similar), BOTH, spec).cameras == {}
    assert KeyMap(replace(foreign, cameras=similar), BOTH, spec).cameras == {"view": "observation.images.view_image"}


def changed_info(folder, change):
    info = json.loads((folder / "meta/info.json").read_text())
    change(info)
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def with_image(folder, content):
    """The first image of the first table is replaced."""
    file = folder / "data/chunk-000/episode_000000.parquet"
    table = pyarrow.parquet.read_table(file, partitioning=None)
    at = table.column_names.index("observation.images.top")
    rows = table["observation.images.top"].to_pylist()
    rows[0] = {"bytes": content, "path": None}
    pyarrow.parquet.write_table(table.set_column(at, "observation.images.top", pyarrow.array(rows)), file)


def encoded(mode, kind, size=(80, 48)):
    file = io.BytesIO()
    Image.new(mode, size).save(file, kind)
    return file.getvalue()


def png_of(width, height, *parts):
    """`parts`: what follows the header."""
    parts = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), *parts)
    chunks = [struct.pack(">I", len(part) - 4) + part + struct.pack(">I", zlib.crc32(part)) for part in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (encoded("RGB", "eps"), "cannot identify image file"),
        (encoded("RGB", "bmp"), "cannot identify image file"),
        (encoded("I;16", "png"), "its mode is I;16, expected 8-bit colours"),
        (png_of(60_000, 60_000, b"IDAT" + zlib.compress(bytes(9))), "decompression bomb"),
        (png_of(80, 48, b"IDAT" + zlib.compress(bytes(48 * 241))[:20], b"ID\0T"), "broken PNG file"),
    ],
    ids=["eps", "bmp", "16-bit", "bomb", "damaged"],
)
def test_images_in_tables_are_png_or_jpeg_of_8_bits(tmp_path, content, why):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:1], embedded=True)
    with_image(folder, content)
    with pytest.raises(DatasetError, match=f"image 0 of observation.images.top in episode 0 cannot be decoded .*{why}"):
        Demonstrations(folder).images("top", 0)


@pytest.mark.parametrize("name", ["..", ".", "a/b", "a\nb", "\ud800"])
def test_names_of_features_cannot_leave_the_folder(tmp_path, name):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:1])
    changed_info(folder, lambda info: info["features"].update({name: info["features"]["action"]}))
    with pytest.raises(DatasetError, match="expected a name without a slash"):
        read_dataset(folder)


@pytest.mark.parametrize("shape", [[48, 80, 1], [1, 48, 80]])
def test_images_without_colours_are_not_used(tmp_path, shape):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:2])
    changed_info(folder, lambda info: info["features"]["observation.images.top"].update(shape=shape))
    dataset = read_dataset(folder)
    assert dataset.cameras == {} and "without colours" in dataset.unused["observation.images.top"]


def test_a_depth_video_is_not_used(tmp_path):
    folder, depth = lerobot_v21(tmp_path / "set", EPISODES[:2]), {"info": {"video.is_depth_map": True}}
    changed_info(folder, lambda info: info["features"]["observation.images.top"].update(depth))
    assert read_dataset(folder).cameras == {}


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_the_split_of_a_lerobot_dataset_is_used(tmp_path, name):
    folder = changed_info(
        lerobot_v21(tmp_path / "set", EPISODES), lambda info: info.update(splits={"train": "0:3", name: "3:5"})
    )
    training, held_out = Demonstrations(folder).split(0.2)
    assert (training.numbers_of_episodes.tolist(), held_out.numbers_of_episodes.tolist()) == ([0, 1, 2], [3, 4])
    for wrong in ("3:9", "4:3", "all", 3):
        changed_info(folder, lambda info, wrong=wrong: info["splits"].update({name: wrong}))
        with pytest.raises(DatasetError, match=f"has splits.{name} .*, expected FIRST:END within 0:5"):
            read_dataset(folder)


@pytest.mark.parametrize("text", [None, "\ud800", 3])
def test_an_instruction_must_be_text(tmp_path, text):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:2])
    lines = [{"task_index": 0, "task": text}, {"task_index": 1, "task": "x"}]
    (folder / "meta/tasks.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(DatasetError, match="task contains .*, expected text"):
        read_dataset(folder)


def test_a_task_may_contain_a_line_separator(tmp_path):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:1], words=("x",))
    (folder / "meta/tasks.jsonl").write_text('{"task_index": 0, "task": "a\u2028b"}\n', encoding="utf-8")
    assert Demonstrations(folder).instruction(0) == "a\u2028b"


def outside(kind):
    """The array obs/goal of demo_0 is in another file."""

    def damage(path):
        other = path.with_name("other.hdf5")
        with h5py.File(other, "w") as file:
            file["x"] = np.zeros((LENGTHS[0], 2))
            file["obs/goal"] = np.zeros((LENGTHS[0], 2))
        path.with_name("raw").write_bytes(bytes(LENGTHS[0] * 16))
        with h5py.File(path, "a") as file:
            demo = file["data/demo_0"]
            if kind == "group":
                del demo["obs"]
                demo["obs"] = h5py.ExternalLink(str(other), "/obs")
                return
            if kind == "demo":
                file["data/demo_3"] = h5py.ExternalLink(str(other), "/obs")
                return
            del demo["obs/goal"]
            if kind == "link":
                demo["obs/goal"] = h5py.ExternalLink(str(other), "/x")
            elif kind == "virtual":
                layout = h5py.VirtualLayout((LENGTHS[0], 2), "f8")
                layout[:] = h5py.VirtualSource(str(other), "x", (LENGTHS[0], 2))
                demo.create_virtual_dataset("obs/goal", layout)
            else:
                external = [(str(path.with_name("raw")), 0, LENGTHS[0] * 16)]
                demo.create_dataset("obs/goal", (LENGTHS[0], 2), "f8", external=external)

    return damage


@pytest.mark.parametrize("kind", ["link", "group", "demo", "virtual", "external"])
def test_an_hdf5_file_cannot_refer_to_other_files(tmp_path, kind):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:3])
    outside(kind)(file)
    what = "is stored in other files" if kind in ("virtual", "external") else "is a link"
    with pytest.raises(DatasetError, match=f"{what}; copy its content into the file"):
        Demonstrations(file)


@pytest.mark.parametrize("rate", [float("inf"), -1, 0, 10**400])
def test_a_rate_must_be_a_number_of_steps(tmp_path, rate):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:2], control_freq=rate)
    with pytest.raises(DatasetError, match="has control_freq .*, expected steps per second > 0"):
        read_dataset(file)


def test_an_array_larger_than_any_memory_is_refused(tmp_path):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:1])
    with h5py.File(file, "a") as opened:
        shape = (LENGTHS[0], 10**13)
        opened.create_dataset("data/demo_0/obs/vast", shape, "f8", chunks=(1, 1000))
    with pytest.raises(DatasetError, match="is damaged or no HDF5 file"):
        read_dataset(file)


def test_settings_of_the_env_are_not_names_of_entries(tmp_path):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:1])
    with h5py.File(file, "a") as opened:
        opened["data"].attrs["env_args"] = json.dumps({"features": [1]})
    assert Demonstrations(file).action_names == []


def test_groups_and_scalars_among_observations_are_not_used(tmp_path):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:2])
    with h5py.File(file, "a") as opened:
        opened["data/demo_0/obs/group/x"] = np.zeros(3)
        opened["data/demo_0/obs/scalar"] = 1.0
    demos = Demonstrations(file)
    assert {demos.dataset.unused[f"obs/{name}"] for name in ("group", "scalar")} == {"not an array of steps"}


def test_chunks_of_actions_are_no_point_cloud(tmp_path):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:1])
    replaced("data/demo_0/actions", np.zeros((LENGTHS[0], 10, 6)))(file)
    with pytest.raises(DatasetError, match="has no key action or actions; set imitate.keys"):
        Demonstrations(file)


def test_a_mask_may_name_an_episode_twice(tmp_path):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:3], valid=(1, 1))
    assert Demonstrations(file).split(0.1)[1].numbers_of_episodes.tolist() == [1]


def test_nan_in_a_key_that_is_not_used_is_accepted(tmp_path):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:1])
    replaced("data/demo_0/obs/goal", np.full((LENGTHS[0], 2), np.nan))(file)
    assert Demonstrations(file, keys={"obs/goal": "ignore"}).state_dim == 2
    with pytest.raises(DatasetError, match="obs/goal contains NaN or infinity"):
        Demonstrations(file)


def test_an_unknown_rate_cannot_be_resampled(tmp_path):
    file = robomimic(tmp_path / "demo.hdf5", EPISODES[:2], control_freq=None)
    with pytest.raises(DatasetError, match="states no rate: its steps cannot be resampled to 10 per second"):
        Demonstrations(file, fps=10, resample=True)


def test_equal_names_of_joined_actions_get_their_key(tmp_path):
    folder = lerobot_v21(tmp_path / "set", EPISODES[:2], names={"goal": "left"})
    demos = Demonstrations(folder, keys={"left": "action", "action": "action"})
    assert demos.action_names == ["left.x", "left.y", "action.x", "action.y"]
    assert Demonstrations(folder).action_names == ["x", "y"]


def test_episodes_can_be_selected_in_another_order(v21):
    order = np.array([4, 2, 0, 1, 3])
    chosen = Demonstrations(v21).select(order)
    expected = np.concatenate([EPISODES[number]["action"] for number in order])
    np.testing.assert_array_equal(chosen.numbers("action"), expected)
    np.testing.assert_array_equal(chosen.episode(1)["action"][:, 0], EPISODES[2]["action"])
