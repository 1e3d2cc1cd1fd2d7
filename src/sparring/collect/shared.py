"""What two processes share: tensors in memory, and messages over a pipe."""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sparring.data.storage import Column, Key, Layout, Memory, shared_memory_folder


@dataclass(frozen=True)
class SharedHandle:
    file: Path
    layout: Layout


class SharedTensors:
    """Tensors by key that another process sees too. Nothing is left of them when both have ended, in whatever way."""

    def __init__(self, memory: Memory, layout: Layout):
        self.memory, self.layout = memory, layout
        self.tensors: dict[Key, torch.Tensor] = layout.views(memory.data)

    @classmethod
    def make(cls, columns: Mapping[Key, Column], folder: Path | None = None) -> "SharedTensors":
        layout = Layout.of(columns)
        nbytes = max(layout.nbytes, 1)
        return cls(Memory.in_file(nbytes, nbytes, folder or shared_memory_folder(), shared=True), layout)

    @classmethod
    def attach(cls, handle: SharedHandle) -> "SharedTensors":
        """Once: from now on both hold it, and it needs no name any more, which a killed process could leave behind."""
        memory = Memory.open(handle.file, max(handle.layout.nbytes, 1))
        handle.file.unlink()
        return cls(memory, handle.layout)

    def handle(self) -> SharedHandle:
        return SharedHandle(self.memory.file, self.layout)


def send(connection: Connection, message: Any) -> None:
    """By value: torch would have a plain `send` pass its tensors on through files and sockets of its own."""
    connection.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())
