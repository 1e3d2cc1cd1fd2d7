"""Files that are memory: what killed processes leave is swept, and room is there or refused."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import sparring
from sparring.errors import UserError
from sparring.processes.storage import Memory, _sweep


def test_what_a_killed_process_shared_is_swept_and_what_is_in_use_is_not(tmp_path):
    code = f"""
import os, signal
from sparring.processes.storage import Memory
from pathlib import Path
memory = Memory.in_file(4096, 4096, Path({str(tmp_path)!r}), shared=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(sparring.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=environment)
    (left,) = tmp_path.iterdir()
    one, two = (Memory.in_file(4096, 4096, tmp_path, shared=True) for _ in range(2))
    assert set(tmp_path.iterdir()) == {one.file, two.file} and not left.exists()
    del one, two
    assert list(tmp_path.iterdir()) == []


def test_room_that_is_reserved_is_there_or_refused(tmp_path, monkeypatch):
    sparse, reserved = (Memory.in_file(1 << 20, 1 << 20, tmp_path, True, reserved=r) for r in (False, True))
    assert sparse.file.stat().st_blocks == 0 and reserved.file.stat().st_blocks * 512 >= 1 << 20
    del sparse, reserved

    def in_a_file_system_that_says(number):
        def say(handle, offset, length):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", say)
        return Memory.in_file(1 << 20, 1 << 20, tmp_path, True, "the films", "a smaller room", reserved=True)

    for taken in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(UserError, match="the films needs 1.0 MB, but .* free; choose a smaller room"):
            in_a_file_system_that_says(taken)
    with pytest.raises(OSError, match="Input/output error"):
        in_a_file_system_that_says(errno.EIO)
    assert list(tmp_path.iterdir()) == []
    # one that cannot reserve
    assert in_a_file_system_that_says(errno.EOPNOTSUPP).file.stat().st_size == 1 << 20


def test_a_file_that_is_swept_before_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    make, made = tempfile.mkstemp, []

    def make_and_sweep(**where):
        made.append(make(**where))
        if len(made) == 1:
            _sweep(tmp_path)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkstemp", make_and_sweep)
    memory = Memory.in_file(64, 64, tmp_path, shared=True)
    assert len(made) == 2 and str(memory.file) == made[1][1]
    _sweep(tmp_path)
    memory.data.fill_(7)
    assert (Memory.open(memory.file, 64).data == 7).all()


def test_what_is_not_there_as_it_was_made_is_not_opened(tmp_path):
    missing, short = tmp_path / "missing", tmp_path / "short"
    with pytest.raises(FileNotFoundError):
        Memory.open(missing, 64)
    short.write_bytes(b"7" * 63)
    with pytest.raises(ValueError, match="has 63 bytes, not 64"):
        Memory.open(short, 64)
    # and neither made nor lengthened
    assert not missing.exists() and short.stat().st_size == 63
