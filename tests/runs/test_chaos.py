"""A small part of benchmarks/chaos.py: kills, and calls that write and fail, in a run of two updates."""

import json
import os
import random
import subprocess
import sys

import chaos_kills
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
    words = [
        sys.executable,
        chaos_writes.__file__,
        "finetune",
        str(tmp_path),
        "0",
        "200",
        str(POINTS),
        "kill",
        "ENOSPC",
    ]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    about, *trials = map(json.loads, done.stdout.splitlines())
    assert about["points of the checkpoint"] >= 30
    assert [told for told in trials if told["verdict"] in chaos_writes.BAD] == []
    assert len(trials) == 2 * POINTS
    # every point was come to
    assert all(told["verdict"] == "killed" for told in trials if told["kind"] == "kill")
    assert {told["left"] for told in trials} >= {"checkpoint-2", "checkpoint-4"}


def test_a_run_that_is_killed_twice_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    monkeypatch.setattr(preloaded.Popen, "server", preloaded.start_server(), raising=False)
    short = chaos_kills.Case([*chaos_writes.CASES["finetune"], "training.iterations=30"])
    monkeypatch.setitem(chaos_kills.CASES, "short", short)
    reference = chaos_kills.undisturbed("short", tmp_path, tmp_path)
    told = chaos_kills.killed(short, tmp_path / "killed", reference, tmp_path, random.Random(1), 2, ("saving",))
    assert told["kills"] == told["resumes"] == 2
    assert chaos_kills.is_fine(told), told
