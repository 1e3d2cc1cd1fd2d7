"""Weights on their way to the actor."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from sparring.processes.shared_memory import SharedHandle, SharedTensors, finish_copies
from sparring.processes.storage import Column

# ---- On a GPU that acts and learns, acting is to come first: robots wait for it, and it is short.


# of streams, lower numbers are served first; usual ones have 0
_FIRST = -1


def go_first(device: torch.device) -> None:
    """What this thread asks of the GPU from now on, before what others do; of other processes, where MPS runs."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device, priority=_FIRST))


def same_queue(device: torch.device) -> Callable[[], None]:
    """For a thread that works together with this one, to begin with: what they ask of the GPU is done in order."""
    if device.type != "cuda":
        return lambda: None
    return partial(torch.cuda.set_stream, torch.cuda.current_stream(device))


# ---- Weights on their way from who learns to who acts.
#
# All of them once; from then on only what changes: parameters that learn, and buffers, among which are the normalisers'
# statistics. Versions alternate between two places. A reader copies the newest and looks afterwards whether the writer
# has come round to that place meanwhile; so neither ever waits for the other, and no half-written version acts.


# bytes: what memory for tensors begins at a multiple of
_ALIGNMENT = 64
# number of the version that is being written or was last; number of the last that is complete
_WRITING, _WRITTEN = range(2)
# two words, as no name of a weight is
_CONTROL = ("snapshot", "control")


@dataclass(frozen=True)
class SnapshotHandle:
    """`whole`: the weights to begin with."""

    whole: SharedHandle
    changing: SharedHandle
    # parameters that learn -> how far beyond a multiple of _ALIGNMENT bytes they lie
    offsets: dict[str, int]


class SnapshotWriter:
    """The learner's end."""

    def __init__(self, model: nn.Module, version: int, folder: Path | None = None):
        what = "the collecting process's copy of the weights"
        weights = model.state_dict()
        resting = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self.model = model
        self.names = [name for name in weights if name not in resting]
        columns = {(name,): _column(weight) for name, weight in weights.items()}
        self.whole: SharedTensors | None = SharedTensors.make(columns, folder, what)
        for (name,), place in self.whole.tensors.items():
            place.copy_(weights[name])
        columns = {(name,): _column(weights[name], places=2) for name in self.names}
        self.shared = SharedTensors.make(columns | {_CONTROL: Column((2,), torch.int64)}, folder, what)
        self.device = next(model.parameters()).device
        self.shared.pin(self.device)
        self.write(version)

    def handle(self) -> SnapshotHandle:
        learning = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        offsets = {name: parameter.data_ptr() % _ALIGNMENT for name, parameter in learning.items()}
        return SnapshotHandle(self.whole.handle(), self.shared.handle(), offsets)

    def arrived(self) -> None:
        """The weights to begin with are needed no more."""
        self.whole = None

    @torch.no_grad()
    def write(self, version: int) -> None:
        weights, tensors = self.model.state_dict(), self.shared.tensors
        control = tensors[_CONTROL].numpy()
        control[_WRITING] = version
        for name in self.names:
            tensors[name,][version % 2].copy_(weights[name], non_blocking=True)
        finish_copies(self.device)
        control[_WRITTEN] = version


class SnapshotReader:
    """The collector's end."""

    def __init__(self, handle: SnapshotHandle, model: nn.Module):
        parameters = dict(model.named_parameters())
        for name, offset in handle.offsets.items():
            _place(parameters[name], offset)
        whole = SharedTensors.attach(handle.whole)
        model.load_state_dict({name: weight for (name,), weight in whole.tensors.items()})
        self.shared = SharedTensors.attach(handle.changing)
        self.weights = model.state_dict()
        self.names = [key[0] for key in self.shared.tensors if key != _CONTROL]
        self.device = next(model.parameters()).device
        self.shared.pin(self.device)
        # another may have been written since
        self.version = -1

    @torch.no_grad()
    def load(self) -> int:
        """The newest version into the model; its number."""
        control = self.shared.tensors[_CONTROL].numpy()
        while self.version != (newest := int(control[_WRITTEN])):
            for name in self.names:
                self.weights[name].copy_(self.shared.tensors[name,][newest % 2], non_blocking=True)
            finish_copies(self.device)
            # by two it has come round
            if control[_WRITING] < newest + 2:
                self.version = newest
        return self.version


@torch.no_grad()
def _place(parameter: nn.Parameter, offset: int) -> None:
    """Where the learner's lies in its vector of all: products of matrices round by where their operands begin."""
    if parameter.data_ptr() % _ALIGNMENT != offset:
        size = parameter.element_size()
        room = parameter.new_empty(parameter.numel() + _ALIGNMENT // size)
        first = (offset - room.data_ptr()) % _ALIGNMENT // size
        parameter.data = room[first : first + parameter.numel()].view_as(parameter).copy_(parameter)


def _column(weight: torch.Tensor, places: int | None = None) -> Column:
    return Column((*([places] if places else []), *weight.shape), weight.dtype)
