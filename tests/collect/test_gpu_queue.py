"""The CUDA stream of each thread, with a double of torch.cuda."""

import threading
from types import SimpleNamespace

import pytest
import torch

from sparring.collect.groups import GroupedCollector
from sparring.collect.remote.actor import _prioritise

GPU = torch.device("cuda:1")
DEFAULT = "the usual stream"


@pytest.fixture
def current(monkeypatch):
    """The stream of each thread."""
    streams = threading.local()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(streams, "now", stream))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: getattr(streams, "now", DEFAULT))
    return lambda: torch.cuda.current_stream(GPU)


def test_acting_thread_has_a_stream_of_high_priority(current):
    _prioritise(torch.device("cpu"))
    assert current() == DEFAULT
    _prioritise(GPU)
    # lower numbers are higher priorities
    assert current() == (GPU, -1)


def test_threads_of_groups_use_the_stream_of_the_acting_thread(current):
    _prioritise(GPU)
    env = SimpleNamespace(device=GPU)
    groups = [SimpleNamespace(policy=None, stopwatch=None) for _ in range(2)]
    threads = GroupedCollector(env, groups).threads
    assert [thread.submit(current).result() for thread in threads] == [(GPU, -1)] * 2
    (thread,) = GroupedCollector(SimpleNamespace(device=torch.device("cpu")), groups[:1]).threads
    assert thread.submit(current).result() == DEFAULT
    # other threads keep the default stream
    seen = []
    other = threading.Thread(target=lambda: seen.append(current()))
    other.start()
    other.join()
    assert seen == [DEFAULT]
