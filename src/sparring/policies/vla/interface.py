"""The interface of a VLA model of your own: what it must have, and the observations that it reads."""

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
from sparring.policies.instructions import BYTES, ByteTokenizer, TokenTable, load_tokenizer


@runtime_checkable
class VLAModelInterface(Protocol):
    """A torch module with these three methods; nothing is inherited. docs/vla.md describes the keys of `observations`,
    the optional `sample` and `imitation_loss`, and `encode` and `denoise` of a flow head, which replace the three."""

    def forward(self, observations: TensorDict) -> torch.Tensor:
        """Actions [B, action_dim]. Where it has a keyword `deterministic`, that asks for the mode, or for a draw."""
        ...

    def get_value(self, observations: TensorDict) -> torch.Tensor:
        """[B, 1]."""
        ...

    def evaluate_actions(self, observations: TensorDict, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob [B] and entropy [B]; of chunks better [B, C] each, so that only executed steps count."""
        ...


class VLAObservations(nn.Module):
    """`td [B]` -> a TensorDict [B] with the model's keys: rgb, depth, proprio, language, or those of the config."""

    def __init__(self, config: VLAConfig, spec: EnvSpec):
        super().__init__()
        self.spec, self.shown, self.instructions = spec, spec.observation, spec.instructions
        # the model's key -> ours: a name, or a list of names to stack
        self.sources = _sources(config.observation_keys, spec)
        names = [name for source in self.sources.values() for name in _listed(source)]
        self.in_keys = [("observation", *name.split("/")) for name in dict.fromkeys(names)]
        self.as_float = config.images == "float"
        self.normalizer: RunningNormalizer | None = None
        if config.normalize_observations and "state" in names:
            self.normalizer = RunningNormalizer(math.prod(self.shown["state"][0]))
        self.tokens: TokenTable | None = None  # None: the model reads text
        if "task" in names and config.tokenizer != "text":
            self.tokens = _token_table(config, spec.instructions)

    def forward(self, td: TensorDict) -> TensorDict:
        seen = TensorDict({}, td.batch_size, device=td["observation"].device)
        for key, source in self.sources.items():
            if source == "task" and self.tokens is not None:
                seen[key], seen[f"{key}_mask"] = self.tokens(entry_of(td, self.spec, "task"))
            elif source == "task":
                seen[key] = NonTensorStack(*(self.instructions[i] for i in entry_of(td, self.spec, "task").tolist()))
            elif isinstance(source, str):
                seen[key] = self._one(td, source)
            else:
                seen[key] = torch.stack([self._one(td, name) for name in source], 1)  # [B, cameras, ...]
        return seen

    def size_of(self, key: str) -> int | None:
        source = self.sources.get(key)
        return math.prod(self.shown[source][0]) if isinstance(source, str) and source in self.shown else None

    def blank(self, batch: int) -> TensorDict:
        observation = TensorDict({}, [batch])
        for key in self.in_keys:
            shape, dtype = self.shown["/".join(key[1:])]
            observation[key[1:]] = torch.zeros(batch, *shape, dtype=getattr(torch, dtype))
        return TensorDict({"observation": observation}, [batch])

    def _one(self, td: TensorDict, name: str) -> torch.Tensor:
        if name.startswith("image/"):
            (image,) = images_of(td, self.spec, [name])
            return image.float() / 255 if self.as_float else image
        value = entry_of(td, self.spec, name)
        return self.normalizer(value) if name == "state" and self.normalizer is not None else value


def _sources(given: dict, spec: EnvSpec) -> dict[str, str | list[str]]:
    shown = spec.observation
    sources: dict[str, str | list[str]] = {}
    for key, kind in (("rgb", "image/"), ("depth", "depth/")):
        cameras = [name for name in shown if name.startswith(kind)]
        if cameras:
            sources[key] = cameras if len(cameras) > 1 else cameras[0]  # of one camera without a dimension for cameras
    sources |= {key: name for key, name in (("proprio", "state"), ("language", "task")) if name in shown}
    for key, source in given.items():
        if source is None:
            sources.pop(key, None)
            continue
        for name in _listed(source):
            if name not in shown:
                near = difflib.get_close_matches(name, shown, n=1)
                hint = f"nearest: {near[0]}" if near else f"it shows {', '.join(shown)}"
                raise UserError(f"policy.observation_keys.{key}: the env shows no '{name}'; {hint}")
        shapes = {tuple(shown[name][0]) for name in _listed(source)}
        if len(shapes) > 1:
            unlike = " and ".join(str(list(shape)) for shape in sorted(shapes))
            raise UserError(f"policy.observation_keys.{key}: {unlike} cannot be stacked; name those of one shape")
        sources[key] = source if isinstance(source, str) else list(source)
    if not sources:
        raise UserError("policy.observation_keys leaves the model nothing to read; name an observation of the env")
    return sources


def _listed(source: str | list[str]) -> list[str]:
    return [source] if isinstance(source, str) else list(source)


def _token_table(config: VLAConfig, instructions: tuple[str, ...]) -> TokenTable:
    if config.tokenizer == BYTES:
        rows, padding = list(map(ByteTokenizer(), instructions)), 0
    else:
        folder: str | Path = config.tokenizer
        if folder == "checkpoint":
            if config.model_path is None:
                raise UserError("policy.tokenizer=checkpoint, but policy.model_path is not given; give it, or a folder")
            path = Path(config.model_path)
            folder = path if path.is_dir() else path.parent
        tokenizer = load_tokenizer(folder, f"policy.tokenizer={config.tokenizer}")
        rows, padding = [tokenizer(text)["input_ids"] for text in instructions], tokenizer.pad_token_id or 0
    longest = max(map(len, rows))
    if config.max_tokens is not None and longest > config.max_tokens:
        advice = "raise it, or null"
        raise UserError(f"policy.max_tokens={config.max_tokens}, but an instruction has {longest} tokens; {advice}")
    return TokenTable(rows, config.max_tokens, padding)
