"""benchmarks/phases/retrain.py: grouping of steps into decisions, and errors averaged over pixels."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

EPISODES, STEPS, CHUNK = 2, 10, 4


@pytest.fixture
def retrain(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "phases"))
    import retrain

    return retrain


def test_decisions_span_the_observations_around_their_steps(retrain):
    # [E, T]: the time, and the time after the step
    time = torch.arange(STEPS).expand(EPISODES, -1).clone()
    steps = TensorDict(
        {
            "observation": {"state": time, "task": torch.full_like(time, 3)},
            "action": time[..., None, None] + torch.tensor([0.0, 0.5]),
            "is_first": time == 0,
            "mask": torch.ones_like(time, dtype=torch.bool),
            "next": {"observation": {"state": time + 1}},
        },
        [EPISODES, STEPS],
    )
    decisions = retrain.in_decisions(steps, CHUNK)
    assert decisions.batch_size == (EPISODES, 2)
    assert decisions["observation", "state"].tolist() == [[0, 4]] * EPISODES
    assert decisions["next", "observation", "state"].tolist() == [[4, 8]] * EPISODES
    assert decisions["action"][1, 1].tolist() == [[4.0, 4.5], [5.0, 5.5], [6.0, 6.5], [7.0, 7.5]]
    assert decisions["is_first"].tolist() == [[True, False]] * EPISODES
    assert not decisions["observation", "task"].any()
    # the input is unchanged
    assert (steps["observation", "task"] == 3).all()


def test_pooled_errors_weigh_pixels_equally(retrain):
    few, many = ({"pixels": pixels} | dict.fromkeys(retrain.SOURCES, error) for pixels, error in ((1, 0.8), (3, 0.4)))
    together = retrain.pooled([few, many])
    assert together["pixels"] == 4 and together["explorer"] == pytest.approx(0.5)
