"""MixedWindows: each row of a batch from one of several sources, by weight."""

from collections.abc import Mapping

import torch
from tensordict import TensorDict

from sparring.data.prioritized_windows import PrioritizedWindows
from sparring.data.sizes import check_whole
from sparring.data.windows import ShuffledWindows, mark_draw, set_rows
from sparring.errors import UserError

Sampler = ShuffledWindows | PrioritizedWindows


class MixedWindows:
    """`MixedWindows({random: 0.5, explorers: 0.3, newest: 0.2}).sample(batch_size, generator)`.

    The source of every row is drawn by itself, so a batch holds each weight's share in expectation, however small.
    `source` is its place among the sources; `weight` and `index` are those of a prioritised source, else 1 and -1.
    A source without a step is an error while its weight is above 0.
    """

    def __init__(self, sources: Mapping[Sampler, float]):
        self.sources = tuple(sources)
        others = [type(source).__name__ for source in self.sources if not isinstance(source, Sampler)]
        if others:
            raise UserError(f"expected ShuffledWindows or PrioritizedWindows and their weights; got {others[0]}")
        self.weights = torch.tensor(list(sources.values()), dtype=torch.float64)
        if not self.sources or (self.weights < 0).any() or not 0 < float(self.weights.sum()) < float("inf"):
            raise UserError(f"weights must be 0 or more, and one above 0; got {self.weights.tolist()}")
        kinds = {(s.reader.length, s.reader.burn_in, s.reader.clears_memory) for s in self.sources}
        if len(kinds) > 1:
            raise UserError(
                f"all sources must have one length, burn_in and kind of memory; got (length, burn_in, rebuilt): {kinds}"
            )
        keys = {s.reader.keys for s in self.sources}
        if len(keys) > 1:
            told = " and ".join("all" if of is None else ", ".join(sorted(of)) for of in keys)
            raise UserError(f"all sources must be asked for the same keys; got {told}")

    def sample(self, batch_size: int, generator: torch.Generator) -> TensorDict:
        check_whole("batch_size", batch_size)
        self._check_columns()
        # [B], sorted: the order of rows says nothing, and each source is asked once
        source = torch.multinomial(self.weights, batch_size, replacement=True, generator=generator).sort().values
        counts = torch.bincount(source, minlength=len(self.sources)).tolist()
        windows = []
        for sampler, count in zip(self.sources, counts, strict=True):
            windows += sampler.pick(count, generator) if count else []
        batch = self.sources[0].reader.read(windows)
        set_rows(batch, "source", source)
        mark_draw(batch, windows)
        return batch

    def _check_columns(self) -> None:
        """Rows of one batch need the same columns; a source may have got its first episode only just now."""
        used = [s for s, weight in zip(self.sources, self.weights.tolist(), strict=True) if weight > 0]
        layouts = {str(s.store.folder): set(s.reader.columns(s.store)) for s in used}
        common = set.intersection(*layouts.values())
        other = {f"{folder}: {c.name} {c.dtype} {list(c.shape)}" for folder, cs in layouts.items() for c in cs - common}
        if other:
            raise UserError(f"the sources differ in {'; '.join(sorted(other))}; read common keys only, with keys=[...]")
