"""Instructions of an env -> token ids: byte by byte, or by the tokenizer of a checkpoint."""

from pathlib import Path

import torch
from torch import nn

from sparring.errors import UserError

BYTES = "bytes"
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


class TokenTable(nn.Module):
    """`observation/task [B]` -> the ids of each instruction and where it has any, [B, L] both; not in checkpoints."""

    def __init__(self, rows: list[list[int]], length: int | None = None, padding: int = 0):
        super().__init__()
        longest = max(1, *map(len, rows))
        ids = torch.full((len(rows), length or longest), padding, dtype=torch.int64)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = torch.tensor(row, dtype=torch.int64)
        lengths = torch.tensor([len(row) for row in rows])
        self.ids = nn.Buffer(ids, persistent=False)
        self.mask = nn.Buffer(torch.arange(ids.shape[1]) < lengths[:, None], persistent=False)

    def forward(self, task: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[task], self.mask[task]


class ByteTokenizer:
    """Each byte is a token, numbered from `offset` on, after an optional `begin` token."""

    def __init__(self, begin: int | None = None, offset: int = 0, vocabulary: int = 256):
        self._begin, self._offset, self.vocabulary = [] if begin is None else [begin], offset, vocabulary

    def __call__(self, text: str) -> list[int]:
        return [*self._begin, *(byte + self._offset for byte in text.encode())]


def load_tokenizer(folder: str | Path, given: str):
    """transformers' tokenizer of a folder; nothing is downloaded or executed. `given`: the setting and its value."""
    folder = Path(folder)
    if not folder.is_dir() or not any((folder / name).is_file() for name in _FILES):
        files = f"has no tokenizer (none of {', '.join(_FILES)})"
        advice = "put the checkpoint's own there, or name its folder in policy.tokenizer"
        raise UserError(f"{given}: '{folder}' {files}; {advice}; byte by byte takes policy.tokenizer={BYTES}")
    try:
        from transformers import AutoTokenizer
    except ImportError:
        advice = f'pip install "sparring[vla]", or set policy.tokenizer={BYTES}'
        raise UserError(f"{given}: a tokenizer in a folder needs transformers, not installed here; {advice}") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # for a damaged file the tokenizers library raises no narrower one
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{given}: the tokenizer in '{folder}' cannot be read ({reason}); fetch it again") from error
