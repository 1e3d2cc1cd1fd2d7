"""A small part of benchmarks/chaos.py: kills, failing writes in a run of two updates, attacks on the server.

Tests of other parts: test_config_bounds, test_damage, test_run_diverges, test_trust.
"""

import json
import os
import random
import subprocess
import sys
import time
from types import SimpleNamespace

import chaos
import chaos_kills
import chaos_server
import chaos_writes
import preloaded
import pytest
import write_faults

# tested writes: of a checkpoint, and of the removal of an old one
POINTS = 8


@pytest.mark.timeout(300)
def test_failing_or_interrupted_writes_of_a_save_keep_a_checkpoint(tmp_path):
    library = write_faults.build(tmp_path)
    if library is None:
        pytest.skip("needs Linux and a C compiler")
    words = [sys.executable, chaos_writes.__file__, "finetune", str(tmp_path), "0", "0", "1", "kill", "ENOSPC"]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        words, input="\n" * 2 * POINTS, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    about, *trials = map(json.loads, done.stdout.splitlines())
    assert about["points of the checkpoint"] >= 30
    assert [trial for trial in trials if trial["verdict"] in chaos_writes.BAD] == []
    assert len(trials) == 2 * POINTS
    # every point was reached
    assert all(trial["verdict"] == "killed" for trial in trials if trial["kind"] == "kill")
    assert {trial["left"] for trial in trials} >= {"checkpoint-2", "checkpoint-4"}


def test_killed_run_ends_like_an_undisturbed_one(tmp_path, monkeypatch):
    monkeypatch.setattr(preloaded.Popen, "server", preloaded.start_server(), raising=False)
    short = chaos_kills.Case([*chaos_writes.CASES["finetune"], "training.iterations=30"])
    monkeypatch.setitem(chaos_kills.CASES, "short", short)
    reference = chaos_kills.run_reference("short", tmp_path, tmp_path)
    found = chaos_kills.kill_run(short, tmp_path / "killed", reference, tmp_path, random.Random(1), 2, ("saving",))
    assert found["kills"] == found["resumes"] == 2
    assert chaos_kills.is_fine(found), found


@pytest.mark.parametrize("name", ["half-open requests", "paths"])
def test_attacked_server_stays_available(tmp_path, name):
    run = chaos_server.make_watched_run(tmp_path)
    found = chaos_server.run_attack(run, chaos_server.ATTACKS[name], seconds=2, seed=0)
    assert found["verdict"] == "served" and found["requests"] > 5, found


@pytest.fixture
def part(tmp_path, monkeypatch):
    """`chaos.py kills` with instant trials: case a has three, one of them bad; case b is endless."""
    closed = []

    def trials(name, args, work):
        assert work.is_dir()
        try:
            for number in range(3) if name == "a" else iter(int, 1):
                yield {"verdict": "bad one" if number == 1 else "fine", "count": 2} | ({"of": 3} if name == "a" else {})
                time.sleep(0.001)
        finally:
            closed.append(name)

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # chaos.py sets it; monkeypatch restores it
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"])
    part = SimpleNamespace(__doc__="", CASES=("a", "b"), BAD=("bad one",), closed=closed, trials=trials)
    part.add_arguments, part.summary = lambda parser: None, lambda found: {"counted": sum(t["count"] for t in found)}
    monkeypatch.setitem(sys.modules, "chaos_kills", part)
    return part


def test_part_stops_at_its_time_limit_and_writes_its_results(tmp_path, part, capsys):
    out = tmp_path / "out"
    began = time.monotonic()
    assert chaos.main(["kills", "--minutes", "0.01", "--output", str(out)]) == 1
    assert 0.6 <= time.monotonic() - began < 10
    kept = json.loads((out / "chaos_kills.json").read_text())
    a, b = kept["cases"]["a"], kept["cases"]["b"]
    assert (a["trials"], a["of"], a["complete"], a["fine"], a["bad one"], a["counted"]) == (3, 3, True, 2, 1, 6)
    assert (
        a["bad"] == [{"verdict": "bad one", "count": 2, "of": 3}] and a["about"]["seed"] == 0 and a["about"]["commit"]
    )
    assert b["trials"] > 10 and not b["complete"] and b["bad"] == []
    assert kept["total"] == {**kept["total"], "cases": 2, "trials": 3 + b["trials"], "bad": 1}
    assert sorted(part.closed) == ["a", "b"]
    assert "0.01 min were over before the end of 1 of 2 cases\n" in capsys.readouterr().out
    # results of other cases are kept
    assert chaos.main(["kills", "--minutes", "0.001", "--only", "b", "--output", str(out)]) == 0
    assert json.loads((out / "chaos_kills.json").read_text())["cases"]["a"] == a
