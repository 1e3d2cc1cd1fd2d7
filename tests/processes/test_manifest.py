"""HashedFile, which hashes while writing, and signed manifests."""

import errno
import hashlib
import json
import os
import zlib
from contextlib import nullcontext

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
def test_entry_of_a_written_file_matches_the_disk(tmp_path, sizes, monkeypatch):
    monkeypatch.setattr(manifest, "_SYNC_BYTES", 100_000)
    blocks = [os.urandom(size) for size in sizes]
    with HashedFile(tmp_path / "x") as file:
        assert [file.write(block) for block in blocks] == sizes
    assert (tmp_path / "x").read_bytes() == b"".join(blocks)
    assert file.entry == entry(tmp_path / "x")


def test_block_may_be_changed_after_write_returns(tmp_path):
    block = bytearray(1 << 20)
    with HashedFile(tmp_path / "x") as file:
        for number in range(20):
            block[:] = bytes([number]) * len(block)
            file.write(block)
    assert file.entry == entry(tmp_path / "x")


def test_torch_save_writes_to_a_hashed_file(tmp_path):
    state = {"tensor": torch.randn(300, 300), "plain": [1, "a"]}
    with HashedFile(tmp_path / "x") as file:
        torch.save(state, file)
    loaded = torch.load(tmp_path / "x", weights_only=True)
    assert torch.equal(loaded["tensor"], state["tensor"]) and loaded["plain"] == state["plain"]
    assert file.entry == entry(tmp_path / "x")


def test_single_sync_error_is_raised(tmp_path, monkeypatch):
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


def test_full_disk_raises_in_torch_save(tmp_path, monkeypatch):
    file = HashedFile(tmp_path / "x")
    file._opened.close()
    file._opened = open("/dev/full", "wb")  # noqa: SIM115
    with pytest.raises(OSError, match="No space"), file:
        torch.save({"tensor": torch.zeros(100_000)}, file)


def test_tensor_files_have_a_crc32_and_others_a_sha256(tmp_path):
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
    # the entry names its checksum: earlier versions wrote SHA-256 only
    sha256 = {name: {"size": 300_000, "sha256": hashlib.sha256(content).hexdigest()} for name in files}
    assert damage(tmp_path, {"files": sha256}) == []
    files["model.safetensors"].write_bytes(bytes([content[0] ^ 1]) + content[1:])
    crc32 = {"model.safetensors": {"size": 300_000, "crc32": f"{zlib.crc32(content):08x}"}}
    for listed in (sha256, crc32):
        wrong = ["model.safetensors does not match its checksum"]
        assert damage(tmp_path, {"files": listed}) == wrong


def test_crc32_is_not_accepted_for_a_config(tmp_path):
    """A CRC-32 can be forged: a config listed by CRC-32 could be signed and replaced later."""
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    size, crc32 = 8, f"{zlib.crc32(b'seed: 1' + bytes([10])):08x}"
    (tmp_path / "manifest.json").write_text(
        json.dumps({"format": 1, "kind": "checkpoint", "files": {"config.yaml": {"size": size, "crc32": crc32}}})
    )
    assert damage(tmp_path, read_manifest(tmp_path)) == ["config.yaml does not match its checksum"]
    with pytest.raises(ManifestError, match="is damaged: config.yaml does not match its checksum"):
        sign(tmp_path, "config.yaml")
    assert not is_signed(read_manifest(tmp_path))
    # also if this user signed it
    write_manifest(tmp_path, "checkpoint", {"config.yaml": {"size": size, "crc32": crc32}})
    assert damage(tmp_path, read_manifest(tmp_path), ["config.yaml"])
    # the config of a run is signed as it is
    write_manifest(tmp_path, "run", {"config.yaml": {"size": size, "crc32": crc32}})
    sign(tmp_path, "config.yaml")
    assert read_manifest(tmp_path)["files"]["config.yaml"] == entry(tmp_path / "config.yaml")
    assert "sha256" in entry(tmp_path / "config.yaml")


@pytest.fixture
def signed(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    write_manifest(tmp_path, "checkpoint", {"config.yaml": entry(tmp_path / "config.yaml")})
    assert is_signed(read_manifest(tmp_path))
    return tmp_path


@pytest.mark.parametrize("hmac", ["\ud800", "é" * 64, "0" * 64, "", None, 1, [["0" * 64]]], ids=ascii)
def test_wrong_hmac_is_not_signed(signed, hmac):
    file = signed / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hmac": hmac}))
    assert not is_signed(read_manifest(signed))


def test_deeply_nested_manifest_is_refused(signed):
    """Between the limits of reading and writing (about 990 levels), depending on the stack."""
    content = (signed / "manifest.json").read_text().rstrip()[:-1]
    for depth in (8, 100, *range(900, 1010), 3000):
        (signed / "manifest.json").write_text(f'{content}, "x": {"[" * depth}{"]" * depth}}}')
        with pytest.raises(ManifestError, match="is not a manifest|cannot be read") if depth > 8 else nullcontext():
            assert not is_signed(read_manifest(signed))
            assert sign(signed, "config.yaml") and is_signed(read_manifest(signed))


@pytest.mark.parametrize("kind", ["too long", "FIFO", "folder", "not text"])
def test_manifest_must_be_a_small_regular_file(signed, kind):
    file = signed / "manifest.json"
    if kind == "too long":
        os.truncate(file, (64 << 20) + 1)
    elif kind == "not text":
        file.write_bytes(b"{\xff}")
    else:
        file.unlink()
        file.mkdir() if kind == "folder" else os.mkfifo(file)
    why = {"too long": "limit of 67 MB", "FIFO": "not a regular file", "folder": "Is a directory"}.get(kind, "utf-8")
    with pytest.raises(ManifestError, match=f"cannot be read .*{why}"):
        read_manifest(signed)


@pytest.mark.parametrize("name, why", [("x" * 5000, "cannot be read (File name too long)"), ("x\0", "is missing")])
def test_invalid_file_names_are_damage(signed, name, why):
    (found,) = damage(signed, {"files": {name: {"size": 1}}})
    assert found == f"{name[:255]} {why}"


def test_links_are_read_but_not_written_through(signed, tmp_path_factory):
    """Cache folders contain links to files elsewhere."""
    cache = tmp_path_factory.mktemp("cache")
    for file in list(signed.iterdir()):
        file.rename(cache / file.name)
        file.symlink_to(cache / file.name)
    manifest, before = read_manifest(signed), (cache / "manifest.json").read_bytes()
    assert is_signed(manifest) and damage(signed, manifest) == []
    with pytest.raises(OSError, match="a link"):
        sign(signed, "config.yaml")
    assert (cache / "manifest.json").read_bytes() == before
    (cache / "config.yaml").write_text("seed: 2\n")
    assert damage(signed, manifest) == ["config.yaml does not match its checksum"]
    (cache / "config.yaml").unlink()
    assert damage(signed, manifest) == ["config.yaml is not a regular file"]
