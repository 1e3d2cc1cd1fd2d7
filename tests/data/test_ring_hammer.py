"""Two processes at one ring; `benchmarks/data.py --hammer 60` does the same for longer."""

import sys
from pathlib import Path

import pytest

from sparring.data.ring import VLABuffer


@pytest.fixture
def hammer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import ring_hammer

    yield ring_hammer.hammer
    sys.modules.pop("ring_hammer")


def test_a_reader_process_never_sees_a_torn_transition(hammer):
    counts = hammer(2.5)
    assert (counts["wrong"], counts["disorder"]) == (0, 0)
    assert counts["written"] > 1000 and counts["sampled"] > 1000 and counts["got"] > 1000


def test_a_writer_that_says_too_late_what_it_overwrites_is_noticed(hammer, monkeypatch):
    allocate = VLABuffer.allocate

    def allocate_too_little(ring, td):
        allocate(ring, td)
        ring.capacity += 1

    monkeypatch.setattr(VLABuffer, "allocate", allocate_too_little)
    counts = hammer(1.5)
    assert counts["wrong"] + counts["disorder"] > 0
