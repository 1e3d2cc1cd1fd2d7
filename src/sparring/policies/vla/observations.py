"""Observations and instructions for somebody's VLA."""

import difflib
import math
from pathlib import Path

import torch
from tensordict import NonTensorStack, TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.vla.config import VLAConfig

# ---- Instructions as a model reads them: bytes, a tokenizer's ids, or text.


# ids and where there are any, [I, L] each, of the I instructions of an env
Table = tuple[torch.Tensor, torch.Tensor]


def byte_table(instructions: tuple[str, ...], length: int | None) -> Table:
    """Bytes, with zeros after the end of a text: 256 ids, and no vocabulary to be missing."""
    return _padded([list(text.encode()) for text in instructions], length, 0)


def tokenizer_table(folder: str | Path, instructions: tuple[str, ...], length: int | None) -> Table:
    """Ids by the tokenizer in a folder, which transformers reads; nothing is fetched or executed."""
    folder = Path(folder)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
    if not folder.is_dir() or not any((folder / name).is_file() for name in files):
        raise UserError(
            f"policy.tokenizer: '{folder}' has no tokenizer (none of {', '.join(files)}); put the checkpoint's own "
            "there, or set policy.tokenizer=bytes"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise UserError(
            "policy.tokenizer names a folder, which transformers reads and is not installed; pip install "
            "'sparring[vla]', or set policy.tokenizer=bytes"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"policy.tokenizer: the one in '{folder}' cannot be read ({reason}); fetch it again") from None
    ids = [tokenizer(text)["input_ids"] for text in instructions]
    return _padded(ids, length, tokenizer.pad_token_id or 0)


def _padded(texts: list[list[int]], length: int | None, padding: int) -> Table:
    longest = max(1, *map(len, texts))
    if length is not None and longest > length:
        raise UserError(f"policy.max_tokens={length}, but an instruction has {longest} tokens; raise it, or null")
    ids = torch.full((len(texts), length or longest), padding, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = torch.tensor(text, dtype=torch.int64)
    lengths = torch.tensor([len(text) for text in texts])
    return ids, torch.arange(ids.shape[1]) < lengths[:, None]


# ---- From our observations to those of the documented interface: rgb, depth, proprio, language.


TASK, STATE = "task", "state"


class Observations(nn.Module):
    """`td [B]` -> a TensorDict [B] with the model's keys."""

    def __init__(self, config: VLAConfig, spec):
        super().__init__()
        self.shown, self.instructions = spec.observation, spec.instructions
        # the model's key -> ours: a name, or a list of names to stack
        self.sources = _sources(config.observation_keys, spec)
        names = [name for source in self.sources.values() for name in _listed(source)]
        # each once, in order
        self.in_keys = [("observation", *name.split("/")) for name in dict.fromkeys(names)]
        self.as_float, self.as_text = config.images == "float", config.tokenizer == "text"
        self.normalizer = None
        if config.normalize_observations and STATE in names:
            self.normalizer = RunningNormalizer(math.prod(self.shown[STATE][0]))
        if TASK in names and not self.as_text:
            ids, mask = _table(config, spec.instructions)
            # they follow from the env, not from a checkpoint
            self.register_buffer("ids", ids, persistent=False)
            self.register_buffer("mask", mask, persistent=False)

    def forward(self, td: TensorDict) -> TensorDict:
        seen = TensorDict({}, td.batch_size, device=td["observation"].device)
        for key, source in self.sources.items():
            if source == TASK:
                self._tell(seen, key, td["observation", TASK])
            elif isinstance(source, str):
                seen[key] = self._one(td, source)
            else:
                # [B, cameras, ...]
                seen[key] = torch.stack([self._one(td, name) for name in source], 1)
        return seen

    def size_of(self, key: str) -> int | None:
        """How many numbers the model finds under a key of plain numbers."""
        source = self.sources.get(key)
        return math.prod(self.shown[source][0]) if isinstance(source, str) and source in self.shown else None

    def blank(self, batch: int) -> TensorDict:
        """Observations of nothing, to try a model on."""
        observation = TensorDict({}, [batch])
        for key in self.in_keys:
            shape, dtype = self.shown["/".join(key[1:])]
            observation[key[1:]] = torch.zeros(batch, *shape, dtype=getattr(torch, dtype))
        return TensorDict({"observation": observation}, [batch])

    def _one(self, td: TensorDict, name: str) -> torch.Tensor:
        value = td[("observation", *name.split("/"))]
        if name.startswith("image/") and self.as_float:
            return value.float() / 255
        return self.normalizer(value) if name == STATE and self.normalizer is not None else value

    def _tell(self, seen: TensorDict, key: str, task: torch.Tensor) -> None:
        if self.as_text:
            seen[key] = NonTensorStack(*(self.instructions[i] for i in task.tolist()))
        else:
            seen[key], seen[f"{key}_mask"] = self.ids[task], self.mask[task]


def _sources(given: dict, spec) -> dict[str, str | list[str]]:
    """What the documented keys are here, and what the config says instead."""
    shown = spec.observation
    images, depth = ([n for n in shown if n.startswith(f"{kind}/")] for kind in ("image", "depth"))
    usual = {"rgb": images, "depth": depth, "proprio": STATE, "language": TASK}
    sources = {key: source for key, source in usual.items() if source and (isinstance(source, list) or source in shown)}
    # of one camera without a dimension for cameras
    sources = {
        key: source[0] if isinstance(source, list) and len(source) == 1 else source for key, source in sources.items()
    }
    for key, source in given.items():
        if source is None:
            sources.pop(key, None)
            continue
        for name in _listed(source):
            _check(key, name, shown)
        sizes = {tuple(shown[name][0]) for name in _listed(source)}
        if len(sizes) > 1:
            told = " and ".join(str(list(size)) for size in sorted(sizes))
            raise UserError(f"policy.observation_keys.{key}: {told} cannot be stacked; name those of one shape")
        sources[key] = source if isinstance(source, str) else list(source)
    if not sources:
        raise UserError("policy.observation_keys leaves the model nothing to read; name an observation of the env")
    return sources


def _check(key: str, name: str, shown: dict) -> None:
    if name not in shown:
        near = difflib.get_close_matches(name, shown, n=1)
        hint = f"nearest: {near[0]}" if near else f"it shows {', '.join(shown)}"
        raise UserError(f"policy.observation_keys.{key}: the env shows no '{name}'; {hint}")


def _listed(source: str | list[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _table(config: VLAConfig, instructions: tuple[str, ...]):
    if config.tokenizer == "bytes":
        return byte_table(instructions, config.max_tokens)
    folder = config.model_path if config.tokenizer == "checkpoint" else config.tokenizer
    if folder is None:
        raise UserError("policy.tokenizer=checkpoint, but policy.model_path is not given; give it, or a folder")
    folder = folder if Path(folder).is_dir() or config.tokenizer != "checkpoint" else Path(folder).parent
    return tokenizer_table(folder, instructions, config.max_tokens)
