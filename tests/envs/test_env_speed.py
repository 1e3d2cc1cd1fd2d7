"""The speed benchmark: sides are measured in alternation, raise errors, and must render the same images."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def scripts(monkeypatch):
    """The modules env_speed and env_turns, which are scripts outside the package."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import env_speed
    import env_turns

    yield env_speed, env_turns
    for name in ("env_speed", "env_turns", "report"):
        sys.modules.pop(name, None)


class Recorded:
    """A side that takes a known time and records its calls."""

    def __init__(self, name, seconds, order):
        self.name, self.seconds, self.order, self.about = name, iter(seconds), order, {"frames": 2}

    def settle(self, seconds):
        self.order.append(f"settle {self.name}")

    def seconds_per_turn(self):
        self.order.append(self.name)
        return next(self.seconds)

    def close(self):
        self.order.append(f"close {self.name}")


def test_sides_alternate_their_order_and_medians_are_reported(scripts):
    order = []
    sides = {"a": Recorded("a", [1.0, 9.0, 2.0], order), "b": Recorded("b", [4.0, 3.0, 5.0], order)}
    measured = scripts[1].take_turns(sides, rounds=3, seconds=0.1)
    assert order == ["settle a", "settle b", "a", "b", "b", "a", "a", "b", "close a", "close b"]
    assert measured["a"] == {"seconds": 2.0, "all_seconds": [1.0, 9.0, 2.0], "frames": 2}
    assert measured["b"]["seconds"] == 4.0


def test_a_worker_reports_seconds_per_turn(scripts):
    worker = scripts[1].Worker("suite_step", task="stack_d0", robots=3, threads=1, cameras=[])
    worker.settle(0.05)
    assert worker.turns > 1 and 0 < worker.seconds_per_turn() < 0.05
    worker.close()
    assert worker.about["simulated_seconds"] == pytest.approx(3 * 0.04)
    assert 0 < worker.about["kib_per_robot"] < 10_000


def test_the_error_of_a_side_that_ends_states_the_cause(scripts):
    with pytest.raises(scripts[1].SideFailed, match="(?s)no_such_kind ended: .*KeyError: 'no_such_kind'"):
        scripts[1].Worker("no_such_kind")


@pytest.mark.parametrize("target, met", [(("ratio", ">=", 1.7), False), (("value", "<=", 220), True)])
def test_targets(scripts, target, met):
    result = scripts[0].answer("a", "64 px", "side", value=219.6, ratio=1.65, numbers={"frames": 2}, target=target)
    assert result["met"] is met and result["target"] == f"{target[1]} {target[2]}" and result["frames"] == 2
    assert ("met" if met else "MISSED") in scripts[0].as_table("a", [result])


def test_a_side_with_an_empty_image_is_refused(scripts):
    ramp, empty = [[float(i) for i in range(256)]] * 2, [[0.0] * 256] * 2
    scripts[0].check_same_pictures({"sparring": ramp, "brighter": [[2 * x + 5 for x in camera] for camera in ramp]})
    with pytest.raises(RuntimeError, match="empty: the head camera shows something else"):
        scripts[0].check_same_pictures({"sparring": ramp, "empty": empty})
