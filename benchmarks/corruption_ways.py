"""Ways to damage one file of a folder, for chaos_corruption.py: typical damage by disks, copies, editors and people."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

FLIPS = 12
DTYPES = ("float16", "bfloat16", "float64", "int32", "int8", "bool", "float8_e4m3fn")

# name of a file -> replacement texts
TEXTS = {
    "status.json": [
        *('{"state": 5, "progress": 5}', '{"progress": [], "best": 7, "updated": "x"}', '{"updated": 1e400}'),
        '{"state": "running", "pid": "x", "progress": {"updates": "a", "fraction": "b", "env_steps": []}}',
        *('{"state": "finished", "best": {"success_rate": "x"}}', '{"phase": ["a"], "task": {"b": 1}}'),
        '{"system": 7, "seconds": "x", "started": "y"}',
    ],
    "evaluation.json": [
        *('{"scores": []}', '{"scores": {"policy": []}}', '{"scores": {"policy": {"all": {}}}}'),
        '{"episodes": "x", "scores": {"policy": {"reach_d0": {"success": 5}}}}',
    ],
    "timeline.jsonl": ["[]\n", '{"a": 1}\n', '{"start": "x", "end": null, "name": 5}\n', "5\n"],
}
# name of a file -> lines to insert
LINES = {
    "episode_metrics.jsonl": [
        *(
            "5",
            "null",
            "[1]",
            "{}",
            '{"update": "x"}',
            '{"update": null}',
        ),
        '{"update": 2, "episode_reward": "x", "timestamp": "y", "total_steps": "z"}',
        '{"update": 2, "episode_reward": NaN, "total_steps": Infinity}',
        f'{{"update": 1{"0" * 400}, "total_steps": 1e999}}',
        f'{{"update": 1{"0" * 5000}}}',
        *(f'{{"update": 2, "a": {"[" * deep}{"]" * deep}}}' for deep in (3000, 100_000)),
        '{"update": 2, "\\ud800": 1, "x": "\\udfff"}',
    ],
    "evaluations.jsonl": ['{"update": null, "eval/success_rate": "x"}', "[]", '{"eval/success_rate": 1}'],
}
SETTINGS = [
    *(
        ("hidden: [8, 8]", "hidden: [8, 9]"),
        ("hidden: [8, 8]", "hidden: [8]"),
        ("activation: tanh", "activation: relu"),
    ),
    *(("seed: 0", "seed: 1"), ("seed: 0", "seed: -1"), ("name: tabletop", "name: nonsense"), ("ppo:", "opp:")),
    ("normalize_observations: true", "normalize_observations: false"),
    *(
        ("task: [reach_d0]", "task: [lift_d0]"),
        ("action_scale: 1.0", "action_scale: 2.0"),
        ("gamma: 0.97", "gamma: .nan"),
    ),
    *(("control_mode: delta_qpos", "control_mode: qpos"), ("phase: finetune", "phase: teacher")),
    *(("phase: finetune", "phase: nothing"), ("phase: finetune", "phase: [a"), ("init_std: 0.6", "init_std: 5.0")),
    *(("distribution: auto", "distribution: tokens"), ("action_steps: 1", "action_steps: 2")),
    ("max_episode_steps: 6", "max_episode_steps: 3"),
]


def with_shape(spec: dict, at: int, value: object) -> dict:
    spec["observation"]["state"][at] = value
    return spec


SPECS: dict[str, Callable[[dict], object]] = {
    "action_dim + 1": lambda v: v | {"action_dim": v["action_dim"] + 1},
    "action_dim text": lambda v: v | {"action_dim": "7"},
    "action_dim null": lambda v: v | {"action_dim": None},
    "unknown key": lambda v: v | {"extra": 1},
    "no observation": lambda v: {key: value for key, value in v.items() if key != "observation"},
    "observation a list": lambda v: v | {"observation": [1]},
    "observation empty": lambda v: v | {"observation": {}},
    "shape negative": lambda v: with_shape(v, 0, [-1]),
    "dtype nonsense": lambda v: with_shape(v, 1, "float99"),
    "shape huge": lambda v: with_shape(v, 0, [10**15]),
    "a list": lambda v: [1],
    "instructions a number": lambda v: v | {"instructions": 5},
    "task_names a number": lambda v: v | {"task_names": 5},
    "control_hz text": lambda v: v | {"control_hz": "x"},
}


def first(weights: dict) -> str:
    return next(name for name in weights if name.endswith("weight") and weights[name].dim() == 2)


def with_first(weights: dict, change: Callable) -> dict:
    return weights | {first(weights): change(weights[first(weights)])}


def with_one(weights: dict, value: float) -> dict:
    weights[first(weights)].view(-1)[0] = value
    return weights


def swapped_two(weights: dict) -> dict:
    named = [(tuple(value.shape), name) for name, value in weights.items() if value.dim() == 2]
    a, b = next((a, b) for s, a in named for t, b in named if s == t and a < b)
    return weights | {a: weights[b], b: weights[a]}


def normalized(weights: dict, words: tuple[str, ...], change: Callable) -> dict:
    chosen = [n for n, v in weights.items() if any(word in n for word in words) and v.is_floating_point()]
    if not chosen:
        raise KeyError("no normaliser")
    return weights | {name: change(weights[name]) for name in chosen}


WEIGHTS: dict[str, Callable[[dict], dict]] = {
    "NaN": lambda w: {k: v * float("nan") for k, v in w.items()},
    "one NaN": lambda w: with_one(w, float("nan")),
    "one infinite": lambda w: with_one(w, float("inf")),
    "one 1e30": lambda w: with_one(w, 1e30),
    "zero": lambda w: {k: v * 0 for k, v in w.items()},
    "one missing": lambda w: dict(list(w.items())[1:]),
    "one doubled": lambda w: w | {"extra": next(iter(w.values()))},
    "one renamed": lambda w: {("x" if k == first(w) else "") + k: v for k, v in w.items()},
    "transposed": lambda w: with_first(w, lambda v: v.T),
    "a row more": lambda w: with_first(w, lambda v: v[[0, *range(len(v))]]),
    "none": lambda w: {"x": next(iter(w.values()))[:1]},
    "two swapped": swapped_two,
    "variance negative": lambda w: normalized(w, ("var", "m2", "std"), lambda v: -v),
    "normaliser NaN": lambda w: normalized(w, ("norm", "mean"), lambda v: v * float("nan")),
    "count negative": lambda w: normalized(w, ("count",), lambda v: v * 0 - 5),
}


@dataclass(frozen=True)
class Way:
    """`damage(folder, work)` gets a fresh copy of the folder, and the folder of the other subjects."""

    name: str
    damage: Callable[[Path, Path], object]


def ways(file: str, rng: random.Random) -> Iterator[Way]:
    """All ways that apply to a file, by its path below the folder."""
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
        yield Way("the first line missing", lines(file, lambda rows: rows[1:]))
        yield Way("a line missing", lines(file, lambda rows: rows[:1] + rows[2:]))
        yield Way("the last line missing", lines(file, lambda rows: rows[:-1]))
        yield Way("a line twice", lines(file, lambda rows: rows[:1] + rows))
        yield Way("backwards", lines(file, lambda rows: rows[::-1]))
        yield Way("a line of another kind", lines(file, lambda rows: [*rows[:1], b"[1]\n", *rows[1:]]))
    if file.endswith(".json"):
        for text in ("[]", "5", "null", "{}", "[" * 100_000, '{"a": 1}'):
            yield Way(f"text {text[:9]}", edit(file, lambda data, t=text: t.encode()))
    if file.endswith((".json", ".jsonl", ".yaml")):
        yield Way("not UTF-8", edit(file, lambda data: b"\xff\xfe" + data))
    name = Path(file).name
    for text in TEXTS.get(name, ()):
        yield Way(f"text {text[:30].strip()}", edit(file, lambda data, t=text: t.encode()))
    for line in LINES.get(name, ()):
        yield Way(f"a line {line[:40]}", lines(file, lambda rows, t=line: [*rows[:1], t.encode() + b"\n", *rows[1:]]))
    for old, new in SETTINGS if name == "config.yaml" else ():
        yield Way(f"{old} -> {new}", edit(file, lambda data, a=old, b=new: replaced(data, a, b)))
    if name == "spec.json":
        for what, change in SPECS.items():
            yield Way(f"spec: {what}", edit(file, lambda data, c=change: json.dumps(c(json.loads(data))).encode()))
    if file.endswith(".safetensors"):
        for dtype in DTYPES:
            yield Way(f"weights as {dtype}", tensors(file, lambda w, d=dtype: retyped(w, d)))
        for what, change in WEIGHTS.items():
            yield Way(f"weights: {what}", tensors(file, change))
    if name == "training_state.pt":
        for what, change in states():
            yield Way(f"state: {what}", state(file, change))
    if name == "model.safetensors":
        yield from checkpoints(Path(file).parent)
    if file.startswith("checkpoint-"):
        name, whole = Path(file).name, "*-whole/checkpoint-4"
        yield Way("of another update", lambda folder, work: shutil.copy(next(work.glob(whole)) / name, folder / file))
        yield Way("checkpoint renamed", lambda folder, _: (folder / file).parent.rename(folder / "checkpoint-3"))


def checkpoints(one: Path) -> Iterator[Way]:
    """Extra, incomplete and swapped checkpoints."""
    model, state = "model.safetensors", "training_state.pt"
    yield Way("an empty newer checkpoint", lambda folder, _: (folder / "checkpoint-7").mkdir())
    yield Way("a file in place of a newer one", lambda folder, _: (folder / "checkpoint-9").write_text(""))
    half = lambda folder, _: shutil.copytree(folder / one, folder / "checkpoint-7", ignore=lambda *_: [state])  # noqa: E731
    yield Way("half a newer checkpoint", half)
    yield Way("it twice", lambda folder, _: shutil.copytree(folder / one, folder / "checkpoint-0005"))
    yield Way("weights and state swapped", lambda folder, _: swapped(folder / one / model, folder / one / state))


def edit(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Path], None]:
    """Change the bytes but not the modification time, as a failing disk does."""

    def damage(folder: Path, _: Path) -> None:
        path = folder / file
        data, before = path.read_bytes(), path.stat()
        if (changed := change(data)) == data:
            raise KeyError(f"{file} is unchanged")
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
    """Zero 512 bytes, or as many as there are."""
    start = random.Random(seed).randrange(max(1, len(data) - 512))
    return data[:start] + bytes(min(512, len(data) - start)) + data[start + 512 :]


def swapped(path: Path, other: Path | None = None) -> None:
    other = other or next(file for file in sorted(path.parent.iterdir()) if file.is_file() and file != path)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def tensors(file: str, change: Callable[[dict], dict]) -> Callable[[Path, Path], None]:
    def damage(folder: Path, _: Path) -> None:
        from safetensors.torch import load_file, save_file

        changed = change(load_file(folder / file))
        save_file({name: value.clone().contiguous() for name, value in changed.items()}, folder / file)

    return damage


def states() -> Iterator[tuple[str, Callable[[dict], object]]]:
    """(name, change) for each damage to a training state."""
    import torch

    adam = lambda path, value: isinstance(value, torch.Tensor) and "exp_avg" in path  # noqa: E731
    noise = lambda _, value: isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel() > 1000  # noqa: E731
    yield "Adam NaN", change_first(adam, lambda v: v * float("nan"))
    yield "Adam of another shape", change_first(adam, lambda v: torch.zeros(3, 3, 3))
    yield "Adam all 7", change_first(adam, lambda v: v * 0 + 7)
    yield "Adam float16", change_first(adam, lambda v: v.half())
    yield "lr 1e9", change_first(lambda path, _: path.endswith(".lr"), lambda v: 1e9)
    yield "random bytes cut", change_first(noise, lambda v: v[:100])
    yield "random bytes changed", change_first(noise, lambda v: v + 7)
    for key in ("env_steps", "updates", "episodes"):
        for value in (-3, 10**12, "many", None, float("nan"), 3.5):
            yield f"{key}={value}", change_first(lambda path, _, k=key: path.endswith(f".{k}"), lambda v, n=value: n)
    for key in ("phase", "processes", "recorder", "pending"):
        yield f"without {key}", lambda s, k=key: {name: value for name, value in s.items() if name != k}
        for value in (None, [], {}, 5, "x"):
            yield f"{key}={value!r}", lambda s, k=key, v=value: s | {k: v}
    yield "an extra key", lambda s: s | {"extra": 1}
    yield "extra in phase", lambda s: s | {"phase": s["phase"] | {"extra": 1}}
    yield "a list", lambda s: [1]
    yield "empty", lambda s: {}


def change_first(wanted: Callable[[str, object], bool], change: Callable) -> Callable[[dict], dict]:
    """Change the first entry for which `wanted(path, value)` is true."""

    def found(node, path: str):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            inner = f"{path}.{key}"
            if wanted(inner, value) and not isinstance(node, tuple):
                return node, key
            if isinstance(value, dict | list | tuple) and (deeper := found(value, inner)):
                return deeper
        return None

    def edited(loaded: dict) -> dict:
        place = found(loaded, "")
        if place is None:
            raise KeyError("no such value")
        node, key = place
        node[key] = change(node[key])
        return loaded

    return edited


def state(file: str, change: Callable[[dict], object]) -> Callable[[Path, Path], None]:
    def damage(folder: Path, _: Path) -> None:
        import torch

        torch.save(change(torch.load(folder / file, weights_only=True)), folder / file)

    return damage


def replaced(data: bytes, old: str, new: str) -> bytes:
    return data.replace(old.encode(), new.encode(), 1)


def retyped(weights: dict, dtype: str) -> dict:
    import torch

    return {name: value.to(getattr(torch, dtype)) for name, value in weights.items()}
