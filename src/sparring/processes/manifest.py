"""manifest.json: lists the files of a folder with their checksums, and is signed with this user's own key.

{"format": 1, "kind": "checkpoint", "hmac": "...", "files": {
  "config.yaml": {"size": 8, "sha256": "..."}, "model.safetensors": {"size": 8, "crc32": "..."}, ...}}

It is written last, so a folder with a manifest is complete. Checksums detect accidental damage. The HMAC proves that
this user wrote the folder, or trusted it. Listed files may then name code to import (docs/security.md), so all of them
have a SHA-256, except files of tensors, which cannot name code. If no key can be stored, e.g. in a container with a
read-only home, nothing is signed.
"""

import hashlib
import hmac
import json
import logging
import os
import secrets
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from sparring.errors import UserError
from sparring.processes.files import flush, read_small, write_whole

log = logging.getLogger("sparring.manifest")

MANIFEST = "manifest.json"
FORMAT = 1
# bytes of a block that is hashed in a thread, and bytes after which a flush to the disk begins
_BLOCK, _SYNC_BYTES = 1 << 16, 1 << 26
_KEY_BYTES, _MANIFEST_BYTES = 32, 64 << 20
# files with a CRC-32: they are large, and SHA-256 would be slower than the disk
_TENSOR_FILES = (".safetensors", ".pt")


class ManifestError(UserError):
    """A manifest that cannot be read, written or signed."""


class _Crc32:
    """CRC-32 with the interface of hashlib's checksums."""

    _value = 0

    def update(self, block: bytes | memoryview) -> None:
        self._value = zlib.crc32(block, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_CHECKSUMS: dict[str, Callable[[], Any]] = {"sha256": hashlib.sha256, "crc32": _Crc32}


def _checksum_of(file: Path) -> str:
    return "crc32" if file.suffix in _TENSOR_FILES else "sha256"


def _checksum(file: Path, name: str) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, _CHECKSUMS[name]).hexdigest()


def entry(file: Path) -> dict[str, Any]:
    """The entry of a file in a manifest."""
    name = _checksum_of(file)
    return {"size": file.stat().st_size, name: _checksum(file, name)}


class HashedFile:
    """A new file. While a block is written, one thread hashes it and another flushes earlier blocks to the disk.

    `entry`: its entry in a manifest, available after the file was closed and flushed.
    """

    def __init__(self, file: Path):
        self.entry: dict[str, Any] = {}
        self._checksum = _checksum_of(file)
        self._opened, self._digest = file.open("wb"), _CHECKSUMS[self._checksum]()
        self._threads = ThreadPoolExecutor(max_workers=2)
        self._syncs: list[Future] = []
        self._size = self._sync_size = 0

    def __enter__(self):
        return self

    def __exit__(self, kind: type | None, *error) -> None:
        with self._opened, self._threads:
            if kind is None:
                self.flush()
                # the system reports a failed flush only once
                for sync in self._syncs:
                    sync.result()
                os.fsync(self._opened.fileno())
                self.entry = {"size": self._size, self._checksum: self._digest.hexdigest()}

    def write(self, block: bytes | memoryview) -> int:
        """Write a block; it is also hashed when this returns, so that the caller may change or free it."""
        size = memoryview(block).nbytes
        if size < _BLOCK:
            self._digest.update(block)
            self._opened.write(block)
        else:
            hashed = self._threads.submit(self._digest.update, block)
            try:
                self._opened.write(block)
            finally:
                hashed.result()
        self._size += size
        if self._size - self._sync_size >= _SYNC_BYTES and all(sync.done() for sync in self._syncs):
            self._sync_size = self._size
            self._syncs.append(self._threads.submit(os.fdatasync, self._opened.fileno()))
        return size

    def flush(self) -> None:
        self._opened.flush()


def write_manifest(folder: Path, kind: str, files: dict[str, dict[str, Any]], **about: Any) -> None:
    """Write, sign and flush a manifest; call it after all listed files. `files`: path in the folder -> `entry`."""
    _write(folder, {"format": FORMAT, "kind": kind, "files": files, **about})


