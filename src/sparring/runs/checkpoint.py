"""Checkpoints: written atomically, verified before use, loaded strictly.

checkpoint-<n>/
  model.safetensors     weights and normaliser statistics; large models: shards and model.safetensors.index.json
  training_state.pt     optimiser, counters, states of random generators and robots (tensors and plain values only)
  config.yaml           the resolved config of the run
  spec.json             observations and actions of the env, so that the policy can be rebuilt without the env
  manifest.json         sizes and checksums of these files; dtypes and shapes of tensors; the update; written last
"""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import nn

from sparring.config.text import shortened
from sparring.config.trust import adopts
from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.normalize import Normalizer, RunningNormalizer
from sparring.processes.files import flush, read_small
from sparring.processes.manifest import MANIFEST, HashedFile, ManifestError, damage, read_manifest, write_manifest
from sparring.runs.listing import why_no_checkpoint

log = logging.getLogger(__name__)

# maximum size of the weights in one file
SHARD_BYTES = 4_000_000_000
_INDEX = "model.safetensors.index.json"
_WEIGHTS = ("model.safetensors", _INDEX, "model.pt")
# files that a run writes in addition to the weights
_RUN_FILES = ("training_state.pt", "config.yaml", "spec.json")
# the order in which safetensors sorts tensors in a file
_DTYPES = {torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64"}
_DTYPES |= {torch.float32: "F32", torch.uint32: "U32", torch.int32: "I32"}
_DTYPES |= {torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16", torch.int16: "I16"}
_DTYPES |= {torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ"}
_DTYPES |= {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
_DTYPES |= {torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
# maximum number of names that a message lists
_NAMED = 6
# results of `damage_of`, by the identity of all files of the checkpoint
_verified: dict[tuple, list[str]] = {}
# damaged checkpoints that were logged
_reported: set[Path] = set()


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message states the reason."""


def save_checkpoint(
    folder: Path,
    update: int,
    model: nn.Module,
    state: dict,
    config_yaml: str,
    spec: EnvSpec,
    approve: Callable[[], None] = lambda: None,
) -> Path:
    """Write `folder/checkpoint-<update>`. A kill at any time leaves earlier checkpoints unchanged.

    `approve` is called before the checkpoint gets its final name. If it raises, no checkpoint is written."""
    target = folder / f"checkpoint-{update}"
    if os.path.lexists(target):
        if not (wrong := damage_of(target)):  # saving an update a second time writes the same content
            approve()
            return target
        _move_aside(target, wrong)
    partial = folder / f".partial-checkpoint-{update}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {}

    @contextmanager
    def new(name: str) -> Iterator[HashedFile]:
        try:
            with HashedFile(partial / name) as file:
                yield file
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            error.filename = str(target)
            raise
        files[name] = file.entry

    with new("training_state.pt") as file:
        _write_state(file, state)
    shards = _shards(model)
    tensors: dict[str, list] = {}
    for name, weights in shards.items():
        with new(name) as file:
            tensors |= _write_weights(file, weights)
    texts = {"config.yaml": config_yaml, "spec.json": json.dumps(asdict(spec), indent=2)}
    if len(shards) > 1:
        places = {name: shard for shard, weights in shards.items() for name in weights}
        texts[_INDEX] = json.dumps({"metadata": {}, "weight_map": places}, indent=1)
    for name, text in texts.items():
        with new(name) as file:
            file.write(text.encode())
    config = files["config.yaml"]["sha256"]
    try:
        approve()
    except Exception:
        shutil.rmtree(partial)
        raise
    write_manifest(partial, "checkpoint", files, update=update, config=config, tensors=tensors)
    flush(partial)
    partial.rename(target)
    flush(folder)
    return target


def _write_state(file: HashedFile, state: dict) -> None:
    try:
        torch.save(state, cast(Any, file))
    except RuntimeError as error:
        if not re.search("inline_container|PytorchStreamWriter|iostream", str(error)):
            raise
        # torch hides the original error
        raise OSError(errno.EIO, "cannot be written; is the disk full?", "training_state.pt") from error


def _shards(model: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Assign the weights to files: file name -> weights."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in model.state_dict().items():
        if parts[-1] and size + tensor.nbytes > SHARD_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def _write_weights(file: HashedFile, weights: dict[str, torch.Tensor]) -> dict[str, list]:
    """Write the same bytes as `safetensors.torch.save_file`, without a copy of all weights. Tensors may share memory.

    Returns what `_tensors_in` reads from the file."""
    kinds = [*_DTYPES]
    names = sorted(weights, key=lambda name: (kinds.index(weights[name].dtype), name))
    head: dict[str, dict] = {}
    end = 0
    for name in names:
        tensor, first = weights[name], end
        end += tensor.nbytes
        head[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [first, end]}
    packed = json.dumps(head, separators=(",", ":"), ensure_ascii=False).encode()
    packed += b" " * (-len(packed) % 8)
    file.write(len(packed).to_bytes(8, "little") + packed)
    for name in names:
        flat = weights[name].detach().cpu().contiguous().reshape(-1)
        file.write(flat.view(torch.uint8).numpy().data)
    return {name: [about["dtype"], about["shape"]] for name, about in head.items()}


def _move_aside(checkpoint: Path, wrong: list[str]) -> None:
    """Rename a damaged checkpoint, because the run saves the same update again."""
    number, aside = 1, checkpoint.with_name(f"damaged-{checkpoint.name}")
    while os.path.lexists(aside):
        number += 1
        aside = checkpoint.with_name(f"damaged-{checkpoint.name}-{number}")
    checkpoint.rename(aside)
    log.warning("'%s' is damaged (%s): moved to '%s' and written again", checkpoint, "; ".join(wrong), aside.name)


def not_finite(model: nn.Module, weights: dict[str, torch.Tensor], state: dict | None = None) -> str | None:
    """Names the tensors with NaN, infinite values, or negative counts or variances; None if there are none.

    Checks the `weights` of the model and its training `state`. Buffers outside normalisers may be masks with infinity.
    """
    parts = {name: module for name, module in model.named_modules() if isinstance(module, Normalizer)}
    normalizers = {f"{name}." if name else "" for name in parts}
    buffers = {name for name, _ in model.named_buffers()}
    found = []
    for name, tensor in weights.items():
        is_mask = name in buffers and name[: name.rfind(".") + 1] not in normalizers
        found += [name] if _is_unfit(tensor, is_mask) else []
    for name, module in parts.items():
        wanted = ("count", "var") if isinstance(module, RunningNormalizer) else ()
        for buffer in (f"{name}.{each}".lstrip(".") for each in wanted):
            negative = buffer in weights and bool((weights[buffer] < 0).any())
            found += [f"{buffer} (negative)"] if negative else []
    found += [path for path, tensor in _tensors_below(state) if _is_unfit(tensor, "optimizer" not in path)]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{', '.join(found[:_NAMED])}{more}" if found else None


def _is_unfit(tensor: torch.Tensor, is_mask: bool) -> bool:
    if not tensor.is_floating_point():
        return False
    # float8 has no sum. A finite sum proves that all numbers are finite; the sum itself may overflow
    tensor = tensor.detach().float() if tensor.element_size() == 1 else tensor.detach()
    if bool(tensor.sum().isfinite()):
        return False
    return bool(tensor.isnan().any() if is_mask else not tensor.isfinite().all())


def _tensors_below(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in items:
        yield from _tensors_below(inner, f"{path}.{key}" if path else str(key))


def damage_of(checkpoint: Path) -> list[str]:
    """The defects of a checkpoint, a clause each; empty if it is intact. Cached until one of its files changes."""
    try:
        files = sorted((file, file.stat()) for file in checkpoint.iterdir() if file.is_file())
        stamp = checkpoint, *((file.name, at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino) for file, at in files)
        if stamp not in _verified:
            _verified[stamp] = _damage(checkpoint)
        return _verified[stamp]
    except (OSError, ManifestError, SafetensorError) as error:
        return [getattr(error, "strerror", None) or str(error)]


def _damage(checkpoint: Path) -> list[str]:
    manifest = read_manifest(checkpoint)
    if manifest is None:
        return [f"it has no {MANIFEST}; --trust accepts it as it is"]
    files, tensors = manifest["files"], manifest.get("tensors")
    present = {file.name for file in checkpoint.iterdir() if file.is_file()}
    # every file that may be loaded, even if the manifest does not list it
    names = {*files, *present.intersection(_WEIGHTS + _RUN_FILES), *_weights_among(present)}
    if manifest.get("kind") == "trusted":
        return damage(checkpoint, manifest, sorted(names))
    shards = _weights_among(files)
    if manifest.get("kind") != "checkpoint" or not isinstance(tensors, dict) or not shards:
        return [f"{MANIFEST} does not belong to a checkpoint"]
    # hashes several files in parallel
    with ThreadPoolExecutor() as pool:
        parts = pool.map(lambda name: damage(checkpoint, manifest, [name]), sorted(names.union(_RUN_FILES)))
        found = [what for part in parts for what in part]
    if found:
        return found
    if _is_numbered(checkpoint) and checkpoint.name != f"checkpoint-{manifest.get('update')}":
        found.append(f"it was saved as checkpoint-{manifest.get('update')}")
    if manifest.get("config") != files["config.yaml"]["sha256"]:
        found.append("config.yaml belongs to another run")
    stored = {name: kind for file in shards for name, kind in _tensors_in(checkpoint / file).items()}
    differing = [name for name in stored.keys() | tensors.keys() if stored.get(name) != tensors.get(name)]
    return found + ([f"{MANIFEST} and the weights disagree on: {', '.join(differing[:_NAMED])}"] if differing else [])


def _unusable(checkpoint: Path) -> list[str]:
    """The defects of a checkpoint, empty if the user trusts it."""
    return [] if adopts(checkpoint) else damage_of(checkpoint)


def _weights_among(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", name))


def _tensors_in(file: Path) -> dict[str, list]:
    """Name -> dtype and shape, from the header of the file."""
    with safe_open(file, "pt") as opened:
        parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        return {name: [part.get_dtype(), part.get_shape()] for name, part in parts.items()}


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    found = filter(_is_numbered, folder.glob("checkpoint-*"))
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def _is_numbered(path: Path) -> bool:
    return re.fullmatch(r"checkpoint-\d+", path.name) is not None


def remove_old(folder: Path, keep: int, newest: Path) -> None:
    """Keep the last `keep` checkpoints up to `newest`, which was just saved; delete leftovers of interrupted saves.

    Checkpoints after `newest` are damaged, otherwise the run would have resumed from them; they stay."""
    found = checkpoints(folder)
    for path in found[: found.index(newest) + 1][:-keep]:
        # renamed first: an interrupted deletion must not look like a damaged checkpoint. If that fails, it stays
        with suppress(OSError):
            path.rename(path.with_name(f".partial-{path.name}"))
    for path in folder.glob(".partial-checkpoint-*"):
        shutil.rmtree(path, ignore_errors=True)


def newest_whole(folder: Path) -> Path | None:
    """The newest intact checkpoint of a run folder, None without checkpoints. Logs damaged newer ones, each once."""
    damaged: list[tuple[str, str]] = []
    for path in reversed(checkpoints(folder)):
        if not (wrong := _unusable(path)):
            for name, what in damaged:
                if folder / name not in _reported:
                    log.warning("'%s' is damaged (%s); %s is used instead", folder / name, what, path.name)
                _reported.add(folder / name)
            return path
        damaged.append((path.name, "; ".join(wrong)))
    if damaged:
        lines = [f"  {name}: {what}" for name, what in damaged]
        advice = "start from scratch with --resume never (it moves the run aside), or copy the folder again"
        raise CheckpointError("\n".join([f"'{folder}': all of its checkpoints are damaged:", *lines, advice]))
    return None


def find_checkpoint(path: str | Path) -> Path:
    """Resolve `path`: a checkpoint folder, a run folder (its newest intact checkpoint) or weights. Verifies it."""
    path = Path(path)
    folder = path.parent if path.is_file() else path
    # a checkpoint that a run wrote must have a manifest
    is_ours = _is_numbered(folder) or any((folder / name).is_file() for name in ("training_state.pt", "spec.json"))
    if folder.is_dir() and is_ours and (wrong := _unusable(folder)):
        advice = "use another checkpoint, or copy it again from an intact copy"
        raise CheckpointError(f"'{folder}' is damaged: {'; '.join(wrong)}; {advice}")
    if weights_file(path):
        return path
    if not path.exists():
        raise CheckpointError(f"'{path}' does not exist; give a run folder or a checkpoint folder")
    if newest := newest_whole(path) if path.is_dir() else None:
        return newest
    nothing = f"'{path}' holds no checkpoint (no checkpoint-<n> folder, no model.safetensors or model.pt)"
    raise CheckpointError(why_no_checkpoint(path) or nothing)


def checkpoint_folder(path: str | Path) -> Path:
    """Like `find_checkpoint`, but always a folder with a config, from which a policy can be rebuilt."""
    found = find_checkpoint(path)
    folder = found.parent if found.is_file() else found
    if not (folder / "config.yaml").is_file():
        lacks = " has no config.yaml in its folder" if found.is_file() else " has weights but no config.yaml"
        advice = "give a run folder or a checkpoint folder"
        raise CheckpointError(f"'{found}'{lacks}, which describes the model; {advice}")
    return folder


def weights_file(path: Path) -> Path | None:
    if path.is_file():
        return path
    return next((path / name for name in _WEIGHTS if (path / name).is_file()), None)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    if file.name == _INDEX:
        try:
            shards = _weights_among({*json.loads(read_small(file))["weight_map"].values()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise CheckpointError(f"'{file}' cannot be read as an index of weights; download it again") from None
        return {name: tensor for shard in shards for name, tensor in read_weights(file.parent / shard).items()}
    if file.suffix != ".safetensors":
        loaded = _torch_load(file)
        states = loaded.get("state_dicts") if isinstance(loaded, dict) else None
        if isinstance(states, dict):  # ManiFlow's; it evaluates the averaged weights
            loaded = {"model": states.get("ema_model", states.get("model"))}
        weights = loaded["model"] if isinstance(loaded, dict) and isinstance(loaded.get("model"), dict) else loaded
        other = [] if isinstance(weights, dict) else [type(weights).__name__]
        other = other or [
            f"{name!r}: {type(tensor).__name__}"
            for name, tensor in weights.items()
            if not (isinstance(name, str) and isinstance(tensor, torch.Tensor))
        ]
        if other:
            what = f"expected names with tensors, but it holds {shortened(', '.join(other[:3]), 100)}"
            raise CheckpointError(f"'{file}' cannot be read as weights: {what}; give a file of weights")
        return weights
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        why = str(error).partition("\n")[0] or type(error).__name__
        raise CheckpointError(f"'{file}' cannot be read as weights: {why}") from None


def load_training_state(checkpoint: Path) -> dict:
    file = checkpoint / "training_state.pt"
    if not file.is_file():
        advice = f"to start from its weights alone, give pretrained={checkpoint}"
        raise CheckpointError(f"'{checkpoint}' has no training_state.pt, so no run can resume from it; {advice}")
    find_checkpoint(checkpoint)
    return _torch_load(file)


def _torch_load(file: Path) -> dict:
    """Load tensors and plain values only: no code in the file is executed."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # unpickling damaged bytes may raise any exception
        advice = "convert a checkpoint of ManiFlow by examples/maniflow_checkpoint.py" if file.suffix == ".ckpt" else ""
        why = f"it is damaged, or holds more than tensors and plain values; {advice or 'use another file'}"
        raise CheckpointError(f"'{file}' cannot be read: {why}") from error
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"'{file}' cannot be read: it holds a {type(loaded).__name__}, expected a dict of tensors"
        )
    return loaded


def load_spec(checkpoint: Path) -> EnvSpec:
    file = checkpoint / "spec.json"
    if not file.is_file():
        raise CheckpointError(f"'{checkpoint}' has no spec.json; give a checkpoint that Sparring wrote")
    try:
        return TypeAdapter(EnvSpec).validate_json(read_small(file))
    except OSError as error:
        why = str(error.strerror)
    except ValidationError as error:
        problem = error.errors()[0]
        why = ": ".join([*map(str, problem["loc"]), problem["msg"]])
    raise CheckpointError(f"'{file}' cannot be read: {why}")
