"""Jobs are done elsewhere, in order; training never waits for them, and what goes wrong is told once."""

import logging
import re
import threading
import time

import pytest

from sparring.errors import UserError
from sparring.record.log import LOGGER
from sparring.record.videos import _Encoder


@pytest.fixture
def told(caplog, monkeypatch):
    """Warnings so far."""
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", True)
    caplog.set_level(logging.WARNING, LOGGER)
    return lambda: [record.getMessage() for record in caplog.records]


def test_jobs_are_done_in_order_in_a_thread_that_ends(told):
    encoder, done = _Encoder(), []
    for job in range(5):
        assert encoder.submit(lambda job=job: done.append((job, threading.current_thread().name)))
    encoder.finish()
    assert done == [(job, "encoder") for job in range(5)]
    assert "encoder" not in [thread.name for thread in threading.enumerate()]
    # and again
    encoder.submit(lambda: done.append("one more"))
    encoder.finish()
    assert done[-1] == "one more" and told() == []


def test_many_short_jobs_are_all_done():
    """The thread ends and begins again and again; none falls between."""
    encoder, done = _Encoder(), []
    for job in range(300):
        encoder.submit(lambda job=job: done.append(job))
        if job % 7 == 0:
            time.sleep(0.0005)
        while encoder._jobs.full():
            time.sleep(0.0005)
    encoder.finish()
    assert done == list(range(300))


def test_a_full_queue_leaves_out_without_waiting_and_says_how_many(told):
    encoder, gate, done = _Encoder(waiting=2), threading.Event(), []
    begun = threading.Event()
    encoder.submit(lambda: (begun.set(), gate.wait(10)))
    assert begun.wait(10)
    started = time.monotonic()
    taken = [encoder.submit(lambda job=job: done.append(job)) for job in range(5)]
    assert taken == [True, True, False, False, False] and time.monotonic() - started < 1
    gate.set()
    encoder.finish()
    assert done == [0, 1]
    (warning,) = told()
    assert re.match("3 videos .* left out, as 2 waited; set rollout.render_episodes lower", warning)


def test_what_goes_wrong_costs_one_job_and_is_told_once(told):
    def fail(error):
        raise error

    encoder, done = _Encoder(), []
    for error in (UserError("'1.mp4': no ffmpeg"), UserError("'2.mp4': no ffmpeg"), OSError(28, "disk is full")):
        encoder.submit(lambda error=error: fail(error))
    encoder.submit(lambda: done.append(1))
    encoder.finish()
    assert done == [1]
    first, second = told()
    assert "missing: '1.mp4': no ffmpeg" in first and "missing: OSError: [Errno 28] disk is full" in second


def test_finishing_has_an_end(told):
    encoder, gate = _Encoder(), threading.Event()
    encoder.submit(lambda: gate.wait(10))
    encoder.submit(lambda: None)
    encoder.finish(timeout_s=0.1)
    gate.set()
    (warning,) = told()
    assert re.match("2 videos .* not ready after 0 s", warning)
    encoder.finish()
