"""Large tensors of a message go through shared memory, the rest of it otherwise."""

import errno
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import sparring
from sparring.errors import UserError
from sparring.processes.shared_memory import LARGE, Column, SharedHandle, SharedMemory, TensorSlots, _InSlot, _sweep


def message(number: int, size: int = LARGE) -> dict:
    large = torch.full((size,), number, dtype=torch.uint8)
    return {"groups": [{"root": {"image": large}, "env": None}, {"small": torch.tensor([number])}], "version": number}


def same(one: dict, other: dict) -> bool:
    images = [told["groups"][0]["root"]["image"] for told in (one, other)]
    small = [told["groups"][1]["small"] for told in (one, other)]
    return torch.equal(*images) and torch.equal(*small) and one["version"] == other["version"]


def test_what_arrives_is_what_was_sent_and_the_pipe_carries_none_of_it(tmp_path):
    slots = TensorSlots(2, tmp_path)
    sent = [slots.take_out(message(number), number) for number in (4, 5)]
    assert sent[0]["groups"][0]["root"]["image"] == _InSlot(("groups", "0", "root", "image"))
    assert len(pickle.dumps(sent[0])) < 2000
    shared = SharedMemory.attach(slots.shared.handle)
    assert all(same(TensorSlots.put_back(told, shared, told["version"]), message(told["version"])) for told in sent)
    # nothing is left on the disk
    assert not list(tmp_path.iterdir())


def test_a_slot_is_written_again_without_changing_what_was_received(tmp_path):
    slots = TensorSlots(2, tmp_path)
    got = TensorSlots.put_back(slots.take_out(message(0), 0), slots.shared, 0)
    slots.take_out(message(1), 1)
    slots.take_out(message(2), 2)
    assert same(got, message(0))


def test_what_does_not_fit_stays_in_its_message(tmp_path):
    slots = TensorSlots(1, tmp_path)
    slots.take_out(message(0), 0)
    longer = slots.take_out(message(1, LARGE + 1), 1)
    assert same(longer, message(1, LARGE + 1))
    assert same(TensorSlots.put_back(longer, slots.shared, 1), message(1, LARGE + 1))
    new = {"other": torch.zeros(LARGE)}
    assert slots.take_out(new, 2)["other"] is new["other"]


def test_where_the_first_message_has_nothing_large_all_stays_in_messages(tmp_path):
    # the receiver is told with the first one where large tensors lie
    slots = TensorSlots(1, tmp_path)
    small = {"version": 3}
    assert slots.take_out(small, 0) == small
    assert same(slots.take_out(message(1), 1), message(1)) and slots.shared is None
    assert same(TensorSlots.put_back(message(1), None, 1), message(1))


# ---- files that are memory: what killed processes leave is swept, and room is there or refused


def of_bytes(size: int) -> dict:
    return {("x",): Column((size,), np.dtype("uint8"))}


def test_what_a_killed_process_shared_is_swept_and_what_is_in_use_is_not(tmp_path):
    code = f"""
import os, signal
import numpy as np
from pathlib import Path
from sparring.processes.shared_memory import Column, SharedMemory
memory = SharedMemory.make({{("x",): Column((4096,), np.dtype("uint8"))}}, Path({str(tmp_path)!r}))
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(sparring.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment)
    (left,) = tmp_path.iterdir()
    one, two = (SharedMemory.make(of_bytes(4096), tmp_path) for _ in range(2))
    assert set(tmp_path.iterdir()) == {one.handle.file, two.handle.file} and not left.exists()
    del one, two
    assert list(tmp_path.iterdir()) == []


def test_room_that_is_reserved_is_there_or_refused(tmp_path, monkeypatch):
    reserved = SharedMemory.make(of_bytes(1 << 20), tmp_path)
    assert reserved.handle.file.stat().st_blocks * 512 >= 1 << 20
    del reserved

    def in_a_file_system_that_says(number):
        def say(handle, offset, length):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", say)
        return SharedMemory.make(of_bytes(1 << 20), tmp_path, "the films", "a smaller room")

    for taken in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(UserError, match="the films needs 1.0 MB, but .* free; choose a smaller room"):
            in_a_file_system_that_says(taken)
    with pytest.raises(OSError, match="Input/output error"):
        in_a_file_system_that_says(errno.EIO)
    assert list(tmp_path.iterdir()) == []
    # one that cannot reserve
    assert in_a_file_system_that_says(errno.EOPNOTSUPP).handle.file.stat().st_size == 1 << 20


def test_a_file_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    make, made = tempfile.mkstemp, []

    def make_and_sweep(**where):
        made.append(make(**where))
        if len(made) == 1:
            _sweep(tmp_path)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkstemp", make_and_sweep)
    memory = SharedMemory.make(of_bytes(64), tmp_path)
    assert len(made) == 2 and str(memory.handle.file) == made[1][1]
    _sweep(tmp_path)
    memory.bytes.fill(7)
    assert (SharedMemory.attach(memory.handle).bytes == 7).all()


def test_what_is_not_there_as_it_was_made_is_not_opened(tmp_path):
    missing, short = tmp_path / "missing", tmp_path / "short"
    with pytest.raises(FileNotFoundError):
        SharedMemory.attach(SharedHandle(missing, of_bytes(64)))
    short.write_bytes(b"7" * 63)
    with pytest.raises(ValueError):
        SharedMemory.attach(SharedHandle(short, of_bytes(64)))
    # and neither made nor lengthened
    assert not missing.exists() and short.stat().st_size == 63
