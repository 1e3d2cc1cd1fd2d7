"""Reading run folders, and the report page."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from doubles_report import BEGAN, make_run, metrics_line, write_lines

from sparring.cli.main import main
from sparring.config.schema import load_config
from sparring.config.text import flatten
from sparring.errors import UserError
from sparring.processes.files import take_lock
from sparring.report import curves
from sparring.report.curves import BINS, Curves, Tail, Timeline
from sparring.report.media import Picture, _spread, _within
from sparring.report.page import Collection
from sparring.report.run_folder import (
    RunFolder,
    _CurvesFile,
    _defaults,
    _differences,
    _kinds,
    _labels,
    _read_status,
    _short_names,
)
from sparring.runs.fits import saved_settings


def rows_of(reader: Tail) -> list[dict]:
    return [row for rows in reader.rows() for row in rows]


def open_run(path) -> RunFolder:
    run = RunFolder(path, lambda run, picture: picture.file)
    run.refresh(1)
    return run


def content_of(html: bytes) -> dict:
    return json.loads(re.search(rb'type="application/json">(.*?)</script>', html, re.S).group(1))


# --- lines ---


def test_tail_continues_and_waits_for_incomplete_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(curves, "BLOCK", 7)
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    reader = Tail(file)
    assert rows_of(reader) == [{"a": 1}, {"a": 2}]
    assert rows_of(reader) == []
    with file.open("a") as more:
        more.write(": 3}\n")
    assert rows_of(reader) == [{"a": 3}]
    assert reader.damage(0) == [] and not reader.was_cut()


def test_unreadable_lines_are_counted(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": 1\n[3]\n\n\xff\xfe\n{"a": null}\n')
    reader = Tail(file)
    assert rows_of(reader) == [{"a": 1}, {"a": None}]
    assert reader.damage(0) == ["x.jsonl: lines that could not be read, and are left out: 3"]


@pytest.mark.parametrize("after", ["shorter", "as long", "longer", "gone"])
def test_rewritten_file_is_detected_at_any_length(tmp_path, after):
    file = tmp_path / "x.jsonl"
    write_lines(file, [{"timestamp": 1.5 + i} for i in range(20)])
    reader = Tail(file)
    rows_of(reader)
    lines = [{"timestamp": 1.5 + i} for i in range(10)]
    # the same first lines, then different ones
    lines += {"shorter": [], "as long": [{"timestamp": 2.5 + i} for i in range(10, 20)], "longer": [{"b": 1}] * 40}.get(
        after, []
    )
    if after == "gone":
        file.unlink()
    else:
        write_lines(file, lines)
    assert reader.was_cut()


def test_missing_file_has_no_rows(tmp_path):
    assert rows_of(Tail(tmp_path / "none.jsonl")) == []


# --- curves ---


def test_buckets_keep_mean_minimum_and_maximum(monkeypatch):
    monkeypatch.setattr(curves, "BUCKETS", 4)
    table = Curves()
    table.add([{"update": i, "y": float(i * i)} for i in range(6)])
    points = table.points()
    assert (points["rows"], points["width"]) == (6, 2)
    assert points["axes"]["update"].tolist() == [0.5, 2.5, 4.5]
    assert points["curves"]["y"]["mean"].tolist() == [0.5, 6.5, 20.5]
    assert points["curves"]["y"]["low"].tolist() == [0, 4, 16]
    assert points["curves"]["y"]["high"].tolist() == [1, 9, 25]


def test_curves_do_not_depend_on_the_portions_of_rows():
    random = np.random.default_rng(0)
    lines = [{"y": x, **({"z": -x} if i % 7 == 0 else {})} for i, x in enumerate(random.normal(size=5000).tolist())]
    whole, parts = Curves(), Curves()
    whole.add(lines)
    for begin in range(0, 5000, 613):
        parts.add(lines[begin : begin + 613])
    one, other = whole.points(), parts.points()
    assert one["width"] == other["width"] == 8
    for name in ("y", "z"):
        for kind in ("mean", "low", "high"):
            np.testing.assert_allclose(one["curves"][name][kind], other["curves"][name][kind], rtol=1e-5)
    y = np.array([line["y"] for line in lines])
    np.testing.assert_allclose(one["curves"]["y"]["high"], y.reshape(-1, 8).max(1), rtol=1e-6)
    assert whole.mean("z") == pytest.approx(-y[::7].mean())


def test_values_that_are_no_numbers_are_missing():
    table = Curves()
    table.add([{"y": 1, "word": "x", "list": [1]}, {"y": None, "late": True}, {"y": float("inf")}])
    points = table.points()
    assert sorted(points["curves"]) == ["late", "y"]
    assert [x if x == x else None for x in points["curves"]["y"]["mean"].tolist()] == [1, None, None]
    assert table.mean("y") == 1 and table.mean("word") is None


def test_curves_restart_after_their_file_was_cut(tmp_path):
    file = tmp_path / "episode_metrics.jsonl"
    write_lines(file, [metrics_line(update) for update in range(1, 11)])
    table = _CurvesFile(file)
    table.refresh()
    before = table.stamp
    write_lines(file, [metrics_line(update) for update in range(1, 6)])
    table.refresh()
    assert table.curves.rows == 5 and table.stamp != before
    write_lines(file, [metrics_line(6)], "a")
    table.refresh()
    assert table.curves.rows == 6 and table.curves.points()["axes"]["update"].tolist() == [1, 2, 3, 4, 5, 6]


# --- stages ---


def span(stage, begin, end, who="collector"):
    return {"who": who, "stage": stage, "begin": BEGAN + begin, "end": BEGAN + end, "version": 0}


def test_busy_shares_sum_to_the_duration_of_spans(tmp_path):
    file = tmp_path / "timeline.jsonl"
    write_lines(file, [span("simulate", 0, 0.01), span("simulate", 3, 60.25), span("learn", 60, 70.5, "learner")])
    timeline = Timeline(file)
    timeline.refresh()
    shown = timeline.lanes()
    simulate, learn = shown["lanes"]
    assert (simulate["who"], simulate["stage"], learn["stage"]) == ("collector", "simulate", "learn")
    assert simulate["seconds"] == pytest.approx(57.26) and learn["seconds"] == pytest.approx(10.5)
    assert shown["bin_seconds"] * BINS > 70.5 and max(simulate["share"]) == 1
    assert simulate["share"].sum() * shown["bin_seconds"] == pytest.approx(57.26, rel=1e-3)
    # later spans widen the bins; the sums stay
    write_lines(file, [span("learn", 1000, 1001, "learner")], "a")
    timeline.refresh()
    assert [lane["seconds"] for lane in timeline.lanes()["lanes"]] == pytest.approx([57.26, 11.5])


def test_invalid_spans_are_ignored(tmp_path):
    file = tmp_path / "timeline.jsonl"
    write_lines(file, [{"who": "learner", "stage": "learn", "begin": BEGAN, "end": None}, span("learn", 1, 1)])
    timeline = Timeline(file)
    timeline.refresh()
    (lane,) = timeline.lanes()["lanes"]
    assert lane["seconds"] == 0 and lane["share"].tolist() == [0]


def test_detail_view_has_the_last_short_spans(tmp_path):
    file = tmp_path / "timeline.jsonl"
    fine = [span("simulate", i, i + 0.5) for i in range(2000)]
    write_lines(file, [*fine, *(span("collect", 2000 + i, 2001 + i) for i in range(500))])
    timeline = Timeline(file)
    timeline.refresh()
    lanes = {lane["stage"]: lane for lane in timeline.lanes()["lanes"]}
    assert len(lanes["simulate"]["turns"]) == 1200 and len(lanes["collect"]["turns"]) == 0
    assert timeline.lanes()["close_began"] == 800
    assert lanes["simulate"]["turns"][-1].tolist() == [1199, 1199.5]


def test_detail_view_begins_where_all_lanes_are_complete(tmp_path):
    """The last 1200 of 2 x 400 spans per rollout, three rollouts: of the second only group 1 is complete."""
    file = tmp_path / "timeline.jsonl"
    lines = []
    for rollout in range(3):
        for group in (0, 1):
            lines += [
                span("infer", 400 * rollout + i, 400 * rollout + i + 0.5, f"collector {group}") for i in range(400)
            ]
    write_lines(file, [*lines, span("learn", 100, 900, "learner"), span("infer", 1200, 1201, "collector 0")])
    timeline = Timeline(file)
    timeline.refresh()
    shown = timeline.lanes()
    assert shown["close_began"] == 800
    turns = {(lane["who"], lane["stage"]): lane["turns"] for lane in shown["lanes"]}
    assert len(turns["collector 0", "infer"]) == 401 and len(turns["collector 1", "infer"]) == 400
    # earlier spans are cut
    assert turns["learner", "learn"].tolist() == [[0, 100]]


# --- images and videos ---


def test_videos_show_failures_first_then_the_newest(tmp_path):
    run = make_run(tmp_path / "run", pictures=True)
    (run / "videos" / "rollout_000003_0.mp4").write_bytes(b"x")
    (run / "videos" / "rollout_000012_1.mp4").write_bytes(b"x")
    (run / "videos" / "episode_000008.mp4").write_bytes(b"x")
    (run / "videos" / "unfinished.mp4").touch()
    found = Picture.videos(run)
    assert [video.file.removeprefix("videos/") for video in found] == [
        "episode_000160_1.mp4",
        "rollout_000012_1.mp4",
        "episode_000008.mp4",
        "rollout_000003_0.mp4",
        "episode_000160_0.mp4",
    ]
    assert [video.kind for video in found] == ["evaluation", "rollout", "prediction", "rollout", "evaluation"]
    assert (found[0].success, found[0].reward, found[0].task) == (False, 3.5, "reach_d0")
    assert found[1].update == 12 and found[1].success is None


def test_later_evaluations_are_marked_and_shown_once(tmp_path):
    run = make_run(tmp_path / "run", pictures=True)
    own = (run / "videos/episode_000160_1.mp4").read_bytes()
    # an equal copy, another episode of the same size, another task
    (run / "videos/eval_0.mp4").write_bytes(own)
    (run / "videos/eval_1.mp4").write_bytes(own[:-1] + b"x")
    (run / "videos/eval_task-lift_d0_0.mp4").write_bytes(b"y")
    line = {"kind": "eval", "update": 20, "settings": "env.task=[lift_d0]", "success": False}
    lines = [line | {"file": "videos/eval_task-lift_d0_0.mp4"}, line | {"file": "videos/eval_1.mp4", "settings": ""}]
    write_lines(run / "videos" / "index.jsonl", lines, "a")
    found = {video.file.removeprefix("videos/"): (video.kind, video.settings) for video in Picture.videos(run)}
    assert found == {
        "episode_000160_0.mp4": ("evaluation", None),
        "episode_000160_1.mp4": ("evaluation", None),
        "eval_1.mp4": ("eval", ""),
        "eval_task-lift_d0_0.mp4": ("eval", "env.task=[lift_d0]"),
    }


def test_only_predictions_are_listed_as_predictions(tmp_path):
    """Contact sheets of episodes are not predictions, even without their video."""
    run = make_run(tmp_path / "run", pictures=True)
    for name in ("rollout_000003_0.png", "episode_000160_000020_0.png"):
        (run / "samples" / name).write_bytes(b"x")
    assert [strip.file for strip in Picture.strips(run)] == ["samples/episode_0160_pred_vs_gt.png"]


def test_images_are_selected_by_number_and_size():
    pictures = [Picture(str(i), "strip", bytes=10 * i) for i in range(1, 8)]
    assert [picture.file for picture in _spread(pictures, 4)] == ["1", "3", "5", "7"]
    assert [picture.file for picture in _within(pictures, 45)] == ["1", "2"]
    assert [picture.file for picture in _within(pictures[::-1], 45)] == ["4"]
    # 30 leaves 15: a small image still fits after a large one
    assert [picture.file for picture in _within([pictures[2], pictures[1], pictures[0]], 45)] == ["3", "1"]


# --- settings ---


def test_runs_are_labelled_by_their_differences(tmp_path):
    runs = [make_run(tmp_path / f"run{seed}", seed=seed) for seed in range(3)]
    configs = [saved_settings(run) for run in runs]
    assert _labels(configs, ["a", "b", "c"]) == ["seed 0", "seed 1", "seed 2"]
    assert _differences(configs) == [{"key": "seed", "values": ["0", "1", "2"]}]
    # equal settings, too many differences, or no config: folder names
    assert _labels([configs[0]] * 2, ["a", "b"]) == ["a", "b"]
    assert _labels([{"a": 1, "b": 1, "c": 1, "d": 1}, {"a": 2, "b": 2, "c": 2, "d": 2}], ["x", "y"]) == ["x", "y"]
    assert _labels([configs[0], {}], ["a", "b"]) == ["a", "b"]
    assert _short_names([tmp_path / "x" / "run", tmp_path / "y" / "run"]) == ["x/run", "y/run"]


def test_single_run_is_compared_with_the_defaults(tmp_path):
    run = make_run(tmp_path / "run", seed=3)
    config = saved_settings(run)
    assert _differences([config, _defaults(config, run)]) == [{"key": "seed", "values": ["3", "0"]}]
    assert _defaults(config | {"env.name": "not.there:Env"}, run) is None


def test_kinds_of_losses_and_rewards(tmp_path):
    def kinds(**settings):
        return _kinds(flatten(load_config(settings, to_run=False).dump()))

    assert kinds() == {"loss": "ppo", "reward": "dense rewards", "evaluation": "dense rewards"}
    assert kinds(env={"reward": "sparse"})["reward"] == "sparse rewards"
    assert kinds(env={"name": "gym:CartPole-v1"})["evaluation"] == "rewards of gym:CartPole-v1"
    teacher, student = kinds(phase="teacher"), kinds(phase="student")
    assert (teacher["loss"], teacher["reward"]) == ("world model", "accuracy")
    assert (student["loss"], student["reward"]) == ("ppo", "intrinsic reward")
    assert kinds(phase="imitate")["loss"] == "imitation" and _kinds({}) == {}


# --- status ---


def test_running_state_needs_a_held_lock(tmp_path):
    here = {"state": "running", "host": platform.node()}
    run = make_run(tmp_path / "a", **here, pid=os.getpid())
    # the process id may have been reused
    assert _read_status(run)["state"] == "killed"
    lock = take_lock(run)
    assert _read_status(run)["state"] == "running"
    os.close(lock)


def test_running_state_without_locks_needs_a_live_process(tmp_path, monkeypatch):
    monkeypatch.setattr("sparring.runs.listing.is_held", lambda folder: None)
    here = {"state": "running", "host": platform.node()}
    assert _read_status(make_run(tmp_path / "a", **here, pid=os.getpid()))["state"] == "running"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run = make_run(tmp_path / "b", **here, pid=gone.pid)
    assert _read_status(run)["state"] == "killed"


def test_run_of_another_machine_is_running_while_its_lock_is_held(tmp_path):
    run = make_run(tmp_path / "run", state="running", host="another machine")
    assert _read_status(run)["state"] == "killed"
    lock = take_lock(run)
    assert _read_status(run)["state"] == "running"
    os.close(lock)
    assert _read_status(run)["state"] == "killed"


def test_run_without_status_is_unknown(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "status.json").write_text("{")
    assert _read_status(run)["state"] == "unknown"
    assert _read_status(run)["why"] == "status.json cannot be read (not JSON)"
    (run / "status.json").unlink()
    assert _read_status(run)["why"] == "status.json is missing"
    (run / "episode_metrics.jsonl").unlink()
    assert _read_status(run) == {"state": "unknown", "why": "this run has no status.json"}
    assert _read_status(tmp_path / "none")["state"] == "waiting"


# --- a run ---


def test_parts_of_a_run(tmp_path):
    run = open_run(make_run(tmp_path / "run", pictures=True))
    about = run.parts["about"]
    assert (about["state"], about["phase"], about["task"]) == ("finished", "finetune", "reach_d0")
    assert about["best"]["success_rate"] == 0.9 and about["seconds"] == 40
    assert run.parts["metrics"]["behind"] == [[0, 0.25], [1, 0.75]]
    assert run.parts["evaluations"]["curves"]["eval/success_low"]["mean"].tolist() == pytest.approx([0.1, 0.7, 0.6])
    assert [video["success"] for video in run.parts["media"]["videos"]] == [False, True]
    assert [strip["kind"] for strip in run.parts["media"]["strips"]] == ["pred vs gt"]


def test_metrics_and_evaluations_have_a_common_time_axis(tmp_path):
    path = tmp_path / "run"
    write_lines(path / "episode_metrics.jsonl", [{"update": i, "timestamp": BEGAN + 10 * i} for i in (1, 2)])
    write_lines(path / "evaluations.jsonl", [{"update": 2, "eval/reward": 1.0, "timestamp": BEGAN + 25}])
    run = open_run(path)
    assert run.parts["metrics"]["axes"]["timestamp"].tolist() == [0, 10]
    assert run.parts["evaluations"]["axes"]["timestamp"].tolist() == [15]


def test_only_changed_parts_get_a_new_version(tmp_path):
    path = make_run(tmp_path / "run", pictures=True)
    run = open_run(path)
    assert set(run.changed.values()) == {1}
    run.refresh(2)
    assert set(run.changed.values()) == {1}
    write_lines(path / "episode_metrics.jsonl", [metrics_line(21)], "a")
    run.refresh(3)
    # progress is in status.json, which did not change
    assert {name for name, version in run.changed.items() if version == 3} == {"metrics"}
    (path / "samples" / "episode_0200_pred_vs_gt.png").write_bytes(b"x")
    run.refresh(4)
    assert {name for name, version in run.changed.items() if version == 4} == {"media"}


def test_run_folders_are_found_below_a_folder(tmp_path):
    first, second, third = make_run(tmp_path / "a" / "x"), make_run(tmp_path / "seed2"), make_run(tmp_path / "seed10")
    (first / "checkpoint-3").mkdir()
    (first / "checkpoint-3" / "config.yaml").touch()
    assert RunFolder.all_in(tmp_path) == [first, second, third]
    assert RunFolder.all_in(first) == [first]
    with pytest.raises(UserError, match="is a checkpoint; give its run folder: "):
        RunFolder.all_in(first / "checkpoint-3")


# --- the page ---


def test_report_is_one_file_without_external_resources(tmp_path, capsys):
    first = make_run(tmp_path / "a", pictures=True)
    make_run(tmp_path / "b", seed=1)
    with (first / "episode_metrics.jsonl").open("a") as file:
        file.write("</script>\n")
    output = tmp_path / "report.html"
    assert main(["report", str(tmp_path), "--output", str(output)]) == 0
    shown = capsys.readouterr()
    assert shown.out == f"{output}\n"
    assert shown.err == f"'{first}': episode_metrics.jsonl: lines that could not be read, and are left out: 1\n"
    written = output.read_bytes()
    assert not re.search(rb'(src|href)="(?!data:)', written) and b"{{" not in written
    content = content_of(written)
    assert content["together"]["labels"] == ["seed 0", "seed 1"]
    assert content["runs"]["0"]["media"]["videos"][0]["src"].startswith("data:video/mp4;base64,")
    # the complete budget: the other run has no media
    assert content["runs"]["0"]["media"]["budget"] == 30_000_000


def test_report_of_one_run_is_in_its_folder_else_in_the_working_directory(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", seed=1)
    assert main(["report", "a"]) == main(["report", "a", "b"]) == 0
    assert capsys.readouterr().out == "a/report.html\nreport.html\n"
    assert Path("a/report.html").exists() and Path("report.html").exists()


def test_media_stay_within_their_budget(tmp_path):
    run = make_run(tmp_path / "a", pictures=True)
    size = max(file.stat().st_size for file in (run / "videos").glob("*.mp4"))
    output = tmp_path / "report.html"
    megabytes = str(1.5 * size / 1e6)
    assert main(["report", str(run), "--output", str(output), "--media-mb", megabytes]) == 0
    media = content_of(output.read_bytes())["runs"]["0"]["media"]
    assert [video["success"] for video in media["videos"]] == [False] and media["videos_found"] == 2


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["{}/none"], "none': no run there; give run folders, e.g. outputs/finetune_rl"),
        (["{}/run", "--output", "{}/no/report.html"], "cannot be written (No such file or directory)"),
    ],
)
def test_user_errors_are_reported_in_one_line(tmp_path, capsys, words, shown):
    make_run(tmp_path / "run")
    assert main(["report", *(word.format(tmp_path) for word in words)]) == 2
    assert shown in capsys.readouterr().err


def test_text_of_a_run_is_escaped(tmp_path):
    run = make_run(tmp_path / "run", why="</script><script>alert(1)</script>")
    collection = Collection([run], lambda path: RunFolder(path, lambda run, picture: ""))
    collection.refresh()
    made = collection.page(live=False)
    assert b"<script>alert" not in made
    assert content_of(made)["runs"]["0"]["about"]["why"] == "</script><script>alert(1)</script>"
