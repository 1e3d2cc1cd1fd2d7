"""A small part of benchmarks/chaos.py: kills, calls that write and fail in a run of two updates, a server's attackers.

Other parts of it are tested elsewhere: test_config_bounds, test_damage, test_run_diverges, test_trust.
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

# what makes a checkpoint, and what makes room for it
POINTS = 8


@pytest.mark.timeout(300)
def test_whatever_write_of_a_save_fails_or_is_the_last_a_checkpoint_is_left_and_the_run_ends_the_same(tmp_path):
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
    # every point was come to
    assert all(trial["verdict"] == "killed" for trial in trials if trial["kind"] == "kill")
    assert {trial["left"] for trial in trials} >= {"checkpoint-2", "checkpoint-4"}


def test_a_run_that_is_killed_twice_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr(preloaded.Popen, "server", preloaded.start_server(), raising=False)
    short = chaos_kills.Case([*chaos_writes.CASES["finetune"], "training.iterations=30"])
    monkeypatch.setitem(chaos_kills.CASES, "short", short)
    reference = chaos_kills.run_reference("short", tmp_path, tmp_path)
    found = chaos_kills.kill_run(short, tmp_path / "killed", reference, tmp_path, random.Random(1), 2, ("saving",))
    assert found["kills"] == found["resumes"] == 2
    assert chaos_kills.is_fine(found), found


@pytest.mark.parametrize("name", ["half-open requests", "paths"])
def test_an_attack_on_the_server_keeps_nobody_out(tmp_path, name):
    run = chaos_server.make_watched_run(tmp_path)
    found = chaos_server.run_attack(run, chaos_server.ATTACKS[name], seconds=2, seed=0)
    assert found["verdict"] == "served" and found["requests"] > 5, found


@pytest.fixture
def part(tmp_path, monkeypatch):
    """`chaos.py kills` with trials of no time: case a has three, one of them bad, and b goes on until it is closed."""
    closed = []

    def trials(name, args, work):
        assert work.is_dir()
        try:
            for number in range(3) if name == "a" else iter(int, 1):
                yield {"verdict": "bad one" if number == 1 else "fine", "count": 2} | ({"of": 3} if name == "a" else {})
                time.sleep(0.001)
        finally:
            closed.append(name)

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))  # and back again afterwards, as it is set for the part
    monkeypatch.setenv("PYTHONPATH", os.environ["PYTHONPATH"])
    part = SimpleNamespace(__doc__="", CASES=("a", "b"), BAD=("bad one",), closed=closed, trials=trials)
    part.add_arguments, part.summary = lambda parser: None, lambda found: {"counted": sum(t["count"] for t in found)}
    monkeypatch.setitem(sys.modules, "chaos_kills", part)
    return part


def test_a_part_ends_with_its_minutes_and_keeps_how_far_it_came(tmp_path, part, capsys):
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
    # another case is kept as it was
    assert chaos.main(["kills", "--minutes", "0.001", "--only", "b", "--output", str(out)]) == 0
    assert json.loads((out / "chaos_kills.json").read_text())["cases"]["a"] == a
