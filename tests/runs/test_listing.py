"""`sparring runs` and `sparring prune`: states, verification, kept checkpoints."""

import fcntl
import json
import logging
import os
import struct
import threading
import time
from pathlib import Path

import pytest

from sparring.cli.main import main
from sparring.cli.runs import _duration as duration
from sparring.cli.runs import _size as size
from sparring.processes.manifest import entry, write_manifest
from sparring.processes.rows import RowFile
from sparring.runs.folder import folder_lock
from sparring.runs.listing import _read_run as read_run
from sparring.runs.listing import find_runs, read_status, size_of


def status(state: str, why: str | None = None, updated: float = 0.0, **best) -> dict:
    return {
        "state": state,
        "why": why,
        "phase": "finetune",
        "task": "reach_d0",
        "updated": updated or time.time(),
        "progress": {"updates": 30, "env_steps": 12000, "episodes": 40, "fraction": 0.25},
        "best": best or None,
    }


HEAD = json.dumps({"x": {"dtype": "U8", "shape": [400], "data_offsets": [0, 400]}}).encode().ljust(92)
WEIGHTS = struct.pack("<Q", len(HEAD)) + HEAD + b"x" * 400


def seal(checkpoint: Path) -> None:
    """Write the other files of a checkpoint and its manifest."""
    for name in ("training_state.pt", "spec.json"):
        (checkpoint / name).touch()
    files = {n: entry(checkpoint / n) for n in ("model.safetensors", "config.yaml", "spec.json", "training_state.pt")}
    about = {"update": int(checkpoint.name[11:]), "config": files["config.yaml"]["sha256"]}
    write_manifest(checkpoint, "checkpoint", files, tensors={"x": ["U8", [400]]}, **about)


@pytest.fixture
def folder(tmp_path):
    """A function that creates run folders of 1000 bytes plus the given status, checkpoints and evaluations."""

    def make(name, data: dict | None = None, checkpoints=(), evaluations=(), valid=True):
        run = tmp_path / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("phase: imitate\nenv:\n  task: [lift_d0, lift_d1]\n".ljust(999) + "\n")
        (run / "writer.lock").touch()
        if data:
            (run / "status.json").write_text(json.dumps(data))
        for number in checkpoints:
            (run / f"checkpoint-{number}").mkdir()
            (run / f"checkpoint-{number}/model.safetensors").write_bytes(WEIGHTS)
            # files that also occur in run folders
            (run / f"checkpoint-{number}/config.yaml").touch()
            (run / f"checkpoint-{number}/train.log").touch()
            if valid:
                seal(run / f"checkpoint-{number}")
        if evaluations:
            rows = [{"update": update, "eval/success_rate": rate} for update, rate in evaluations]
            RowFile(run / "evaluations.jsonl").append(rows)
            with (run / "evaluations.jsonl").open("a") as lines:
                lines.write('{"torn')
        return run

    return make


def names(run) -> list[str]:
    return sorted(path.name for path in run.iterdir() if "checkpoint" in path.name)


# ---- runs


@pytest.mark.parametrize("state", ["finished", "interrupted", "crashed"])
def test_state_of_an_ended_run_is_that_of_its_status(folder, state):
    found = read_run(folder("run", status(state, "RuntimeError: no")))
    assert (found.phase, found.task, found.state, found.why) == ("finetune", "reach_d0", state, "RuntimeError: no")
    assert (found.updates, found.env_steps, found.fraction) == (30, 12000, 0.25)


def test_running_state_needs_a_held_lock(folder):
    run = folder("run", status("running"))
    assert read_run(run).state == "killed"
    with folder_lock(run):
        assert read_run(run).state == "running"
    (run / "writer.lock").unlink()
    assert read_run(run).state == "killed"


