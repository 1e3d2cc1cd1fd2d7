"""Token ids of an env's instructions: one per byte, or from the tokenizer of a checkpoint."""

from pathlib import Path

import torch
from torch import nn

from sparring.errors import UserError

BYTES = "bytes"
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class TokenTable(nn.Module):
    """`observation/task [B]` -> token ids and mask of each instruction, both [B, L]; not part of the saved weights."""

    def __init__(self, rows: list[list[int]], length: int | None = None, padding: int = 0):
        super().__init__()
        longest = max(1, *map(len, rows))
        ids = torch.full((len(rows), length or longest), padding, dtype=torch.int64)
        for padded, row in zip(ids, rows, strict=True):
            padded[: len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths = torch.tensor([len(row) for row in rows])
        self.ids = nn.Buffer(ids, persistent=False)
        self.mask = nn.Buffer(torch.arange(ids.shape[1]) < lengths[:, None], persistent=False)

    def forward(self, task: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[task], self.mask[task]


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
