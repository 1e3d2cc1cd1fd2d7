"""Which stream of a GPU threads work on, played by a double of torch.cuda."""

import threading
from types import SimpleNamespace

import pytest
import torch

from sparring.collect.groups import GroupedCollector
from sparring.collect.remote.actor import _prioritise

GPU = torch.device("cuda:1")
USUAL = "the usual stream"


@pytest.fixture
def current(monkeypatch):
    """The stream of each thread."""
    streams = threading.local()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(streams, "now", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(streams, "now", USUAL))
    return lambda: torch.cuda.current_stream(GPU)


def test_acting_goes_before_what_has_the_usual_priority(current):
    _prioritise(torch.device("cpu"))
    assert current() == USUAL
    _prioritise(GPU)
    # of streams, lower numbers are served first
    assert current() == (GPU, -1)


def test_groups_that_simulate_queue_where_the_policy_decides(current):
    _prioritise(GPU)
    env = SimpleNamespace(device=GPU)
    groups = [SimpleNamespace(policy=None, stopwatch=None) for _ in range(2)]
    threads = GroupedCollector(env, groups).threads
    assert [thread.submit(current).result() for thread in threads] == [(GPU, -1)] * 2
    (thread,) = GroupedCollector(SimpleNamespace(device=torch.device("cpu")), groups[:1]).threads
    assert thread.submit(current).result() == USUAL
    # others are not
    seen = []
    other = threading.Thread(target=lambda: seen.append(current()))
    other.start()
    other.join()
    assert seen == [USUAL]
