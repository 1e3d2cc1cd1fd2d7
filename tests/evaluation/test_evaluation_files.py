"""Names of the files of `sparring eval`, and what they replace."""

import pytest

from sparring.errors import UserError
from sparring.evaluation.files import LONGEST, EvaluationFiles, refuse_unwritable, terminal_width, text_table
from sparring.processes.files import write_whole


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({}, "eval"),
        ({"env.task": ["reach_d1"]}, "eval_task-reach_d1"),
        ({"env.task": ["lift_d0", "push_d0"], "env.reward": "sparse"}, "eval_task-lift_d0-push_d0_reward-sparse"),
        ({"env.kwargs.gravity": -1.5, "env.kwargs.map": "../a b"}, "eval_gravity--1.5_map-..-a-b"),
    ],
)  # fmt: skip
def test_file_names_contain_changed_settings(tmp_path, changed, name):
    files = EvaluationFiles.of(tmp_path, "eval", changed, None)
    assert files.name == name and files.json_file == tmp_path / f"{name}.json"
    assert EvaluationFiles.of(tmp_path, "eval", changed, tmp_path / "x").json_file == tmp_path / "x"


def test_table_is_cut_to_the_terminal_width(monkeypatch):
    rows = [("run", "state", "why"), ("outputs/one", "crashed", "an error of many words " * 5)]
    assert text_table(rows).splitlines()[-1].endswith("words ".rstrip())
    lines = text_table(rows, width=40, spare=(2,)).splitlines()
    assert max(map(len, lines)) == 40 and lines[-1].startswith("outputs/one  crashed  an err") and lines[-1][-1] == "…"
    assert "outpu…  crashed" in text_table(rows, width=23, spare=(2, 0))
    monkeypatch.setenv("COLUMNS", "72")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert terminal_width() == 72
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    assert terminal_width() is None


def test_long_names_are_cut_and_still_differ(tmp_path):
    names = [EvaluationFiles.of(tmp_path, "eval", {"env.kwargs.path": "x" * 300 + end}, None).name for end in "ab"]
    assert [len(name) for name in names] == [LONGEST, LONGEST] and names[0] != names[1]


def test_an_evaluation_removes_its_own_earlier_videos_only(tmp_path):
    kept = ["videos/episode_000160_0.mp4", "videos/eval_task-reach_d1_0.mp4", "videos/eval_x.mp4", "samples/y.png"]
    gone = ["videos/eval_0.mp4", "videos/eval_12.mp4", "samples/eval_0.png"]
    for file in kept + gone:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    EvaluationFiles.of(tmp_path, "eval", {}, None).remove_videos()
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/*")} == set(kept)


def test_files_with_similar_names_are_kept(tmp_path):
    for name in ("new.partial", "new.probe"):
        (tmp_path / name).write_text("of the user")
    refuse_unwritable(tmp_path / "new.json")
    write_whole(tmp_path / "new.json", "{}")
    found = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert found == {"new.json": "{}", "new.partial": "of the user", "new.probe": "of the user"}


def test_unwritable_paths_are_refused_without_side_effects(tmp_path):
    refuse_unwritable(tmp_path / "new.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "old.json").write_text("old")
    refuse_unwritable(tmp_path / "old.json")
    assert (tmp_path / "old.json").read_text() == "old"
    with pytest.raises(
        UserError, match=r"no/x.json': cannot write there \(No such file or directory\); give --json FILE"
    ):
        refuse_unwritable(tmp_path / "no" / "x.json")
    with pytest.raises(UserError, match=r"cannot write there \(Is a directory\)"):
        refuse_unwritable(tmp_path)
