"""What a learner and its collecting process exchange: messages, weights, and the large tensors of messages.

Learner: (factory, memory of deadlines), of which the process is made; calls (method, arguments) to be answered; Begin;
then, at any time, what changes of its `version` of the weights, `staleness` and `films`, by these names.
Collecting process: the spec of its env; answers; then a Report for every rollout. A Failure, at any time, is its last.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sparring.algorithms.scoring import Parity
from sparring.collect.camera import Episode, EpisodeVideo
from sparring.collect.collector import Span
from sparring.contract import EnvSpec
from sparring.processes.memory import Column, Key, SharedHandle, SharedMemory

# stages that can hang, in the order of their columns in the shared table of deadlines
WATCHED = ("make", "reset", "simulate", "infer", "complete", "gate", "share")
# what the collecting process gets to close its envs before it is killed
CLOSE_S = 5.0
# bytes: from this size on, tensors of a message go through shared memory
LARGE = 1 << 16
# bytes: what memory for tensors begins at a multiple of
_ALIGNMENT = 64
# two words, as no name of a weight is: the version that is being written or was last, the last that is complete
_CONTROL = ("snapshot", "control")
_WRITING, _WRITTEN = range(2)


@dataclass(frozen=True)
class _WeightsHandle:
    # the weights to begin with
    whole: SharedHandle
    changing: SharedHandle
    # parameters that learn -> how far beyond a multiple of _ALIGNMENT bytes they lie
    offsets: dict[str, int]


@dataclass(frozen=True)
class Begin:
    """Collect from now on, beginning with the rollout of this number, which is also the version of the weights."""

    number: int
    weights: _WeightsHandle
    # robots to be filmed
    videos: int
    # how far rollouts that begin from now on may be behind
    staleness: int


@dataclass(frozen=True)
class Failure:
    message: str
    stage: str
    # None: a mistake that a person can mend, which needs none
    traceback: str | None
    diverged: bool = False


@dataclass(frozen=True)
class Report:
    """A finished rollout, which lies in its slot of the shared memory."""

    number: int
    version: int
    decisions: int
    env_steps: int
    spec: EnvSpec
    # all that the next rollout depends on; its large tensors lie in shared memory
    state: dict
    metrics: dict[str, float]
    # measured by the weights that collected it; None: the learner measures it itself
    parity: Parity | None
    episodes: list[Episode] = field(repr=False)
    videos: list[EpisodeVideo] = field(repr=False)
    spans: list[Span] = field(repr=False)
    # with the first: where rollouts lie, and the large tensors of states
    rollouts: SharedHandle | None = None
    states: SharedHandle | None = None


@dataclass(frozen=True)
class _InSlot:
    """In a message, where a tensor was that lies in shared memory."""

    key: Key


class TensorSlots:
    """Large tensors of messages, which go through shared memory: over a pipe 20 MB take as long as several decisions.

    There are as many `slots` as messages under way: the next message is written over the first. The first message
    decides which tensors have a place; what does not fit later on stays in its message.
    """

    def __init__(self, slots: int, folder: Path | None):
        self.slots, self.folder, self.begun = slots, folder, False
        self.shared: SharedMemory | None = None

    def take_out(self, content: Any, number: int) -> Any:
        """What is left of the message of this number, to be sent otherwise."""
        large: dict[Key, torch.Tensor] = {}

        def collect(key: Key, part: Any) -> None:
            if isinstance(part, torch.Tensor) and part.nbytes >= LARGE:
                large[key] = part

        _map(content, collect)
        if not self.begun and large:
            columns = {key: Column((self.slots, *tensor.shape), tensor.dtype) for key, tensor in large.items()}
            self.shared = SharedMemory.make(columns, self.folder)
        self.begun = True
        known = self.shared.handle.columns if self.shared else {}
        fitting = {key for key, t in large.items() if known.get(key) == Column((self.slots, *t.shape), t.dtype)}
        for key in fitting:
            self.shared.tensors[key][number % self.slots].copy_(large[key])
        return _map(content, lambda key, part: _InSlot(key) if key in fitting else part)

    @staticmethod
    def put_back(content: Any, shared: SharedMemory | None, number: int) -> Any:
        """The whole message of this number, of which nothing lies in shared memory any more."""

        def restored(_: Key, part: Any) -> Any:
            if not isinstance(part, _InSlot):
                return part
            slots = shared.tensors[part.key]
            return slots[number % len(slots)].clone()

        return _map(content, restored)


def _map(content: Any, function: Callable[[Key, Any], Any], key: Key = ()) -> Any:
    """The same dicts and lists with function(where, part) for each part of them that is neither."""
    if isinstance(content, dict):
        return {name: _map(part, function, (*key, str(name))) for name, part in content.items()}
    if isinstance(content, list):
        return [_map(part, function, (*key, str(place))) for place, part in enumerate(content)]
    return function(key, content)


class WeightsWriter:
    """The learner's end of the weights: all of them once; from then on only what changes, which is parameters that
    learn, and buffers, among which are the normalisers' statistics.

    Versions alternate between two slots. The reader copies the newest and checks afterwards whether the writer has
    reused that slot in between; so neither ever waits for the other, and no half-written version acts.
    """

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

    def handle(self) -> _WeightsHandle:
        learning = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        offsets = {name: parameter.data_ptr() % _ALIGNMENT for name, parameter in learning.items()}
        return _WeightsHandle(self.whole.handle, self.shared.handle, offsets)

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
    """The collecting process's end of the weights."""

    def __init__(self, handle: _WeightsHandle, model: nn.Module):
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