def sign(folder: Path, name: str, others: Iterable[str] = (), sha256: str | None = None) -> bool:
    """Sign the manifest of another user's undamaged folder; if it has none, write one for `name` and `others`.

    Returns False if this user has no key. In a run, `name` (its config) may have been changed by hand, but not after it
    was read: `sha256` is the checksum of the content that was read.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        manifest = {"format": FORMAT, "kind": "trusted", "files": {other: entry(folder / other) for other in others}}
    if manifest.get("kind") in ("run", "trusted") or name not in manifest["files"]:
        manifest["files"][name] = entry(folder / name)
    if wrong := damage(folder, manifest):
        raise ManifestError(f"'{folder}' is damaged: {'; '.join(wrong)}; copy the folder again")
    if sha256 not in (None, manifest["files"][name].get("sha256")):
        raise ManifestError(f"'{folder / name}' changed after it was read; run the command again")
    return _write(folder, {key: value for key, value in manifest.items() if key != "hmac"})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, or None. Does not check the listed files: see `damage` and `is_signed`."""
    file = folder / MANIFEST
    if not os.path.lexists(file):
        return None
    try:
        content = json.loads(read_small(file, _MANIFEST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"'{file}' cannot be read ({error}); copy the folder again") from None
    files = content.get("files") if isinstance(content, dict) else None
    known = isinstance(files, dict) and all(isinstance(each, dict) for each in files.values())
    known = known and not any(Path(name).is_absolute() or ".." in Path(name).parts for name in files)
    if not known or content.get("format") != FORMAT or _is_deep(content):
        raise ManifestError(f"'{file}' is not a manifest of format {FORMAT}; copy the folder again, or update sparring")
    return content


def _is_deep(value: Any, most: int = 10) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return most < 0 or any(_is_deep(each, most - 1) for each in inner)


def damage(folder: Path, manifest: dict[str, Any], names: Iterable[str] | None = None) -> list[str]:
    """Clauses about the damaged files of a folder; empty if all match the manifest. `names`: check only these."""
    found = []
    for name in manifest["files"] if names is None else names:
        file, wanted = folder / name, manifest["files"].get(name)
        try:
            if wanted is None:
                found.append(f"{name} is not in {MANIFEST}")
            elif not file.is_file():
                found.append(f"{name} is not a regular file" if os.path.lexists(file) else f"{name} is missing")
            elif (size := file.stat().st_size) != wanted.get("size"):
                found.append(f"{name} has {size} bytes, expected {wanted.get('size')}")
            elif not _matches(file, wanted):
                found.append(f"{name} does not match its checksum")
        except OSError as error:
            found.append(f"{name[:255]} cannot be read ({error.strerror})")
    return found


def _matches(file: Path, wanted: dict[str, Any]) -> bool:
    """Compare checksums. A CRC-32 can be forged, so it is accepted for tensors only, whatever the manifest contains."""
    name = "sha256" if "sha256" in wanted else _checksum_of(file)
    return _checksum(file, name) == wanted.get(name)


def altered(folder: Path, name: str) -> list[str]:
    """Clauses about damage of one file; empty if no manifest lists it."""
    try:
        manifest = read_manifest(folder)
        return damage(folder, manifest, [name]) if manifest and name in manifest["files"] else []
    except ManifestError as error:
        return [str(error)]


def is_signed(manifest: dict[str, Any]) -> bool:
    """Whether the manifest is signed with this user's key, and unchanged."""
    given, file = manifest.get("hmac"), key_file()
    if not isinstance(given, str) or not given.isascii() or file is None or not file.exists():
        return False
    try:
        return hmac.compare_digest(given, _signature(manifest))
    except ManifestError as error:
        _warn_once(str(error))
        return False


def key_file() -> Path | None:
    """The path of this user's key; None without a home directory."""
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "sparring" / "key"
    except RuntimeError:
        return None


def _write(folder: Path, content: dict[str, Any]) -> bool:
    """Write a manifest; returns whether it could be signed. If not, training continues."""
    try:
        content["hmac"] = _signature(content)
    except ManifestError as error:
        _warn_once(str(error))
    write_whole(folder / MANIFEST, json.dumps(content, indent=1) + "\n", sync=True)
    return "hmac" in content


@cache
def _warn_once(why: str) -> None:
    log.warning("%s. Until then, runs are not signed, and code that their configs name needs --trust", why)


def _signature(content: dict[str, Any]) -> str:
    signed = {name: value for name, value in content.items() if name != "hmac"}
    text = json.dumps(signed, sort_keys=True, separators=(",", ":"))
    return hmac.new(_key(), text.encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """This user's key; the first use creates it atomically, also with concurrent processes."""
    file = key_file()
    advice = "set XDG_CONFIG_HOME to a writable folder, or delete a damaged key to create a new one"
    if file is None:
        raise ManifestError(f"the key that signs runs cannot be stored without a home directory; {advice}")
    try:
        if not file.exists():
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            partial = file.with_name(f"key.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as opened:
                opened.write(secrets.token_hex(_KEY_BYTES))
            flush(partial)
            try:
                os.link(partial, file)
            except FileExistsError:
                pass  # another process was first
            except OSError:  # a file system without links
                partial.rename(file)
            finally:
                partial.unlink(missing_ok=True)
        key = bytes.fromhex(file.read_text().strip())
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "it is damaged"
        raise ManifestError(f"the key that signs runs cannot be used: '{file}' ({why}); {advice}") from None
    if len(key) != _KEY_BYTES:
        raise ManifestError(f"'{file}' has {len(key)} bytes, expected {_KEY_BYTES}; delete it to create a new key")
    return key
