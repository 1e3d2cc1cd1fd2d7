"""Memory that processes share: rollouts and the large tensors of messages."""

import logging
import pickle
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sparring.processes.storage import Column, Key, Layout, Memory, shared_memory_folder

# ---- What two processes share: tensors in memory, and messages over a pipe.


log = logging.getLogger(__name__)

# bytes of a message that are written at once: of up to 16,384 a reader who sees the first has all
_PART = 16_000
_MORE, _LAST = b"+", b"."


@dataclass(frozen=True)
class SharedHandle:
    file: Path
    layout: Layout


class SharedTensors:
    """Tensors by key that another process sees too.

    Once it has attached, nothing is left of them when both have ended, in whatever way. A maker that is killed before
    leaves a file, which goes when the next one is made in that folder.
    """

    def __init__(self, memory: Memory, layout: Layout):
        self.memory, self.layout = memory, layout
        self.tensors: dict[Key, torch.Tensor] = layout.views(memory.data)

    @classmethod
    def make(
        cls,
        columns: Mapping[Key, Column],
        folder: Path | None = None,
        what: str = "what is shared with the collecting process",
    ) -> "SharedTensors":
        """In a file there; None: in shared memory."""
        layout = Layout.of(columns)
        nbytes, folder = max(layout.nbytes, 1), folder or shared_memory_folder()
        instead = "another buffer.folder"
        return cls(Memory.in_file(nbytes, nbytes, folder, True, what, instead, reserved=True), layout)

    @classmethod
    def attach(cls, handle: SharedHandle) -> "SharedTensors":
        """Once: from now on both hold it, and it needs no name any more, which a killed process could leave behind."""
        memory = Memory.open(handle.file, max(handle.layout.nbytes, 1))
        handle.file.unlink()
        return cls(memory, handle.layout)

    def handle(self) -> SharedHandle:
        return SharedHandle(self.memory.file, self.layout)

    def pin(self, device: torch.device) -> None:
        """For a GPU, which then copies from here and to here by itself, several times as fast."""
        if device.type != "cuda":
            return
        runtime, data = torch.cuda.cudart(), self.memory.data
        with torch.cuda.device(device):
            refused = int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0))
            if not refused:
                weakref.finalize(self.memory, runtime.cudaHostUnregister, data.data_ptr())
                return
            log.debug("memory that is shared could not be pinned (CUDA error %s): copies of it are slower", refused)
            # CUDA keeps the error for the next kernel, which would be blamed for it
            with suppress(RuntimeError):
                torch.zeros(1, device=device)


def finish_copies(device: torch.device) -> None:
    """When copies to and from pinned memory that did not wait are done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def send(connection: Connection, message: Any, wait: Callable[[], None] | None = None) -> None:
    send_packed(connection, pack(message), wait)


def pack(message: Any) -> bytes:
    """By value: torch would have a plain `send` pass its tensors on through files and sockets of its own."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def send_packed(connection: Connection, text: bytes, wait: Callable[[], None] | None = None) -> None:
    """`wait` returns when there is room to write a part: who reads may have stopped."""
    for first in range(0, len(text), _PART):
        last = first + _PART >= len(text)
        if wait:
            wait()
        connection.send_bytes((_LAST if last else _MORE) + text[first : first + _PART])


def receive(connection: Connection, wait: Callable[[], None] | None = None) -> Any:
    """The next message. `wait` returns when there is something to read: who sends may stop between two parts."""
    parts = []
    while not parts or parts[-1][:1] == _MORE:
        if wait:
            wait()
        parts.append(connection.recv_bytes())
    return pickle.loads(b"".join(part[1:] for part in parts))


# ---- Large tensors of a message, which go through shared memory: over a pipe, 20 MB take as long as several decisions.


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
