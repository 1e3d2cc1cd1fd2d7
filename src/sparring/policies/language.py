"""Instructions -> features, byte by byte: no vocabulary, so weights fit any instruction."""

import torch
from torch import nn

from sparring.errors import UserError

_LONGEST = 256


class InstructionEncoder(nn.Module):
    """An embedding of each byte and of its place, one convolution, the mean over the text: `[B, features]`.

    The instructions of an env are few, so all of them are encoded, once per call however large the batch is, and
    `observation/task` picks. Their bytes follow from the env, not from a checkpoint: other tasks, other words, same
    weights.
    """

    def __init__(self, instructions: tuple[str, ...], features: int):
        super().__init__()
        texts = [text.encode() for text in instructions]
        longest = max(texts, key=len)
        if len(longest) > _LONGEST:
            raise UserError(
                f"the instruction {longest.decode()[:40]!r}... has {len(longest)} bytes, at most {_LONGEST} can be "
                "read; shorten it, or set policy.language_features=0"
            )
        # [I, L], 0 after the end of a text
        table = torch.zeros(len(texts), max(len(longest), 1), dtype=torch.int64)
        for row, text in zip(table, texts, strict=True):
            row[: len(text)] = torch.tensor(list(text), dtype=torch.int64)
        self.register_buffer("table", table, persistent=False)
        lengths = torch.tensor([len(text) for text in texts])
        self.register_buffer("inside", (torch.arange(table.shape[1]) < lengths[:, None]).float(), persistent=False)
        self.bytes = nn.Embedding(256, features)
        self.places = nn.Embedding(_LONGEST, features)
        self.neighbours = nn.Conv1d(features, features, kernel_size=5, padding=2)
        self.output = nn.Sequential(nn.Linear(features, features), nn.LayerNorm(features))

    def forward(self, task: torch.Tensor) -> torch.Tensor:
        # [B] -> [B, features]
        return self.all()[task]

    def all(self) -> torch.Tensor:
        """`[I, features]`, of every instruction."""
        inside = self.inside[..., None]
        # [I, L, F]; what is past the end is zero before the convolution and not counted after it
        letters = (self.bytes(self.table) + self.places.weight[: self.table.shape[1]]) * inside
        words = torch.nn.functional.silu(self.neighbours(letters.mT).mT) * inside
        return self.output(words.sum(1) / inside.sum(1).clamp_min(1))
