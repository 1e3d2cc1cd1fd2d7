"""Instructions as a model reads them: bytes, a tokenizer's ids, or text."""

from pathlib import Path

import torch

from sparring.errors import UserError

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
