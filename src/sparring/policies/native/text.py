"""Instructions -> token numbers: byte by byte, or by a checkpoint's own tokenizer."""

from pathlib import Path
from typing import Protocol

import torch

from sparring.errors import UserError

BYTES = "bytes"
_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    vocabulary: int

    def __call__(self, text: str) -> list[int]: ...


class ByteTokenizer:
    """Each byte is a token; one more begins a text. Knows every language and no words."""

    # one more fills up
    begin, vocabulary = 256, 258

    def __call__(self, text: str) -> list[int]:
        return [self.begin, *text.encode()]


class FileTokenizer:
    """A `tokenizer.json`. Asks as pi0 is asked: <bos>, the instruction, a new line."""

    def __init__(self, file: Path):
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise UserError(
                f'{file} needs the package tokenizers, which is not here; pip install "sparring[vla]", or set '
                f"policy.tokenizer={BYTES}"
            ) from error
        try:
            self._library = Library.from_file(str(file))
        except Exception as error:  # the library raises no narrower one
            raise UserError(f"'{file}' cannot be read as a tokenizer ({error}); fetch it again") from error
        begin = self._library.token_to_id("<bos>")
        self._begin = [] if begin is None else [begin]
        self.vocabulary = self._library.get_vocab_size()

    def __call__(self, text: str) -> list[int]:
        return [*self._begin, *self._library.encode(f"{text}\n", add_special_tokens=False).ids]


def make_tokenizer(given: str | None, model_path: str | None) -> Tokenizer:
    """`given`: bytes, a folder, or None for the one that belongs to the checkpoint."""
    if given == BYTES or (given is None and model_path is None):
        return ByteTokenizer()
    folder = Path(given or model_path).expanduser()
    file = folder if folder.name == _FILE else folder / _FILE
    if file.is_file():
        return FileTokenizer(file)
    asked = f"policy.tokenizer={given}" if given else f"policy.model_path={model_path}"
    raise UserError(
        f"{asked}: no {file} there, which the instructions are read by; set policy.tokenizer to a folder that has one "
        f"(PaliGemma's for pi0), or to {BYTES} to read them byte by byte, which a pretrained model has not learned"
    )


def token_table(
    instructions: tuple[str, ...], tokenizer: Tokenizer, longest: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every instruction as a row of tokens [I, T], and where it is text [I, T]; T is the length of the longest."""
    rows = [tokenizer(text) or [0] for text in instructions]
    for text, row in zip(instructions, rows, strict=True):
        if len(row) > longest:
            raise UserError(
                f"the instruction {text[:40]!r}... has {len(row)} tokens, but policy.text_tokens={longest}; raise it, "
                "or shorten the instruction"
            )
        if max(row) >= vocabulary:
            raise UserError(
                f"the tokenizer gives token {max(row)} for {text[:40]!r}, but the model has embeddings of {vocabulary} "
                f"only; set policy.vocabulary={tokenizer.vocabulary}, or take the tokenizer that belongs to the weights"
            )
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for filled, row in zip(tokens, rows, strict=True):
        filled[: len(row)] = torch.tensor(row)
    return tokens, torch.arange(tokens.shape[1]) < lengths[:, None]
