"""Damaged files of a run folder (benchmarks/corruption_ways.py): changed numbers are never shown without a warning."""

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from small_runs import config_in

from sparring.cli.main import main
from sparring.errors import UserError
from sparring.report.run_folder import RunFolder
from sparring.runs import train_all
from sparring.runs.listing import find_runs
from sparring.runs.run import Run

ROOT_FILES = ["config.yaml", "status.json", "episode_metrics.jsonl", "evaluations.jsonl", "manifest.json"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    training = {"iterations": 4, "save_every": 2, "keep_checkpoints": 1}
    run = Run(config_in(folder, training=training, evaluation={"episodes": 2, "every": 1, "baseline": False}))
    assert run.run()
    return folder


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run", symlinks=True)


def reported_by(folder: Path) -> tuple[object, list[str]]:
    """What report, runs and prune show of a run, and the damage that they report."""
    run = RunFolder(folder, lambda *_: "")
    run.refresh(1)
    damage = run.parts["about"].pop("damage")
    (state,) = find_runs(folder)
    damage += [state.why] if state.why else []
    shown = {name: run.parts[name] for name in ("metrics", "evaluations", "timeline", "about")}
    status = [state.phase, state.task, state.state, state.updates, state.env_steps, state.fraction, state.best]
    plain = lambda value: value.tolist() if isinstance(value, np.ndarray) else str(value)  # noqa: E731
    return json.dumps([shown, run.config, status], default=plain), damage


@pytest.mark.parametrize("name", ROOT_FILES)
def test_damage_of_run_files_is_always_reported(trained, copied, monkeypatch, name):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from corruption_ways import ways

    shutil.rmtree(copied)
    shutil.copytree(trained, copied, symlinks=True)
    usual, nothing = reported_by(copied)
    assert nothing == []
    applied = differ = 0
    for way in ways(name, random.Random(0)):
        # contents of checkpoints are not read
        shutil.rmtree(copied)
        shutil.copytree(trained, copied, symlinks=True, ignore=shutil.ignore_patterns("*.pt", "logs"))
        try:
            way.damage(copied, copied.parent)
        except (KeyError, IndexError):  # not applicable to this file
            continue
        shown, damage = reported_by(copied)
        applied, differ = applied + 1, differ + (shown != usual)
        assert shown == usual or damage, way.name
    assert applied > 20 and (differ > 20 or name == "manifest.json")


def test_resume_reports_an_altered_config(copied, monkeypatch):
    warnings = []
    monkeypatch.setattr("sparring.runs.run.log.warning", lambda words, *values: warnings.append(words % values))
    settings = yaml.safe_load((copied / "config.yaml").read_text())
    further = config_in(copied, training=settings["training"] | {"iterations": 5}, evaluation=settings["evaluation"])
    (copied / "config.yaml").write_text((copied / "config.yaml").read_text().replace("iterations: 4", "iterations: 3"))
    Run(further)
    what = "config.yaml does not match its checksum"
    assert warnings == [f"'{copied}': {what}; written again from checkpoint-4"]
    # now it matches its checksum
    Run(further)
    assert len(warnings) == 1


def test_resume_reports_an_altered_status(copied, monkeypatch):
    warnings = []
    monkeypatch.setattr("sparring.runs.folder.log.warning", lambda words, *values: warnings.append(words % values))
    file = copied / "status.json"
    file.write_text(file.read_text().replace('"updates": 4', '"updates": 5'))
    Run(config_in(copied, training={"iterations": 4, "save_every": 2, "keep_checkpoints": 1}))
    why = "status.json is damaged: its checksum does not match"
    assert warnings == [f"'{copied}': {why}; the earlier status of the run is lost"]


def test_commands_report_damage(copied, tmp_path, capsys):
    lines = (copied / "episode_metrics.jsonl").read_text().splitlines(keepends=True)
    (copied / "episode_metrics.jsonl").write_text(lines[0] + lines[2])
    (copied / "status.json").write_text((copied / "status.json").read_text().replace("finished", "fxnished"))
    assert main(["report", str(copied), "--output", str(tmp_path / "page.html")]) == 0
    damaged = "status.json is damaged: its checksum does not match"
    assert capsys.readouterr().err == f"'{copied}': {damaged}\n'{copied}': episode_metrics.jsonl: rows missing: 2\n"
    assert "rows missing: 2" in (tmp_path / "page.html").read_text()
    assert main(["runs", str(copied)]) == 0
    assert damaged in capsys.readouterr().out


def test_missing_last_rows_of_an_ended_run_are_reported(copied):
    lines = (copied / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (copied / "evaluations.jsonl").write_text("".join(lines[:-2]))
    assert reported_by(copied)[1] == [f"evaluations.jsonl: the last 2 of {len(lines)} rows are missing"]


def test_train_all_refuses_damaged_results(copied):
    file = copied / "evaluation.json"
    file.write_text(file.read_text().replace('"episodes": 2', '"episodes": 3', 1))
    again = f"remove '{copied.parent / 'all.json'}' and run the same command to evaluate its phases again"
    with pytest.raises(UserError) as error:
        train_all._evaluation_of(copied)
    assert str(error.value) == f"'{copied}': evaluation.json is damaged: its checksum does not match; {again}"
