"""Weights on their way from the learner to the collecting process.

All of them once; from then on only what changes: parameters that learn, and buffers, among which are the normalisers'
statistics. Versions alternate between two slots. The reader copies the newest and checks afterwards whether the writer
has reused that slot meanwhile; so neither ever waits for the other, and no half-written version acts.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from sparring.processes.shared_memory import Column, Key, SharedHandle, SharedMemory

# bytes: what memory for tensors begins at a multiple of
_ALIGNMENT = 64
# two words, as no name of a weight is: the version that is being written or was last, the last that is complete
_CONTROL = ("snapshot", "control")
_WRITING, _WRITTEN = range(2)


@dataclass(frozen=True)
class WeightsHandle:
    # the weights to begin with
    whole: SharedHandle
    changing: SharedHandle
    # parameters that learn -> how far beyond a multiple of _ALIGNMENT bytes they lie
    offsets: dict[str, int]


class WeightsWriter:
    """The learner's end."""

    def __init__(self, model: nn.Module, version: int, folder: Path | None = None):
        what = "the collecting process's copy of the weights"
        weights = model.state_dict()
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self.model, self.names = model, [name for name in weights if name not in frozen]
        columns: dict[Key, Column] = {(name,): Column(tuple(w.shape), w.dtype) for name, w in weights.items()}
        # until they have arrived
        self.whole: SharedMemory | None = SharedMemory.make(columns, folder, what)
        for (name,), tensor in self.whole.tensors.items():
            tensor.copy_(weights[name])
        columns = {(name,): Column((2, *weights[name].shape), weights[name].dtype) for name in self.names}
        self.shared = SharedMemory.make({**columns, _CONTROL: Column((2,), torch.int64)}, folder, what)
        self.shared.pin(next(model.parameters()).device)
        self.write(version)

    def handle(self) -> WeightsHandle:
        learning = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        offsets = {name: parameter.data_ptr() % _ALIGNMENT for name, parameter in learning.items()}
        return WeightsHandle(self.whole.handle, self.shared.handle, offsets)

    @torch.no_grad()
    def write(self, version: int) -> None:
        weights, tensors = self.model.state_dict(), self.shared.tensors
        control = tensors[_CONTROL].numpy()
        control[_WRITING] = version
        for name in self.names:
            tensors[name,][version % 2].copy_(weights[name], non_blocking=True)
        self.shared.finish_copies()
        control[_WRITTEN] = version


class WeightsReader:
    """The collecting process's end."""

    def __init__(self, handle: WeightsHandle, model: nn.Module):
        parameters = dict(model.named_parameters())
        for name, offset in handle.offsets.items():
            _align(parameters[name], offset)
        whole = SharedMemory.attach(handle.whole)
        model.load_state_dict({name: weight for (name,), weight in whole.tensors.items()})
        self.shared = SharedMemory.attach(handle.changing)
        self.weights = model.state_dict()
        self.names = [key[0] for key in self.shared.tensors if key != _CONTROL]
        self.shared.pin(next(model.parameters()).device)
        # another may have been written since
        self.version = -1

    @torch.no_grad()
    def load(self) -> int:
        """The newest version into the model; its number."""
        control = self.shared.tensors[_CONTROL].numpy()
        while self.version != (newest := int(control[_WRITTEN])):
            for name in self.names:
                self.weights[name].copy_(self.shared.tensors[name,][newest % 2], non_blocking=True)
            self.shared.finish_copies()
            # the writer reuses a slot every two versions
            if control[_WRITING] < newest + 2:
                self.version = newest
        return self.version


@torch.no_grad()
def _align(parameter: nn.Parameter, offset: int) -> None:
    """As the learner's lies in its vector of all: products of matrices round by where their operands begin."""
    if parameter.data_ptr() % _ALIGNMENT != offset:
        size = parameter.element_size()
        room = parameter.new_empty(parameter.numel() + _ALIGNMENT // size)
        first = (offset - room.data_ptr()) % _ALIGNMENT // size
        parameter.data = room[first : first + parameter.numel()].view_as(parameter).copy_(parameter)