def test_reader_of_the_lock_does_not_block_a_run(folder):
    run = folder("run")
    handle = os.open(run / "writer.lock", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    threading.Timer(0.1, os.close, [handle]).start()
    with folder_lock(run):
        assert read_run(run).state == "running"


def test_folder_without_a_status_is_unknown(folder):
    run = folder("lost", checkpoints=[5])
    found = read_run(run)
    assert (found.state, found.phase, found.best, found.updates, found.fraction) == ("unknown", None, None, None, None)
    with folder_lock(run):
        assert read_run(run).state == "running"


def test_runs_are_found_at_any_depth_but_not_in_checkpoints(folder, tmp_path):
    now = time.time()
    folder("a/finetune_rl", status("finished", updated=now - 500), checkpoints=[1])
    folder("b", status("finished", updated=now - 100))
    folder("b/again", status("finished", updated=now - 10))
    folder("b/episodes/part", status("finished"))
    # a run folder with metrics only
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers/episode_metrics.jsonl").touch()
    os.utime(tmp_path / "numbers/episode_metrics.jsonl", (now - 900, now - 900))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/config.yaml").touch()
    assert [os.path.relpath(run.path, tmp_path) for run in find_runs(tmp_path)] == [
        *("b/again", "b", "a/finetune_rl", "numbers")
    ]


def test_table_and_json_of_runs(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder("outputs/one", status("finished", success_rate=0.871, low=0.79, high=0.925), checkpoints=[1, 2], valid=False)
    folder("outputs/two", status("crashed", "RuntimeError: robots gone", updated=time.time() - 7300))
    assert main(["runs"]) == 0
    head, _, one, two = capsys.readouterr().out.splitlines()
    cells = [" ".join(line.split()) for line in (head, one, two)]
    assert cells[0] == "run phase task state done made best success size age why"
    assert cells[1].startswith("outputs/one finetune reach_d0 finished 25% 12,000 steps 87% (79% - 92%) 2.2 kB 0 s")
    assert cells[2].endswith("crashed 25% 12,000 steps - 1.2 kB 2 h RuntimeError: robots gone")
    assert main(["runs", "outputs", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [run["path"] for run in data] == ["outputs/one", "outputs/two"]
    assert data[0]["best"]["success_rate"] == 0.871


def test_control_characters_are_escaped(folder, tmp_path, monkeypatch, capsys):
    """A downloaded status or folder name may contain control characters, with a valid checksum."""
    data = status("crashed", "\x1b]0;title\x07\x1b[2Jwhy \u202e\rfinished") | {"task": "lift\x1b[31m"}
    odd = folder("outputs/od\x1b[31md\nsecond", data, checkpoints=[1, 2])
    files = {"\x1b[31mred": {}, "model.safetensors": entry(odd / "checkpoint-2/model.safetensors")}
    write_manifest(odd / "checkpoint-2", "checkpoint", files, tensors={"x": ["U8", [400]]})
    (odd / "checkpoint-1/config.yaml").write_text('env:\n  name: "yourmod:Env\\e[31m"\n')
    seal(odd / "checkpoint-1")
    monkeypatch.chdir(tmp_path)
    for command in (["runs"], ["runs", "--verify"], ["report", "outputs"], ["eval", str(odd)]):
        main(command)
    out, err = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in out + err)
    assert "outputs/od\\x1b[31md\\nsecond" in out and "lift\\x1b[31m" in out
    assert "yourmod:Env\\x1b[31m' is not an import path" in err and "\\x1b[31mred is missing" in out
    # warnings are escaped, too
    assert logging.lastResort.format(logging.makeLogRecord({"msg": "\x1b[2J"})) == "\\x1b[2J"
    assert "\\x1b]0;title\\x07\\x1b[2Jwhy \\u202e\\rfinished" in out


def test_folder_without_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OUTPUT_BASE", raising=False)
    assert main(["runs"]) == 2
    assert "'outputs' is not a folder; give the folder that contains your runs" in capsys.readouterr().err
    monkeypatch.setenv("OUTPUT_BASE", ".")
    assert main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs in .\n"


def test_sizes_and_ages_are_abbreviated():
    assert [size(n) for n in (0, 999, 1500, 123_456, 2.5e9, 3e13)] == [
        "0 B", "999 B", "1.5 kB", "123 kB", "2.5 GB", "30.0 TB"
    ]  # fmt: skip
    assert [duration(s) for s in (-1, 5, 90, 7200, 200_000)] == ["0 s", "5 s", "2 min", "2 h", "2 d"]


# ---- prune

FIVE = [10, 20, 30, 40, 50]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        # evaluations: none before 10; for 20 at 20, for 30 at 25, for 40 at 35, for 50 at 45
        ([], [20, 50]),
        (["--keep-best", "2"], [20, 30, 50]),
        (["--keep-best", "3"], [20, 30, 40, 50]),
        (["--keep-best", "0", "--keep-last", "2"], [40, 50]),
        (["--keep-last", "9"], FIVE),
    ],
)
def test_prune_keeps_the_best_and_the_last(folder, capsys, words, left):
    run = folder("run", checkpoints=FIVE, evaluations=[(15, 0.5), (20, 0.9), (25, 0.7), (35, 0.6), (45, 0.1)])
    assert main(["prune", str(run), "--yes", *words]) == 0
    assert names(run) == sorted(f"checkpoint-{number}" for number in left)
    out = capsys.readouterr().out
    assert ("freed" in out) == (len(left) < 5) and "checkpoint-50 (last)" in out
    # kept checkpoints are unchanged
    assert (run / f"checkpoint-{left[0]}/model.safetensors").read_bytes() == WEIGHTS


def test_prune_prints_kept_checkpoints_and_freed_space(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = folder("run", checkpoints=FIVE, evaluations=[(20, 0.9)])
    (run / ".partial-checkpoint-60").mkdir()
    assert main(["prune", "run", "--dry-run"]) == 0
    freed = size(sum(size_of(run / f"checkpoint-{number}") for number in (10, 30, 40)))
    text = f"run: keeps checkpoint-20 (success 90%), checkpoint-50 (last); deletes 4, {freed}\n"
    assert capsys.readouterr().out == text and len(names(run)) == 6
    assert main(["prune", "run", "run", "--yes"]) == 0
    assert capsys.readouterr().out == f"{text}freed {freed}\n"
    assert names(run) == ["checkpoint-20", "checkpoint-50"]
    assert main(["prune", "run"]) == 0
    assert capsys.readouterr().out.endswith("; nothing to delete\n")


def test_prune_names_the_update_of_the_evaluation(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder("run", checkpoints=FIVE, evaluations=[(20, 0.5), (28, 0.8), (55, 0.9)])
    assert main(["prune", "run", "--dry-run", "--keep-best", "3"]) == 0
    # an evaluation counts for the next checkpoint after it
    text = "30 (success 80% at update 28), checkpoint-40 (success 80% at update 28), checkpoint-50 (success 80% at"
    assert capsys.readouterr().out.startswith(f"run: keeps checkpoint-{text}")
    assert main(["prune", "run", "--dry-run", "--keep-best", "1"]) == 0
    assert "keeps checkpoint-30 (success 80% at update 28), checkpoint-50 (last);" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([{"eval/success_rate": None, "eval/reward": reward} for reward in (1.0, 7.5, 3.0)], "reward 7.5"),
        (
            [{"eval/head/changed_mse_ratio": x, "eval/wrist/changed_mse_ratio": x + 0.2} for x in (0.9, 0.3, 0.5)],
            "MSE ratio 0.400",
        ),
    ],
)
def test_prune_ranks_by_reward_or_prediction_error_without_success(folder, capsys, lines, text):
    run = folder("run", checkpoints=[10, 20, 30, 40])
    data = [line | {"update": update} for update, line in zip((10, 20, 30), lines, strict=True)]
    RowFile(run / "evaluations.jsonl").append(data)
    assert main(["prune", str(run), "--yes"]) == 0
    assert f"keeps checkpoint-20 ({text}), checkpoint-40 (last)" in capsys.readouterr().out
    assert names(run) == ["checkpoint-20", "checkpoint-40"]


def test_evaluations_without_update_are_ignored(folder, capsys):
    run = folder("run", checkpoints=[1, 2, 3])
    rates = [{"update": 1, "eval/success_rate": 0.5}, {"eval/success_rate": 1.0}]
    RowFile(run / "evaluations.jsonl").append([*rates, {"update": [2], "eval/success_rate": 1.0}])
    assert main(["prune", str(run), "--yes", "--dry-run"]) == 0
    assert "keeps checkpoint-1 (success 50%), checkpoint-3 (last);" in capsys.readouterr().out


def test_prune_without_evaluations_needs_keep_best_0(folder, capsys):
    run = folder("run", checkpoints=FIVE)
    assert main(["prune", str(run), "--yes"]) == 2
    data = capsys.readouterr()
    assert "without evaluations the best are unknown" in data.out
    assert "the best checkpoints are unknown; give --keep-best 0" in data.err
    assert len(names(run)) == 5
    assert main(["prune", str(run), "--keep-best", "0", "--yes"]) == 0
    assert names(run) == ["checkpoint-50"]


@pytest.mark.parametrize(("answer", "left"), [("y", 1), ("", 2), ("n", 2)])
def test_prune_needs_a_confirmation(folder, monkeypatch, capsys, answer, left):
    run = folder("run", checkpoints=[1, 2])
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert main(["prune", str(run)]) == 0
    assert len(names(run)) == left
    assert ("nothing was deleted" in capsys.readouterr().out) == (left == 2)


def test_prune_refuses_runs_in_use_and_other_folders(folder, tmp_path, monkeypatch, capsys):
    run, other = folder("run", checkpoints=[1, 2]), folder("other", checkpoints=[1, 2])
    with folder_lock(run):
        assert main(["prune", str(other), str(run), "--yes"]) == 2
        assert "a process is training there" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    assert main(["prune", str(run)]) == 2
    assert "confirmation needs a terminal; give --yes" in capsys.readouterr().err
    assert main(["prune", str(run / "checkpoint-1"), "--yes"]) == 2
    assert "holds no checkpoint-<n> folder" in capsys.readouterr().err
    assert main(["prune", str(tmp_path / "nowhere"), "--yes"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert len(names(run)) == len(names(other)) == 2


def flip(file: Path, at: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


def test_damaged_checkpoints_do_not_count_as_kept(folder, caplog):
    run = folder("run", checkpoints=FIVE, evaluations=[(10, 0.4), (20, 0.9)])
    for number in (20, 50):
        flip(run / f"checkpoint-{number}/model.safetensors")
    assert main(["prune", str(run), "--yes"]) == 0
    # 20 was the best, 50 the last; checkpoints after the last intact one are kept
    assert names(run) == ["checkpoint-30", "checkpoint-40", "checkpoint-50"]
    assert "checkpoint-50' is damaged (model.safetensors does not match its checksum" in caplog.text
    # nothing is deleted if all are damaged
    for number in (30, 40):
        flip(run / f"checkpoint-{number}/model.safetensors")
    assert main(["prune", str(run), "--yes"]) == 2
    assert names(run) == ["checkpoint-30", "checkpoint-40", "checkpoint-50"]


def test_verify_reports_damaged_checkpoints(folder, tmp_path, capsys):
    run, other = folder("run", checkpoints=[1, 2]), folder("other", checkpoints=[3])
    assert main(["runs", "--verify", str(run), str(other)]) == 0
    assert (
        capsys.readouterr().out
        == f"{run}/checkpoint-1: intact\n{run}/checkpoint-2: intact\n{other}/checkpoint-3: intact\n"
    )
    (other / "checkpoint-3/spec.json").unlink()
    assert main(["runs", "--verify", str(run), str(other)]) == 1
    assert capsys.readouterr().out.endswith(f"{other}/checkpoint-3: damaged: spec.json is missing\n")
    assert main(["runs", str(tmp_path), "--verify", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert data[f"{other}/checkpoint-3"] == ["spec.json is missing"] and len(data) == 3
    assert main(["runs", "--verify", str(tmp_path / "nowhere")]) == 2


def test_verify_reports_unsigned_and_changed_files(folder, tmp_path, monkeypatch, capsys):
    run = folder("run", checkpoints=[1])
    write_manifest(run, "run", {"config.yaml": entry(run / "config.yaml")})
    (run / "config.yaml").write_text("seed: 3\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another"))
    assert main(["runs", "--verify", str(run)]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{run}: damaged: config.yaml has 8 bytes, expected 1000"
    assert second == f"{run}/checkpoint-1: intact, but not signed by you"


def test_runs_in_several_folders_are_listed_once(folder, capsys):
    one, two = folder("a/one", status("finished", updated=time.time() - 60)), folder("b/two", status("crashed", "gone"))
    assert main(["runs", str(one), str(two), str(two.parent), "--json"]) == 0
    assert [run["path"] for run in json.loads(capsys.readouterr().out)] == [str(two), str(one)]


def test_error_without_checkpoint_repeats_why_the_run_crashed(folder, capsys):
    run = folder("run", status("crashed", "training has diverged: the loss is nan; lower ppo.policy_lr=1"))
    assert main(["eval", str(run)]) == 2
    assert capsys.readouterr().err.endswith(
        "; it ended with: training has diverged: the loss is nan; lower ppo.policy_lr=1. Change what this names, and "
        "train again\n"
    )


# ---- folders without a checkpoint


COMMANDS = (["prune", "{}", "--yes"], ["eval", "{}"], ["compare", "{}", "{}"], ["eval", "{}", "--world-model"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_missing_checkpoint_is_explained(folder, capsys, command):
    run = folder("run", status("running"))
    with (run / "config.yaml").open("a") as config:
        config.write("training:\n  save_every: 20\n")
    assert main([word.format(run) for word in command]) == 2
    assert capsys.readouterr().err == (
        f"sparring: '{run}' has no checkpoint yet: its run was killed after 30 updates, and one is saved every 20 "
        "updates (training.save_every) and at the end; run the same command again\n"
    )
    if command[0] == "eval":
        with folder_lock(run):
            assert main([word.format(run) for word in command]) == 2
        assert "its run is running after 30 updates" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
def test_error_for_a_folder_of_runs_names_them(folder, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/notes").mkdir(parents=True)
    for name in ("b", "a", "all/teacher_rl"):
        folder(f"outputs/{name}", status("finished"), checkpoints=[1])
    assert main([word.format("outputs") for word in command]) == 2
    text = (
        "sparring: 'outputs' is not a run folder but contains some; give outputs/a, outputs/b, outputs/all/teacher_rl\n"
    )
    assert capsys.readouterr().err == text
    for name in range(4):
        folder(f"outputs/c{name}")
    assert main([word.format("outputs") for word in command]) == 2
    assert "outputs/c1, outputs/c2 or 2 more" in capsys.readouterr().err
    assert main([word.format("outputs/notes") for word in command]) == 2
    assert "'outputs/notes' holds no checkpoint" in capsys.readouterr().err


def test_unreadable_folder_is_skipped(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "outputs/secret").mkdir(parents=True)
    folder("outputs/a", status("finished"), checkpoints=[1])
    real = os.listdir

    def listdir(path):
        if Path(path).name == "secret":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert main(["eval", str(tmp_path / "outputs")]) == 2
    assert capsys.readouterr().err.endswith(f"give {tmp_path}/outputs/a\n")


@pytest.mark.parametrize("text", ["[]", "null", "{", "\xff"])
def test_status_that_is_no_object_is_damaged(tmp_path, text):
    (tmp_path / "status.json").write_bytes(text.encode("latin-1"))
    assert list(read_status(tmp_path)) == ["damaged"]
