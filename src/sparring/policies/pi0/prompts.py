"""An env's instructions as the tokens that pi0 reads: image tokens, <bos>, the text, a line break."""

from pathlib import Path

import torch
from torch import nn

from sparring.errors import UserError
from sparring.policies.pi0.checkpoint import transformers

# as in ByT5: padding, end and unknown come before the bytes
_BYTES_START = 3
_BYTES_BOS = 1


class Prompts(nn.Module):
    """`observation/task [B]` -> tokens and their mask [B, L]. They follow from the env, not from a checkpoint."""

    def __init__(self, instructions: tuple[str, ...], image_tokens: int, image_token: int, tokens, vocabulary: int):
        """`tokens`: text -> its tokens, <bos> first."""
        super().__init__()
        rows = [[image_token] * image_tokens + tokens(f"{text}\n") for text in instructions]
        largest = max(token for row in rows for token in row[image_tokens:])
        if largest >= vocabulary:
            raise UserError(
                f"policy.tokenizer gives token {largest}, the checkpoint's vocabulary has {vocabulary}; use its own"
            )
        ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        inside = torch.zeros_like(ids)
        for row, line, mask in zip(rows, ids, inside, strict=True):
            line[: len(row)], mask[: len(row)] = torch.tensor(row), 1
        self.register_buffer("ids", ids, persistent=False)
        self.register_buffer("inside", inside, persistent=False)

    def forward(self, task: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.ids[task], self.inside[task]


def make_tokens(tokenizer: str | None, folder: Path):
    """Text -> tokens, by the checkpoint's tokenizer, by another one, or byte by byte where that is asked for."""
    if tokenizer == "bytes":
        return lambda text: [_BYTES_BOS, *(byte + _BYTES_START for byte in text.encode())]
    place = folder if tokenizer is None else Path(tokenizer)
    if not any((place / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        given = f"policy.tokenizer={tokenizer}" if tokenizer else f"policy.model_path={folder}"
        raise UserError(
            f"{given} holds no tokenizer (tokenizer.json); put the checkpoint's own there or name its folder in "
            "policy.tokenizer; policy.tokenizer=bytes reads texts byte by byte, which only a fresh model can learn from"
        )
    try:
        found = transformers().AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of a damaged file the tokenizers library raises no narrower one
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"the tokenizer in '{place}' cannot be loaded: {reason}") from error
    first = [] if found.bos_token_id is None else [found.bos_token_id]
    return lambda text: first + found(text, add_special_tokens=False)["input_ids"]
