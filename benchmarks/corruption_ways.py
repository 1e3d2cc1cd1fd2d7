"""Ways to damage one file of a folder, for corruption.py: what disks, copies, editors and people do to files."""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FLIPS = 12
DTYPES = ("float16", "bfloat16", "float64", "int32", "int8", "bool")


@dataclass(frozen=True)
class Way:
    """`damage(folder, work)`: a fresh copy of the folder, and where others lie."""

    name: str
    damage: Callable[[Path, Path], object]


def ways(file: str, rng: random.Random) -> Iterator[Way]:
    """All that fit a file, by its path below the folder."""
    for number in range(FLIPS):
        seed = rng.random()
        yield Way(f"one bit flipped #{number}", edit(file, lambda data, s=seed: flipped(data, 1, s)))
    for number in range(2):
        seed = rng.random()
        yield Way(f"64 bits flipped #{number}", edit(file, lambda data, s=seed: flipped(data, 64, s)))
    for share in (0.1, 0.5, 0.9, 0.999):
        yield Way(f"cut to {share}", edit(file, lambda data, s=share: data[: int(len(data) * s)]))
    seed = rng.random()
    yield Way("empty", edit(file, lambda data: b""))
    yield Way("zeros", edit(file, lambda data: bytes(len(data))))
    yield Way("a block of zeros", edit(file, lambda data, s=seed: zeroed(data, s)))
    yield Way("noise", edit(file, lambda data, s=seed: random.Random(s).randbytes(len(data))))
    yield Way("more appended", edit(file, lambda data: data + b"xyz"))
    yield Way("twice", edit(file, lambda data: data + data))
    yield Way("missing", lambda folder, _: (folder / file).unlink())
    yield Way("renamed", lambda folder, _: (folder / file).rename(folder / f"{file}.bak"))
    yield Way("a folder", lambda folder, _: ((folder / file).unlink(), (folder / file).mkdir()))
    yield Way("a pipe", lambda folder, _: ((folder / file).unlink(), os.mkfifo(folder / file)))
    yield Way("a link to nothing", lambda folder, _: ((folder / file).unlink(), (folder / file).symlink_to("nothing")))
    yield Way("another file of its folder", lambda folder, _: swapped(folder / file))
    yield from special(file)


def special(file: str) -> Iterator[Way]:
    if file.endswith((".jsonl", ".index")):
        yield Way("a torn last line", edit(file, lambda data: data[:-7]))
        yield Way("a torn line", lines(file, lambda rows: rows[:1] + [rows[1][: len(rows[1]) // 2] + b"\n"] + rows[2:]))
        yield Way("a line missing", lines(file, lambda rows: rows[:1] + rows[2:]))
        yield Way("the last line missing", lines(file, lambda rows: rows[:-1]))
        yield Way("a line twice", lines(file, lambda rows: rows[:1] + rows))
        yield Way("backwards", lines(file, lambda rows: rows[::-1]))
        yield Way("a line of another kind", lines(file, lambda rows: [*rows[:1], b"[1]\n", *rows[1:]]))
    if file.endswith(".json"):
        for text in ("[]", "5", "null", "{}", "[" * 100_000, '{"a": 1}'):
            yield Way(f"text {text[:9]}", edit(file, lambda data, t=text: t.encode()))
    if file.endswith(".safetensors"):
        for dtype in DTYPES:
            yield Way(f"weights as {dtype}", tensors(file, lambda w, d=dtype: retyped(w, d)))
        yield Way("weights NaN", tensors(file, lambda w: {k: v * float("nan") for k, v in w.items()}))
        yield Way("a weight missing", tensors(file, lambda w: dict(list(w.items())[1:])))
        yield Way("a weight doubled", tensors(file, lambda w: w | {"extra": next(iter(w.values()))}))
    if file.startswith("checkpoint-"):
        name, whole = Path(file).name, "*-whole/checkpoint-4"
        yield Way("of another update", lambda folder, work: shutil.copy(next(work.glob(whole)) / name, folder / file))
        yield Way("checkpoint renamed", lambda folder, _: (folder / file).parent.rename(folder / "checkpoint-3"))


def edit(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    """As a disk does it: the time of the file stays."""

    def damage(folder: Path, _: Path) -> None:
        path = folder / file
        data, before = path.read_bytes(), path.stat()
        if (changed := change(data)) == data:
            raise KeyError(f"{file} is as it was")
        path.write_bytes(changed)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    return damage


def lines(file: str, change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path, Path], None]:
    return edit(file, lambda data: b"".join(change(data.splitlines(keepends=True))))


def flipped(data: bytes, count: int, seed: float) -> bytes:
    changed, rng = bytearray(data), random.Random(seed)
    for _ in range(count if data else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def zeroed(data: bytes, seed: float) -> bytes:
    """Of 512 bytes, or what there is."""
    start = random.Random(seed).randrange(max(1, len(data) - 512))
    return data[:start] + bytes(min(512, len(data) - start)) + data[start + 512 :]


def swapped(path: Path) -> None:
    other = next(file for file in sorted(path.parent.iterdir()) if file.is_file() and file != path)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def tensors(file: str, change: Callable[[dict], dict]) -> Callable[[Path, Path], None]:
    def damage(folder: Path, _: Path) -> None:
        from safetensors.torch import load_file, save_file

        changed = change(load_file(folder / file))
        save_file({name: value.clone().contiguous() for name, value in changed.items()}, folder / file)

    return damage


def retyped(weights: dict, dtype: str) -> dict:
    import torch

    return {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}
