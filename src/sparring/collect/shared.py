"""What two processes share: tensors in memory, and messages over a pipe."""

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

from sparring.data.storage import Column, Key, Layout, Memory, shared_memory_folder

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
