"""Large tensors of a message, which go through shared memory: over a pipe, 20 MB take as long as several decisions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparring.collect.shared import SharedTensors
from sparring.data.storage import Column, Key

# bytes
LARGE = 1 << 16


@dataclass(frozen=True)
class Elsewhere:
    """In a message, where a tensor was that lies in shared memory."""

    key: Key


class Parcels:
    """The sender's end. There are as many `places` as messages under way: the next one is written over the first.

    The first message tells which tensors are large; what does not fit later on stays in its message.
    """

    def __init__(self, places: int, folder: Path | None):
        self.places, self.folder = places, folder
        self.begun = False
        self.shared: SharedTensors | None = None

    def send(self, content: Any, number: int) -> Any:
        """What is left of the message of this number, to be sent otherwise."""
        large = dict(_large(content))
        if not self.begun and large:
            columns = {key: Column((self.places, *tensor.shape), tensor.dtype) for key, tensor in large.items()}
            self.shared = SharedTensors.make(columns, self.folder)
        self.begun = True
        fitting = {key for key, tensor in large.items() if self._fits(key, tensor)}
        for key in fitting:
            self.shared.tensors[key][number % self.places].copy_(large[key])
        return _mapped(content, lambda key, part: Elsewhere(key) if key in fitting else part)

    def _fits(self, key: Key, tensor: torch.Tensor) -> bool:
        column = None if self.shared is None else self.shared.layout.columns.get(key)
        return column is not None and (column.shape[1:], column.dtype) == (tensor.shape, tensor.dtype)


def received(content: Any, shared: SharedTensors | None, number: int) -> Any:
    """The whole message of this number, of which nothing lies in shared memory any more."""

    def copied(_: Key, part: Any) -> Any:
        if not isinstance(part, Elsewhere):
            return part
        places = shared.tensors[part.key]
        return places[number % len(places)].clone()

    return _mapped(content, copied)


def _large(content: Any) -> list[tuple[Key, torch.Tensor]]:
    found = []

    def look(key: Key, part: Any) -> None:
        if isinstance(part, torch.Tensor) and part.nbytes >= LARGE:
            found.append((key, part))

    _mapped(content, look)
    return found


def _mapped(content: Any, function, key: Key = ()) -> Any:
    """The same dicts and lists with function(where, part) for each part of them that is neither."""
    if isinstance(content, dict):
        return {name: _mapped(part, function, (*key, str(name))) for name, part in content.items()}
    if isinstance(content, list):
        return [_mapped(part, function, (*key, str(place))) for place, part in enumerate(content)]
    return function(key, content)
