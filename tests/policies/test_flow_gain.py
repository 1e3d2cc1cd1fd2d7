"""The flow benchmark stores finished runs only."""

import json
import sys
from types import SimpleNamespace

import flow_gain
import pytest
import stages

RATE = {"success": 0.5, "low": 0.4, "high": 0.6}
BOTH = {"ode": RATE, "sde": RATE}
RUN = {"problem": "stack_d0", "seed": 0, "imitated": BOTH, "curve": [{"steps": 9, "seconds": 60.0} | BOTH]}


@pytest.fixture
def run_benchmark(tmp_path, monkeypatch):
    """Run the benchmark with a training that returns `outcome`; return the stored runs."""
    monkeypatch.setattr(flow_gain, "RESULTS", tmp_path / "flow_gain.json")
    monkeypatch.setattr(stages, "RUNS", tmp_path)

    def run_benchmark(outcome, *arguments):
        monkeypatch.setattr(stages.Stages, "run", lambda _: outcome)
        monkeypatch.setattr(sys, "argv", ["flow_gain.py", "stack_d0", "--runs", str(tmp_path / "runs"), *arguments])
        flow_gain.main()
        return json.loads(flow_gain.RESULTS.read_text())["runs"] if flow_gain.RESULTS.is_file() else {}

    return run_benchmark


# without RL, and with interrupted RL
@pytest.mark.parametrize("unfinished", [RUN | {"curve": [], "done": False}, RUN | {"done": False}])
def test_an_unfinished_run_is_not_stored_and_replaces_nothing(run_benchmark, capsys, unfinished):
    assert run_benchmark(unfinished) == {}
    assert "the same call goes on" in capsys.readouterr().out
    finished = RUN | {"done": True}
    assert run_benchmark(finished) == {"stack_d0/0": finished}
    assert run_benchmark(unfinished) == {"stack_d0/0": finished}


def test_a_run_with_other_settings_is_not_stored(run_benchmark):
    assert run_benchmark(RUN | {"done": True}, "--set", "ppo.gamma=0.9") == {}


def test_a_problem_with_a_limit_of_hours_is_finished_there(tmp_path, monkeypatch):
    class Run:
        """A quarter of an hour of training an update, on a clock of its own."""

        def __init__(self, config, quiet):
            self.phase, self.fraction, self.config, self.updates = self, 0.0, config, 0
            self.progress, self.policy = SimpleNamespace(env_steps=0), None

        def step(self, fraction):
            clock.append(clock[-1] + 900)
            self.progress.env_steps += 100
            return {}

        def save(self):
            pass

    clock = [0.0]
    monkeypatch.setattr("sparring.runs.run.Run", Run)
    monkeypatch.setattr(stages.time, "perf_counter", lambda: clock[-1])
    monkeypatch.setattr(stages.Stages, "load", lambda *given: None)
    problem = stages.Problem(("gym:A",), [], 1, 10_000, evaluate_every=200, hours=1)
    one = stages.Stages("a", problem, "b", "c", lambda *given: RATE, 0, tmp_path, 1e6, 1, "cpu", [])
    record = {"seconds": 0.0, "curve": []}
    assert one._fine_tune(record) and record["seconds"] == 3600
    assert [point["steps"] for point in record["curve"]] == [200, 400]
    # a repeated call trains no more
    assert one._fine_tune(record) and clock[-1] == 3600
