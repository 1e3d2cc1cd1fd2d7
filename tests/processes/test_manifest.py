"""Files that are hashed while they are written."""

import errno
import hashlib
import json
import os
import zlib

import pytest
import torch

from sparring.processes import manifest
from sparring.processes.manifest import (
    HashedFile,
    ManifestError,
    damage,
    entry,
    is_signed,
    read_manifest,
    sign,
    write_manifest,
)


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


def test_tensors_have_a_crc32_and_all_else_a_sha256(tmp_path):
    content = os.urandom(300_000)
    files = {name: tmp_path / name for name in ("model.safetensors", "training_state.pt", "config.yaml", "index.json")}
    for name, path in files.items():
        with HashedFile(path) as file:
            file.write(content)
        tensors = name.endswith(("t", "s"))
        checksum = (
            {"crc32": f"{zlib.crc32(content):08x}"} if tensors else {"sha256": hashlib.sha256(content).hexdigest()}
        )
        assert file.entry == entry(path) == {"size": 300_000} | checksum
    # the entry says which: earlier versions wrote a SHA-256 of everything
    sha256 = {name: {"size": 300_000, "sha256": hashlib.sha256(content).hexdigest()} for name in files}
    assert damage(tmp_path, {"files": sha256}) == []
    files["model.safetensors"].write_bytes(bytes([content[0] ^ 1]) + content[1:])
    crc32 = {"model.safetensors": {"size": 300_000, "crc32": f"{zlib.crc32(content):08x}"}}
    for listed in (sha256, crc32):
        wrong = ["model.safetensors has another checksum than when it was written"]
        assert damage(tmp_path, {"files": listed}) == wrong


def test_a_crc32_binds_no_config(tmp_path):
    """It can be forged: a config that a stranger's manifest lists by it would be signed, and replaced later."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    size, crc32 = 8, f"{zlib.crc32(b'seed: 1' + bytes([10])):08x}"
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": 1, "kind": "checkpoint", "files": {"config.yaml": {"size": size, "crc32": crc32}}})
    )
    assert damage(tmp_path, read_manifest(tmp_path)) == ["config.yaml has another checksum than when it was written"]
    with pytest.raises(ManifestError, match="is damaged: config.yaml has another checksum"):
        sign(tmp_path, "config.yaml")
    assert not is_signed(read_manifest(tmp_path))
    # also where this user signed it
    write_manifest(tmp_path, "checkpoint", {"config.yaml": {"size": size, "crc32": crc32}})
    assert damage(tmp_path, read_manifest(tmp_path), ["config.yaml"])
    # of a run, the config is taken as it is
    write_manifest(tmp_path, "run", {"config.yaml": {"size": size, "crc32": crc32}})
    sign(tmp_path, "config.yaml")
    assert read_manifest(tmp_path)["files"]["config.yaml"] == entry(tmp_path / "config.yaml")
    assert "sha256" in entry(tmp_path / "config.yaml")
