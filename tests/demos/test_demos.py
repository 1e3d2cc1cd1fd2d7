"""Recording of demonstrations: the dataset has the played episodes and does not depend on how it was recorded."""

import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparring.cli.main import main
from sparring.data.demonstrations import Demonstrations
from sparring.demos import assemble, plan
from sparring.demos import record as record_module
from sparring.demos.expert_env import make_expert_env
from sparring.demos.plan import Plan
from sparring.demos.record import record
from sparring.envs.backend import EpisodeSeeds
from sparring.envs.configs import TabletopConfig
from sparring.envs.tabletop.backend import Tabletop
from sparring.errors import UserError
from sparring.processes import manifest

ENV = TabletopConfig(
    task="lift_d0", cameras=("head", "wrist"), image_size=32, object_state="privileged", threads=1
)  # fmt: skip
# too short to succeed
SHORT = Plan(ENV, max_episode_steps=9, seed=3, noise=0.2, keep_failures=True)


def digests(folder: Path) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def psnr(one: np.ndarray, other: np.ndarray) -> float:
    return 10 * np.log10(255**2 / np.mean((one.astype(float) - other.astype(float)) ** 2))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A dataset of six episodes of nine steps."""
    output = tmp_path_factory.mktemp("demos") / "short"
    record(SHORT, 6, output, quiet=True)
    return output


def test_a_dataset_has_the_documented_files_and_features(short):
    place = "chunk-000/file-000"
    assert set(digests(short)) == {
        "manifest.json",
        "meta/info.json",
        "meta/stats.json",
        "meta/sparring.json",
        "meta/tasks.parquet",
        f"meta/episodes/{place}.parquet",
        f"data/{place}.parquet",
        f"videos/observation.images.head/{place}.mp4",
        f"videos/observation.images.wrist/{place}.mp4",
    }
    info = json.loads((short / "meta/info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["total_episodes"], info["total_frames"]) == ("v3.0", 25, 6, 54)
    assert info["features"]["observation.images.head"]["shape"] == [32, 32, 3]
    assert info["features"]["observation.images.head"]["info"]["video.codec"] == "h264"
    assert info["features"]["action"]["names"][-1] == "finger_step"
    assert info["features"]["observation.state"]["names"][:2] == ["joints.0", "joints.1"]
    assert info["features"]["next.success"] == {"dtype": "bool", "shape": [1], "names": None}
    bound = manifest.read_manifest(short)
    assert bound["kind"] == "dataset" and manifest.is_signed(bound)
    assert {name: each["sha256"] for name, each in bound["files"].items()} | {
        "manifest.json": digests(short)["manifest.json"]
    } == digests(short)


def test_replaying_the_actions_gives_the_same_numbers_and_similar_images(short):
    """One robot, from the recorded seed: a recording does not depend on the number of robots."""
    demos, about = Demonstrations(short), json.loads((short / "meta/sparring.json").read_text())
    env = Tabletop(ENV, 1, 9)
    for episode, number in enumerate(about["episode_numbers"]):
        seeds = EpisodeSeeds(about["seed"], first_env=number, total_envs=1)
        assert about["episode_seeds"][episode] == seeds(0, 0)
        observation, td = env.reset(seeds), demos.episode(episode)
        assert demos.instruction(episode) == env.spec.instructions[observation["task"][0]]
        for t in range(9):
            assert np.array_equal(td["observation", "state"][t], observation["state"][0])
            assert np.array_equal(td["observation", "privileged"][t], observation["privileged"][0])
            for camera in ("head", "wrist"):
                assert psnr(td["observation", "image", camera][t].numpy(), observation[f"image/{camera}"][0]) > 26
            step = env.step(td["action"][t].numpy()[None])
            assert td["next", "reward"][t, 0] == step.reward[0, 0]
            observation = step.observation


def test_full_colour_is_sharper(short, tmp_path):
    record(replace(SHORT, pixel_format="yuv420p"), 6, tmp_path / "halved", quiet=True)
    env = Tabletop(ENV, 6, 9)
    first = env.reset(EpisodeSeeds(3, total_envs=6))["image/head"]
    halved, full = (
        np.stack([Demonstrations(path).images("head", episode)[0] for episode in range(6)])
        for path in (tmp_path / "halved", short)
    )
    assert psnr(full, first) > 38 > psnr(halved, first) + 4


def test_noise_is_in_the_actions_and_differs_between_episodes(short, tmp_path):
    record(replace(SHORT, noise=0.0), 6, tmp_path / "calm", quiet=True)
    noisy, calm = Demonstrations(short).numbers("action"), Demonstrations(tmp_path / "calm").numbers("action")
    first = (noisy - calm).reshape(6, 9, -1)[:, 0]
    inside = np.abs(noisy.reshape(6, 9, -1)[:, 0]) < 1
    assert 0.1 < first[inside].std() < 0.3
    assert len(np.unique(first[:, 0])) == 6


def test_the_dataset_does_not_depend_on_workers_and_robots(short, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "_ROBOTS", 2)
    env = SHORT.make_env(1)
    assert SHORT.robots(env.spec) == 2
    record(SHORT, 6, tmp_path / "pairs", quiet=True)
    assert digests(tmp_path / "pairs") == digests(short)
    monkeypatch.undo()
    record(SHORT, 6, tmp_path / "processes", workers=2, quiet=True)
    assert digests(tmp_path / "processes") == digests(short)


def test_another_seed_gives_other_episodes(short, tmp_path):
    record(replace(SHORT, seed=4), 6, tmp_path / "other", quiet=True)
    one, other = Demonstrations(short), Demonstrations(tmp_path / "other")
    assert not np.intersect1d(one.numbers("observation.state")[::9, 0], other.numbers("observation.state")[::9, 0]).size


def test_failures_are_excluded_and_the_number_of_tried_episodes_is_reported(tmp_path):
    noisy = Plan(ENV.model_copy(update={"cameras": ()}), noise=1.0)
    everything = record(replace(noisy, keep_failures=True), 16, tmp_path / "all", quiet=True)
    success = Demonstrations(tmp_path / "all").numbers("next.success").reshape(16, 50)
    good = np.flatnonzero(success[:, -1])
    assert everything["episodes_tried"] == 16 and 2 <= len(good) <= 14 and not success[:, :-1].any()
    wanted = len(good) - 1
    result = record(noisy, wanted, tmp_path / "good", quiet=True)
    assert result["episode_numbers"] == good[:wanted].tolist()
    assert result["episodes_tried"] == good[wanted - 1] + 1
    assert Demonstrations(tmp_path / "good").numbers("next.success").reshape(wanted, 50)[:, -1].all()


def test_an_expert_that_always_fails_ends_the_recording(tmp_path):
    always_failing = replace(SHORT, env=ENV.model_copy(update={"cameras": ()}), keep_failures=False)
    with pytest.raises(UserError, match="failed in all of 128 episodes of lift_d0 .* noise 0.2, 9 steps"):
        record(always_failing, 1, tmp_path / "none", quiet=True)


def test_a_killed_recording_is_refused_and_resumes_to_the_same_dataset(short, tmp_path):
    """Killed after its first block, which holds a third of it."""
    (tmp_path / "plan").write_bytes(pickle.dumps(SHORT))
    # a pause after every block, so that the recording does not end before it is killed
    code = f"""
