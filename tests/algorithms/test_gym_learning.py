"""benchmarks/gym_learning.py: the summary of runs."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import gym_learning

    yield gym_learning
    for name in ("gym_learning", "report"):
        sys.modules.pop(name, None)


def run_of(library: str, *scores: float) -> dict:
    curve = [[5_000 * (number + 1), score] for number, score in enumerate(scores)]
    result = {"steps_to_threshold": 5_000, "final_return": scores[-1], "curve": curve}
    return {"library": library, "env": "Pendulum-v1", "seed": 0} | result


def test_the_summary_has_the_last_five_evaluations_and_the_final_one(benchmark):
    ours = run_of("sparring", -900.0, -200.0, -100.0, -300.0, -100.0, -150.0)
    theirs = run_of("sb3", -100.0, -120.0)
    # (200 + 100 + 300 + 100 + 150) / 5; all of a run with fewer
    assert benchmark.mean_of_last(ours) == -170 and benchmark.mean_of_last(theirs) == -110
    text = benchmark.summary({"ours": ours, "theirs": theirs})
    header, _, row, *_ = text.splitlines()
    assert header.endswith("last five: median (min..max)") and row.endswith("-170.0 (-170.0..-170.0)")
    assert text.endswith("final -150.0, theirs from -120.0; last five evaluations -170.0, theirs from -110.0)")
