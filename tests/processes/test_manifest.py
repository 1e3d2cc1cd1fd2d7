"""Files that are hashed while they are written."""

import errno
import os

import pytest
import torch

from sparring.processes import manifest
from sparring.processes.manifest import HashedFile, entry


@pytest.mark.parametrize("sizes", [[], [0], [1, 70_000, 2], [200_000, 65_536, 65_535, 300_000]])
def test_what_is_told_of_a_file_is_what_is_on_the_disk(tmp_path, sizes, monkeypatch):
    monkeypatch.setattr(manifest, "_SYNC_BYTES", 100_000)
    blocks = [os.urandom(size) for size in sizes]
    with HashedFile(tmp_path / "x") as file:
        assert [file.write(block) for block in blocks] == sizes
    assert (tmp_path / "x").read_bytes() == b"".join(blocks)
    assert file.entry == entry(tmp_path / "x")


def test_a_block_may_be_changed_once_it_is_written(tmp_path):
    block = bytearray(1 << 20)
    with HashedFile(tmp_path / "x") as file:
        for number in range(20):
            block[:] = bytes([number]) * len(block)
            file.write(block)
    assert file.entry == entry(tmp_path / "x")


def test_torch_saves_into_it(tmp_path):
    state = {"tensor": torch.randn(300, 300), "plain": [1, "a"]}
    with HashedFile(tmp_path / "x") as file:
        torch.save(state, file)
    loaded = torch.load(tmp_path / "x", weights_only=True)
    assert torch.equal(loaded["tensor"], state["tensor"]) and loaded["plain"] == state["plain"]
    assert file.entry == entry(tmp_path / "x")


def test_a_disk_that_fails_once_is_told_of(tmp_path, monkeypatch):
    failures = [OSError(errno.EIO, "Input/output error")]

    def fdatasync(descriptor):
        if failures:
            raise failures.pop()

    monkeypatch.setattr(manifest, "_SYNC_BYTES", 100_000)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    with pytest.raises(OSError, match="Input/output"), HashedFile(tmp_path / "x") as file:
        for _ in range(5):
            file.write(bytes(100_000))
    assert not failures and file.entry == {}


def test_a_full_disk_ends_a_save_by_torch(tmp_path, monkeypatch):
    file = HashedFile(tmp_path / "x")
    file._opened.close()
    file._opened = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(OSError, match="No space"), file:
        torch.save({"tensor": torch.zeros(100_000)}, file)