import os, pickle, time
from pathlib import Path
from sparring.demos import plan, record
real, plan._ROBOTS, folder = os.replace, 2, Path({str(tmp_path)!r})
os.replace = lambda *paths: (real(*paths), time.sleep(0.3))
record.record(pickle.loads((folder / "plan").read_bytes()), 6, folder / "killed", quiet=True)
"""
    environment = dict(os.environ)
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    first = tmp_path / "killed/recording/block-000000"
    deadline = time.monotonic() + 60
    while not first.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert first.exists() and not (tmp_path / "killed/meta").exists()
    with pytest.raises(UserError, match="is an unfinished recording; run the command that records it again"):
        Demonstrations(tmp_path / "killed")
    written = first.stat().st_mtime_ns
    # a killed worker leaves this folder
    (tmp_path / "killed/recording/block-000001.partial-1").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "_ROBOTS", 2)
        patch.setattr("sparring.demos.record.shutil.rmtree", lambda path, **_: None)
        record(SHORT, 6, tmp_path / "killed", quiet=True)
    assert first.stat().st_mtime_ns == written
    record(SHORT, 6, tmp_path / "killed", quiet=True)
    assert digests(tmp_path / "killed") == digests(short)


@pytest.mark.parametrize("last", ["info.json", "manifest.json"])
def test_an_interrupted_assembly_is_refused_and_repeated(short, tmp_path, monkeypatch, last):
    def stopped(path, values):
        if path.name == last:
            raise KeyboardInterrupt
        real(path, values)

    real = assemble.write_json
    monkeypatch.setattr(assemble, "write_json", stopped)
    monkeypatch.setattr(assemble, "write_manifest", lambda folder, *_: stopped(folder / "manifest.json", {}))
    with pytest.raises(KeyboardInterrupt):
        record(SHORT, 6, tmp_path / "again", quiet=True)
    assert (tmp_path / "again/meta/info.json").exists() == (last == "manifest.json")
    with pytest.raises(UserError, match="is an unfinished recording"):
        Demonstrations(tmp_path / "again")
    monkeypatch.undo()
    record(SHORT, 6, tmp_path / "again", quiet=True)
    assert digests(tmp_path / "again") == digests(short)


@pytest.fixture
def recorded(short, tmp_path, monkeypatch):
    """Blocks of two episodes, interrupted before assembly; the resulting dataset is `short`."""
    monkeypatch.setattr(plan, "_ROBOTS", 2)
    with monkeypatch.context() as patch:
        patch.setattr("sparring.demos.record.assemble", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            record(SHORT, 6, tmp_path / "recorded", quiet=True)
    return tmp_path / "recorded"


def empty(data: bytes) -> bytes:
    return b""


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def with_zeros(data: bytes) -> bytes:
    return data[:600] + bytes(300) + data[900:]


def flipped(data: bytes) -> bytes:
    return data[:-40] + bytes([data[-40] ^ 4]) + data[-39:]


def test_incomplete_clips_never_become_a_dataset(short, recorded):
    """Checksums do not detect frames that the encoder did not write."""
    for number, damage in ((0, empty), (1, cut), (1, with_zeros)):
        block = recorded / f"recording/block-{number:06d}"
        clip = block / "0-head.mp4"
        whole = clip.read_bytes()
        for data in (damage(whole), whole):
            clip.write_bytes(data)
            files = [file for file in sorted(block.iterdir()) if file.name != "manifest.json"]
            manifest.write_manifest(block, "episodes", {file.name: manifest.entry(file) for file in files})
            if data is whole:
                continue
            text = f"0-head.mp4' is damaged: . of its 9 frames .* delete the folder .*{block.name}' and run the same "
            with pytest.raises(UserError, match=text):
                record(SHORT, 6, recorded, quiet=True)
            assert block.exists() and not (recorded / "meta/info.json").exists()
    shutil.rmtree(block)
    record(SHORT, 6, recorded, quiet=True)
    assert digests(recorded) == digests(short)


@pytest.mark.parametrize("file", ["numbers.npz", "1-wrist.mp4", "manifest.json"])
def test_damaged_blocks_are_recorded_again(short, recorded, monkeypatch, file):
    warnings = []
    monkeypatch.setattr(record_module.log, "warning", lambda text, *values: warnings.append(text % values))
    for number, damage in enumerate((empty, cut, flipped)):
        path = recorded / f"recording/block-{number:06d}" / file
        path.write_bytes(damage(path.read_bytes()))
    record(SHORT, 6, recorded, quiet=True)
    # the end of a manifest is its signature, which is not checked here
    assert len(warnings) == (2 if file == "manifest.json" else 3)
    assert warnings[0].endswith("recording/block-000000' is damaged and is recorded again")
    assert digests(recorded) == digests(short)


def test_a_block_that_is_damaged_after_its_recording_is_refused(recorded, monkeypatch):
    whole = record_module._record_blocks

    def then_damaged(*given):
        needed = whole(*given)
        clip = recorded / "recording/block-000002/0-head.mp4"
        clip.write_bytes(flipped(clip.read_bytes()))
        return needed

    monkeypatch.setattr(record_module, "_record_blocks", then_damaged)
    with pytest.raises(UserError, match="block 2 in .* was damaged after it was recorded; run the same command again"):
        record(SHORT, 6, recorded, quiet=True)


def test_damaged_settings_of_a_recording_are_refused(recorded):
    (recorded / "recording/settings.json").write_text("[1")
    with pytest.raises(UserError, match="settings.json' cannot be read"):
        record(SHORT, 6, recorded, quiet=True)


def test_everything_is_flushed_before_it_is_renamed(recorded, monkeypatch):
    """Files and folders are identified by inode, since names change."""
    flushed, missing, fsync, replace_file = set(), {}, os.fsync, os.replace

    def flush(handle):
        flushed.add(os.fstat(handle).st_ino)
        fsync(handle)

    def move(source, target):
        source = Path(source)
        needed = [source, *source.rglob("*")]
        if source.name == ".info.json.partial" or source == recorded / ".manifest.json.partial":
            needed += [path for part in assemble.PARTS for path in (recorded / part).rglob("*")]
            needed += [recorded, *(recorded / part for part in assemble.PARTS)]
        missing[Path(target).name] = [path for path in needed if path.stat().st_ino not in flushed]
        replace_file(source, target)
        # the new name is not flushed yet
        flushed.discard(Path(target).parent.stat().st_ino)

    def remove(folder, **_):
        if folder.exists():
            missing["before " + folder.name] = [
                path for path in (folder.parent / "meta",) if path.stat().st_ino not in flushed
            ]
            rmtree(folder)

    rmtree = shutil.rmtree
    rmtree(recorded / "recording/block-000001")
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", move)
    monkeypatch.setattr(shutil, "rmtree", remove)
    record(SHORT, 6, recorded, quiet=True)
    assert {"block-000001", "stats.json", "sparring.json", "info.json", "manifest.json", "before recording"} <= set(
        missing
    )
    assert not any(missing.values())


def test_files_of_an_interrupted_assembly_are_deleted(recorded, monkeypatch):
    left = [recorded / "data/chunk-000/file-007.parquet", recorded / "videos/x/chunk-000/file-007.mp4"]
    for path in left:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"old")
    record(SHORT, 6, recorded, quiet=True)
    assert not any(path.exists() for path in left) and len(Demonstrations(recorded)) == 6


def test_files_of_others_are_never_deleted(tmp_path):
    (tmp_path / "mine/data").mkdir(parents=True)
    with pytest.raises(UserError, match="mine' holds data .*; give another --output"):
        record(SHORT, 6, tmp_path / "mine", quiet=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["data"]


def test_the_lock_of_a_recording_must_not_be_a_link(tmp_path):
    precious, folder = tmp_path / "precious", tmp_path / "set/recording"
    precious.write_text("kept")
    folder.mkdir(parents=True)
    (folder / "lock").symlink_to(precious)
    with pytest.raises(UserError, match=r"cannot be written \(.*link"):
        record(SHORT, 1, folder.parent, quiet=True)
    assert precious.read_text() == "kept"


def test_blocks_of_another_size_are_not_mixed(recorded, monkeypatch):
    monkeypatch.setattr(plan, "_ROBOTS", 4)
    with pytest.raises(UserError, match="other settings; give another --output:\n  robots: 2 there, 4 now"):
        record(SHORT, 8, recorded, quiet=True)


def test_a_recording_resumes_with_another_number_but_not_with_other_settings(short, tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.demos.record.assemble", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        record(SHORT, 3, tmp_path / "more", quiet=True)
    monkeypatch.undo()
    with pytest.raises(UserError, match="other settings; give another --output:\n  noise: 0.2 there, 0.5 now"):
        record(replace(SHORT, noise=0.5), 6, tmp_path / "more", quiet=True)
    record(SHORT, 6, tmp_path / "more", quiet=True)
    assert digests(tmp_path / "more") == digests(short)


def test_a_finished_dataset_is_never_changed(short):
    before = digests(short)
    assert record(SHORT, 6, short, quiet=True)["episodes_tried"] == 6
    with pytest.raises(UserError, match="is complete with 6 episodes; give another --output"):
        record(SHORT, 7, short, quiet=True)
    with pytest.raises(UserError, match="seed: 3 there, 4 now"):
        record(replace(SHORT, seed=4), 6, short, quiet=True)
    assert digests(short) == before


def test_two_recordings_do_not_share_a_folder(tmp_path):
    from sparring.demos.record import _held

    with (
        _held(tmp_path / "recording", SHORT, 2),
        pytest.raises(UserError, match="is being recorded by another process"),
        _held(tmp_path / "recording", SHORT, 2),
    ):
        pass


def test_long_datasets_are_split_into_files_and_chunks(short, tmp_path, monkeypatch):
    monkeypatch.setattr(assemble, "_FRAMES_PER_FILE", 20)
    monkeypatch.setattr(assemble, "_FILES_PER_CHUNK", 2)
    record(SHORT, 6, tmp_path / "spread", quiet=True)
    videos = sorted((tmp_path / "spread/videos/observation.images.head").rglob("*.mp4"))
    assert [path.relative_to(videos[0].parents[1]).as_posix() for path in videos] == [
        "chunk-000/file-000.mp4", "chunk-000/file-001.mp4", "chunk-001/file-000.mp4"
    ]  # fmt: skip
    spread, one = Demonstrations(tmp_path / "spread"), Demonstrations(short)
    for episode in range(6):
        assert (spread.episode(episode) == one.episode(episode)).all()


def test_mixed_tasks(tmp_path):
    """Tasks have their own lengths and instructions and are assigned in turn."""
    mixed = Plan(TabletopConfig(task=("reach_d0", "push_d0"), object_state="state", threads=1))
    result = record(mixed, 6, tmp_path / "mixed", quiet=True)
    demos = Demonstrations(tmp_path / "mixed")
    assert result["episode_tasks"] == ["reach_d0", "push_d0"] * 3
    assert demos.lengths.tolist() == [50, 60] * 3
    assert demos.cameras == () and "image" not in demos.episode(0)["observation"]
    instructions = [demos.instruction(episode) for episode in range(6)]
    assert not set(instructions[::2]) & set(instructions[1::2]) and set(instructions) == set(demos.instructions)


@pytest.mark.parametrize("task", ["reach_d0", "stack_d0", "drawer_d0", "handover_d0"])
@pytest.mark.parametrize("mode", ["delta_qpos", "delta_ee_pos", "delta_ee", "qpos"])
def test_every_entry_has_a_name(task, mode):
    for object_state in ("state", "privileged"):
        config = TabletopConfig(task=task, control_mode=mode, object_state=object_state, threads=1)
        env = make_expert_env(config, 1, None, 0.0, 0)
        found = env.names
        assert len(found["action"]) == env.spec.action_dim
        if object_state == "privileged":
            assert len(found["observation.privileged"]) == env.spec.observation["privileged"][0][0]
        assert len(found["observation.state"]) == env.spec.observation["state"][0][0]
        assert all(len(set(of)) == len(of) for of in found.values())


def test_worker_processes_load_no_torch():
    code = "import sys, sparring.demos.record; print({'torch', 'tensordict'} & set(sys.modules))"
    environment = dict(os.environ)
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


# ---- the command


def run_demos(capsys, *arguments):
    code = main(["demos", *arguments])
    return code, *capsys.readouterr()


def test_record_and_show(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTPUT_BASE", raising=False)
    arguments = ["reach_d0", "--episodes", "3", "--cameras", "head", "wrist", "--image-size", "32", "--seed", "7"]
    arguments += ["--control-mode", "delta_ee_pos", "env.domain_randomization=all", "env.threads=1"]
    code, out, err = run_demos(capsys, *arguments)
    assert (code, out) == (0, "outputs/demos/reach_d0: 3 episodes of 3 tried\n")
    first, *_, last = err.splitlines()
    assert first.endswith("compiling and recording the first episodes") and last.endswith("  3 of 3 episodes")
    recorded = json.loads(Path("outputs/demos/reach_d0/meta/sparring.json").read_text())
    assert (recorded["seed"], recorded["control_mode"], len(recorded["env"]["domain_randomization"])) == (
        7, "delta_ee_pos", 6
    )  # fmt: skip

    code, out, err = run_demos(capsys, "show", "outputs/demos/reach_d0")
    assert (code, err) == (0, "")
    for line in (
        "episodes   3 of 50 to 50 steps",
        "steps      150 at 25 a second: 0:06 (0.00 h)",
        "robot      sparring_arm, control mode delta_ee_pos",
        "camera     wrist, 32 x 32",
        "successes  3 of 3 episodes (100.0%)",
        "task       reach_d0: 3 episodes",
        "sheet      outputs/demos/reach_d0/sheet.png",
    ):
        assert f"{line}\n" in out
    from PIL import Image

    sheet = np.asarray(Image.open("outputs/demos/reach_d0/sheet.png"))
    # two cameras, five frames each, three episodes of 128 pixels per side
    assert sheet.shape[0] > 3 * 128 and sheet.shape[1] > 10 * 128
    assert sheet[40:120, 20:120].std() > 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lift_d0"], "; give --episodes N"),
        (["lift_d9", "--episodes", "1"], "env.task='lift_d9' is not a tabletop task"),
        (["explore", "--episodes", "1"], "there is no expert for explore; choose another of `sparring tasks`"),
        (["lift_d0", "--episodes", "1", "--sheet", "a.png"], "--sheet is only for `sparring demos show PATH`"),
        (["lift_d0", "handover_d0", "--episodes", "1"], "env.task mixes robots"),
        (["lift_d0", "--episodes", "1", "--noise", "2"], "--noise 2: expected 0 to 1"),
        (["lift_d0", "--episodes", "1", "--image-size", "33"], "env.image_size=33 is odd"),
        (["lift_d0", "--episodes", "1", "--cameras", "nose"], "env.cameras = [nose] (from --cameras): expected a list"),
        (["lift_d0", "--episodes", "1", "--control-mode", "wish"], "env.control_mode = wish (from --control-mode)"),
        (["lift_d0", "--episodes", "1", "env.pad_action=32"], "env.pad_action is not recorded"),
        (["lift_d0", "--episodes", "1", "env.name=gym:Pendulum-v1"], "env.name=gym:Pendulum-v1: to record another env"),
        (["lift_d0", "--episodes", "1", "env.task=push_d0"], "the task is given twice"),
        (["lift_d0", "--episodes", "1", "--config", "no.yaml"], "config file 'no.yaml' cannot be read"),
        (["lift_d0", "--episodes", "1", "--output", "/proc/no"], "--output '/proc/no' cannot be written"),
        (["show"], "expected one dataset: sparring demos show PATH"),
        (["show", ".", "--episodes", "3", "--seed=1"], "--episodes, --seed=1: `sparring demos show PATH` takes only"),
        (["show", "nowhere"], "'nowhere' is not a folder"),
        (["show", "."], "'.' has no meta/info.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_wrong_arguments_raise_a_one_line_error(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_demos(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_prints_how_to_resume(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("sparring.demos.record.record", interrupted)
    code, out, err = run_demos(capsys, "reach_d0", "--episodes", "1", "--output", str(tmp_path / "a"))
    assert (code, out, err) == (130, "", f"interrupted; the same command resumes the recording in '{tmp_path}/a'\n")


def test_a_recording_larger_than_the_disk_is_refused_after_the_first_block(tmp_path, monkeypatch):
    from sparring.demos import record as recording

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(recording.shutil, "disk_usage", lambda _: usage._replace(free=10**9))
    with pytest.raises(UserError, match="10000000 episodes of about .* but '.*' has 1.0 GB free; "):
        record(SHORT, 10_000_000, tmp_path / "much", quiet=True)
    # the recorded blocks are kept
    monkeypatch.undo()
    record(SHORT, 6, tmp_path / "much", quiet=True)


def test_progress_counts_failures_but_not_surplus_episodes():
    from sparring.demos.record import _progress

    assert _progress(32, 32, 20) == "20 of 20 episodes"
    assert _progress(10, 16, 20) == "10 of 20 episodes, 6 failed"


@pytest.mark.parametrize(
    "arguments", [["--noise", "much"], ["--episodes", "0"], ["--workers", "0"], ["--pixel-format", "x"]]
)
def test_wrong_flags(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demos", "lift_d0", *arguments])
    assert stop.value.code == 2 and f"argument {arguments[0]}" in capsys.readouterr().err


def test_the_error_without_pyarrow_names_the_package_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, _, err = run_demos(capsys, "reach_d0", "--episodes", "1")
    assert (code, err) == (
        2, 'sparring: datasets need pyarrow, which is not installed: pip install "sparring[demos]"\n'
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_completion(capsys):
    for arguments, offered in (
        (["demos", "sh"], "show"),
        (["demos", "li"], "lift_d0"),
        (["demos", "x", "--keep"], "--keep-failures"),
    ):
        assert main(["__complete", *arguments]) == 0
        assert offered in capsys.readouterr().out.split()
