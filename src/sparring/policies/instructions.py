"""Token ids of an env's instructions: one per byte, or from the tokenizer of a checkpoint."""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec, entry_of, text_of
from sparring.errors import UserError

BYTES = "bytes"
_CACHED = 4096  # tokenized texts that are kept
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class Instructions(nn.Module):
    """Token ids of the instruction of each decision: from the env's list, which `observation/task` indexes, or from the
    free text in `observation/instruction`. Nothing of it is saved with the weights."""

    def __init__(
        self, spec: EnvSpec, tokens_of: Callable[[str], list[int]], length: int | None = None, padding: int = 0
    ):
        """`length`: tokens of a row; by default those of the longest instruction. Free text needs it."""
        super().__init__()
        self.spec, self.padding = spec, padding
        self.source = next((name for name in ("instruction", "task") if name in spec.observation), None)
        self.in_keys = [("observation", self.source)] if self.source else []
        # a cache: the same few texts come again in each batch
        self.tokens_of = lru_cache(_CACHED)(tokens_of) if self.source == "instruction" else None
        rows = [] if self.tokens_of else list(map(tokens_of, spec.instructions))
        self.length = length or max([1, *map(len, rows)])
        ids, mask = self._padded(rows)
        self.ids, self.mask = nn.Buffer(ids, persistent=False), nn.Buffer(mask, persistent=False)

    def forward(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and mask of each decision, both [B, L]."""
        ids, mask, index = self.distinct(td)
        return ids[index], mask[index]

    def distinct(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids and mask of the distinct instructions [I, L], and the instruction of each decision [B]."""
        if self.tokens_of is None:
            index = torch.zeros(len(td), dtype=torch.int64, device=self.ids.device)
            return self.ids, self.mask, entry_of(td, self.spec, "task") if self.source else index
        texts, index = torch.unique(entry_of(td, self.spec, "instruction"), dim=0, return_inverse=True)
        ids, mask = self._padded([self.tokens_of(text_of(text)) for text in texts.numpy(force=True)])
        return ids.to(index.device), mask.to(index.device), index

    def texts(self, td: TensorDict) -> list[str]:
        entry = entry_of(td, self.spec, self.source) if self.source else torch.zeros(len(td), dtype=torch.int64)
        if self.tokens_of is not None:
            return [text_of(row) for row in entry.numpy(force=True)]
        return [self.spec.instructions[index] for index in entry.tolist()]

    def _padded(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.full((len(rows), self.length), self.padding, dtype=torch.int64)
        for padded, row in zip(ids, rows, strict=True):
            padded[: len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        return ids, torch.arange(self.length) < lengths[:, None]


class ByteTokenizer:
    """Maps each byte to the token `byte + offset`, after an optional `begin` token."""

    def __init__(self, begin: int | None = None, offset: int = 0, vocabulary: int = 256):
        self._begin, self._offset, self.vocabulary = [] if begin is None else [begin], offset, vocabulary

    def __call__(self, text: str) -> list[int]:
        return [*self._begin, *(byte + self._offset for byte in text.encode())]


def load_tokenizer(folder: str | Path, given: str):
    """Load a folder's tokenizer with transformers, without downloads or remote code. `given`: setting and value."""
    folder = Path(folder)
    if not folder.is_dir() or not any((folder / name).is_file() for name in _FILES):
        files = f"has no tokenizer (none of {', '.join(_FILES)})"
        advice = "copy the checkpoint's tokenizer there, or give its folder as policy.tokenizer"
        raise UserError(f"{given}: '{folder}' {files}; {advice}. For one token per byte, set policy.tokenizer={BYTES}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        advice = f'pip install "sparring[vla]", or set policy.tokenizer={BYTES}'
        raise UserError(f"{given}: this tokenizer needs transformers, which is not installed; {advice}") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises nothing more specific for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{given}: the tokenizer in '{folder}' cannot be read ({reason}); download it again") from error
