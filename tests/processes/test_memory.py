"""Shared memory files: removal of stale files, and reserved space."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

import sparring
from sparring.errors import UserError
from sparring.processes.memory import Column, SharedHandle, SharedMemory, _sweep


def of_bytes(size: int) -> dict:
    return {("x",): Column((size,), np.dtype("uint8"))}


def test_stale_files_of_killed_processes_are_removed_and_used_ones_kept(tmp_path):
    code = f"""
import os, signal
import numpy as np
from pathlib import Path
from sparring.processes.memory import Column, SharedMemory
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


def test_space_is_reserved_or_refused(tmp_path, monkeypatch):
    reserved = SharedMemory.make(of_bytes(1 << 20), tmp_path)
    assert reserved.handle.file.stat().st_blocks * 512 >= 1 << 20
    del reserved

    def make_with_error(number):
        def fail(handle, offset, length):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "posix_fallocate", fail)
        return SharedMemory.make(of_bytes(1 << 20), tmp_path, "the videos", "a smaller room")

    for no_space in (errno.ENOSPC, errno.EDQUOT):
        with pytest.raises(UserError, match="the videos needs 1 MiB, but .* free; choose a smaller room"):
            make_with_error(no_space)
    with pytest.raises(OSError, match="Input/output error"):
        make_with_error(errno.EIO)
    assert list(tmp_path.iterdir()) == []
    # a file system without fallocate
    assert make_with_error(errno.EOPNOTSUPP).handle.file.stat().st_size == 1 << 20


def test_file_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
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


def test_missing_or_short_file_is_not_attached(tmp_path):
    missing, short = tmp_path / "missing", tmp_path / "short"
    with pytest.raises(FileNotFoundError):
        SharedMemory.attach(SharedHandle(missing, of_bytes(64)))
    short.write_bytes(b"7" * 63)
    with pytest.raises(ValueError):
        SharedMemory.attach(SharedHandle(short, of_bytes(64)))
    # neither file was created or extended
    assert not missing.exists() and short.stat().st_size == 63


def test_tensors_first_read_in_inference_mode_are_writable(tmp_path):
    memory = SharedMemory.make({("x",): Column((64,), torch.uint8)}, tmp_path)
    with torch.inference_mode():
        before = memory.tensors["x",].clone()
    memory.tensors["x",].add_(7)
    assert (memory.bytes == before.numpy() + 7).all()
