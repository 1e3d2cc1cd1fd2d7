"""The encoder thread: order of jobs, full queue without waiting, each error reported once."""

import logging
import re
import threading
import time

import pytest

from sparring.errors import UserError
from sparring.record.log import LOGGER
from sparring.record.videos import _Encoder


@pytest.fixture
def warnings(caplog, monkeypatch):
    """A function that returns the warnings so far."""
    monkeypatch.setattr(logging.getLogger(LOGGER), "propagate", True)
    caplog.set_level(logging.WARNING, LOGGER)
    return lambda: [record.getMessage() for record in caplog.records]


def test_jobs_run_in_order_in_a_thread_that_ends(warnings):
    encoder, done = _Encoder(), []
    for job in range(5):
        assert encoder.submit(lambda job=job: done.append((job, threading.current_thread().name)))
    encoder.finish()
    assert done == [(job, "encoder") for job in range(5)]
    assert "encoder" not in [thread.name for thread in threading.enumerate()]
    # a new job starts a new thread
    encoder.submit(lambda: done.append("one more"))
    encoder.finish()
    assert done[-1] == "one more" and warnings() == []


def test_many_short_jobs_all_run():
    """No job is lost while the thread ends and starts again."""
    encoder, done = _Encoder(), []
    for job in range(300):
        encoder.submit(lambda job=job: done.append(job))
        if job % 7 == 0:
            time.sleep(0.0005)
        while encoder._jobs.full():
            time.sleep(0.0005)
    encoder.finish()
    assert done == list(range(300))


def test_full_queue_drops_jobs_and_reports_their_number(warnings):
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
    (warning,) = warnings()
    assert re.match("3 videos .* left out, as 2 waited; set rollout.render_episodes lower", warning)


def test_failed_job_is_reported_once_per_error(warnings):
    def fail(error):
        raise error

    encoder, done = _Encoder(), []
    for error in (UserError("'1.mp4': no ffmpeg"), UserError("'2.mp4': no ffmpeg"), OSError(28, "disk is full")):
        encoder.submit(lambda error=error: fail(error))
    encoder.submit(lambda: done.append(1))
    encoder.finish()
    assert done == [1]
    first, second = warnings()
    assert "missing: '1.mp4': no ffmpeg" in first and "missing: OSError: [Errno 28] disk is full" in second


def test_finish_has_a_timeout(warnings):
    encoder, gate = _Encoder(), threading.Event()
    encoder.submit(lambda: gate.wait(10))
    encoder.submit(lambda: None)
    encoder.finish(timeout_s=0.1)
    gate.set()
    (warning,) = warnings()
    assert re.match("2 videos .* not ready after 0 s", warning)
    encoder.finish()
