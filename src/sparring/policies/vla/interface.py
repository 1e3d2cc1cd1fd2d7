"""The interface of a custom VLA model: its required methods, and its observations."""

import difflib
import math
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from tensordict import NonTensorStack, TensorDict
from torch import nn

from sparring.contract import EnvSpec, entry_of, images_of
from sparring.errors import UserError
from sparring.normalize import RunningNormalizer
from sparring.policies.configs import VLAConfig
from sparring.policies.instructions import BYTES, ByteTokenizer, Instructions, load_tokenizer

_TEXTS = ("task", "instruction")  # observations that are an instruction


@runtime_checkable
class VLAModelInterface(Protocol):
    """A torch module with these three methods; it needs no base class. docs/vla.md describes the keys of
    `observations`, the optional `sample` and `imitation_loss`, and a flow head (`encode`, `denoise`), which replaces
    all of them."""

    def forward(self, observations: TensorDict) -> torch.Tensor:
        """Return actions [B, action_dim]: the mode or a sample, by the optional keyword `deterministic`."""
        ...

    def get_value(self, observations: TensorDict) -> torch.Tensor:
        """Return values [B, 1]."""
        ...

    def evaluate_actions(self, observations: TensorDict, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-prob [B] and entropy [B]; for chunks preferably [B, C], so that only executed steps count."""
        ...


class VLAObservations(nn.Module):
    """Maps `td [B]` to a TensorDict [B] with the model's keys: rgb, depth, proprio, language, or those configured."""

    def __init__(self, config: VLAConfig, spec: EnvSpec):
        super().__init__()
        self.spec, self.entries = spec, spec.observation
        # the model's key -> an observation of the env, or a list of them to stack
        self.sources = _sources(config.observation_keys, spec)
        names = [name for source in self.sources.values() for name in _listed(source)]
        self.in_keys = [("observation", *name.split("/")) for name in dict.fromkeys(names)]
        self.as_float = config.images == "float"
        self.normalizer: RunningNormalizer | None = None
        if config.normalize_observations and "state" in names:
            self.normalizer = RunningNormalizer(math.prod(self.entries["state"][0]))
        self.instructions: Instructions | None = None
        self.reads_text = config.tokenizer == "text"
        if set(_TEXTS) & set(names):
            self.instructions = _instructions(config, spec)

    def forward(self, td: TensorDict) -> TensorDict:
        inputs = TensorDict({}, td.batch_size, device=td["observation"].device)
        for key, source in self.sources.items():
            if source in _TEXTS and self.instructions is not None and self.reads_text:
                inputs[key] = NonTensorStack(*self.instructions.texts(td))
            elif source in _TEXTS and self.instructions is not None:
                inputs[key], inputs[f"{key}_mask"] = self.instructions(td)
            elif isinstance(source, str):
                inputs[key] = self._entry(td, source)
            else:
                inputs[key] = torch.stack([self._entry(td, name) for name in source], 1)  # [B, cameras, ...]
        return inputs

    def size_of(self, key: str) -> int | None:
        source = self.sources.get(key)
        return math.prod(self.entries[source][0]) if isinstance(source, str) and source in self.entries else None

    def blank(self, batch: int) -> TensorDict:
        """Observations of the right shapes and dtypes, all zeros."""
        observation = TensorDict({}, [batch])
        for key in self.in_keys:
            shape, dtype = self.entries["/".join(key[1:])]
            observation[key[1:]] = torch.zeros(batch, *shape, dtype=getattr(torch, dtype))
        return TensorDict({"observation": observation}, [batch])

    def _entry(self, td: TensorDict, name: str) -> torch.Tensor:
        if name.startswith("image/"):
            (image,) = images_of(td, self.spec, [name])
            return image.float() / 255 if self.as_float else image
        value = entry_of(td, self.spec, name)
        return self.normalizer(value) if name == "state" and self.normalizer is not None else value


def _sources(given: dict, spec: EnvSpec) -> dict[str, str | list[str]]:
    entries = spec.observation
    sources: dict[str, str | list[str]] = {}
    for key, kind in (("rgb", "image/"), ("depth", "depth/")):
        cameras = [name for name in entries if name.startswith(kind)]
        if cameras:
            sources[key] = cameras if len(cameras) > 1 else cameras[0]  # a single camera is not stacked
    roles = (("proprio", "state"), *(("language", name) for name in _TEXTS))
    sources |= {key: name for key, name in roles if name in entries}
    for key, source in given.items():
        if source is None:
            sources.pop(key, None)
            continue
        for name in _listed(source):
            if name not in entries:
                near = difflib.get_close_matches(name, entries, n=1)
                hint = f"nearest: {near[0]}" if near else f"it has {', '.join(entries)}"
                raise UserError(f"policy.observation_keys.{key}: the env has no observation '{name}'; {hint}")
        shapes = {tuple(entries[name][0]) for name in _listed(source)}
        if len(shapes) > 1:
            unlike = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise UserError(f"policy.observation_keys.{key}: shapes {unlike} cannot be stacked; give equal shapes")
        sources[key] = source if isinstance(source, str) else list(source)
    if not sources:
        raise UserError("policy.observation_keys leaves the model no observation; add one of the env's")
    return sources


def _listed(source: str | list[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _instructions(config: VLAConfig, spec: EnvSpec) -> Instructions:
    tokenize, padding = ByteTokenizer().__call__, 0
    if config.tokenizer not in (BYTES, "text"):
        folder: str | Path = config.tokenizer
        if folder == "checkpoint":
            if config.model_path is None:
                raise UserError("policy.tokenizer=checkpoint needs policy.model_path; set it, or another tokenizer")
            path = Path(config.model_path)
            folder = path if path.is_dir() else path.parent
        tokenizer = load_tokenizer(folder, f"policy.tokenizer={config.tokenizer}")
        padding = tokenizer.pad_token_id or 0

        def tokenize(text: str) -> list[int]:
            return tokenizer(text)["input_ids"]

    def tokens_of(text: str) -> list[int]:
        row = tokenize(text)
        if config.tokenizer != "text" and config.max_tokens is not None and len(row) > config.max_tokens:
            advice = "increase it, or set it to null"
            raise UserError(
                f"policy.max_tokens={config.max_tokens}, but an instruction has {len(row)} tokens; {advice}"
            )
        return row

    length = config.max_tokens
    if length is None and "instruction" in spec.observation:
        length = spec.observation["instruction"][0][0] + 2  # at most a token per byte, a begin and an end
    return Instructions(spec, tokens_of, length, padding)
