"""The protocol between learner and actor process: messages, weights, and the large tensors of messages.

The learner sends (factory, shared table of deadlines), which create the actor; calls (method, arguments), each of which
is answered; Begin; then, at any time, dicts with changed values of `version`, `staleness` and `videos`.
The actor process sends the spec of its env; answers; then a Report per rollout. A Failure is always its last message.
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
# timeout for the actor process to close its envs; then it is killed
CLOSE_S = 5.0
# minimum size in bytes of tensors of a message that go through shared memory
LARGE = 1 << 16
# alignment in bytes of memory for tensors
_ALIGNMENT = 64
# key of two numbers: the newest version whose writing began, and the newest complete one; weights have keys of length 1
_CONTROL = ("snapshot", "control")
_WRITING, _WRITTEN = range(2)


@dataclass(frozen=True)
class _WeightsHandle:
    # all weights at the start
    initial: SharedHandle
    changing: SharedHandle
    # trainable parameters -> their addresses modulo _ALIGNMENT bytes
    offsets: dict[str, int]


@dataclass(frozen=True)
class Begin:
    """Start collecting with the rollout of this number, which is also the version of the weights."""

    number: int
    weights: _WeightsHandle
    # number of robots to record
    videos: int
    # maximum staleness of rollouts
    staleness: int


@dataclass(frozen=True)
class Failure:
    message: str
    stage: str
    # None: the user can fix the error (UserError)
    traceback: str | None
    diverged: bool = False


@dataclass(frozen=True)
class Report:
    """A finished rollout, which is in its slot of the shared memory."""

    number: int
    version: int
    decisions: int
    env_steps: int
    spec: EnvSpec
    # the collector's state for the next rollout; its large tensors are in shared memory
    state: dict
    metrics: dict[str, float]
    # measured with the weights that acted; None: the learner measures it
    parity: Parity | None
    episodes: list[Episode] = field(repr=False)
    videos: list[EpisodeVideo] = field(repr=False)
    spans: list[Span] = field(repr=False)
    # in the first report only: shared memory of rollouts and of the large tensors of states
    rollouts: SharedHandle | None = None
    states: SharedHandle | None = None


@dataclass(frozen=True)
class _InSlot:
    """Placeholder in a message for a tensor that is in shared memory."""

    key: Key


class TensorSlots:
    """Sends large tensors of messages through shared memory: over a pipe, 20 MB take as long as several decisions.

    At most `slots` messages are in use at a time; the next one overwrites the oldest. The first message determines
    which tensors get memory; tensors of later messages that do not fit stay in their messages.
    """

    def __init__(self, slots: int, folder: Path | None):
        self.slots, self.folder, self.started = slots, folder, False
        self.shared: SharedMemory | None = None

    def extract(self, content: Any, number: int) -> Any:
        """Copy large tensors of message `number` to shared memory; returns the rest of the message."""
        large: dict[Key, torch.Tensor] = {}

        def collect(key: Key, part: Any) -> None:
            if isinstance(part, torch.Tensor) and part.nbytes >= LARGE:
                large[key] = part

        _map(content, collect)
        if not self.started and large:
            columns = {key: Column((self.slots, *tensor.shape), tensor.dtype) for key, tensor in large.items()}
            self.shared = SharedMemory.make(columns, self.folder)
        self.started = True
        known = self.shared.handle.columns if self.shared else {}
        fitting = {key for key, t in large.items() if known.get(key) == Column((self.slots, *t.shape), t.dtype)}
        for key in fitting:
            self.shared.tensors[key][number % self.slots].copy_(large[key])
        return _map(content, lambda key, part: _InSlot(key) if key in fitting else part)

    @staticmethod
    def restore(content: Any, shared: SharedMemory | None, number: int) -> Any:
        """Returns message `number` with copies of its tensors from shared memory."""

        def restored(_: Key, part: Any) -> Any:
            if not isinstance(part, _InSlot):
                return part
            slots = shared.tensors[part.key]
            return slots[number % len(slots)].clone()

        return _map(content, restored)


def _map(content: Any, function: Callable[[Key, Any], Any], key: Key = ()) -> Any:
    """Returns a copy of nested dicts and lists in which function(key, leaf) replaces each leaf."""
    if isinstance(content, dict):
        return {name: _map(part, function, (*key, str(name))) for name, part in content.items()}
    if isinstance(content, list):
        return [_map(part, function, (*key, str(index))) for index, part in enumerate(content)]
    return function(key, content)


class WeightsWriter:
    """Publishes the learner's weights: all of them once, then only trainable parameters and buffers, which include the
    normalisers' statistics.

    Versions alternate between two slots. The reader copies the newest version and checks afterwards whether the writer
    has reused that slot in between. Neither waits for the other, and a partly written version is never used.
    """

    def __init__(self, model: nn.Module, version: int, folder: Path | None = None):
        what = "the actor process's copy of the weights"
        weights = model.state_dict()
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        self.model, self.names = model, [name for name in weights if name not in frozen]
        columns: dict[Key, Column] = {(name,): Column(tuple(w.shape), w.dtype) for name, w in weights.items()}
        # None after the actor process has loaded them
        self.initial: SharedMemory | None = SharedMemory.make(columns, folder, what)
        for (name,), tensor in self.initial.tensors.items():
            tensor.copy_(weights[name])
        columns = {(name,): Column((2, *weights[name].shape), weights[name].dtype) for name in self.names}
        self.shared = SharedMemory.make({**columns, _CONTROL: Column((2,), torch.int64)}, folder, what)
        self.shared.pin(next(model.parameters()).device)
        self.write(version)

    def handle(self) -> _WeightsHandle:
        learning = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        offsets = {name: parameter.data_ptr() % _ALIGNMENT for name, parameter in learning.items()}
        return _WeightsHandle(self.initial.handle, self.shared.handle, offsets)

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
    """Reads published weights in the actor process."""

    def __init__(self, handle: _WeightsHandle, model: nn.Module):
        parameters = dict(model.named_parameters())
        for name, offset in handle.offsets.items():
            _align(parameters[name], offset)
        initial = SharedMemory.attach(handle.initial)
        model.load_state_dict({name: weight for (name,), weight in initial.tensors.items()})
        self.shared = SharedMemory.attach(handle.changing)
        self.weights = model.state_dict()
        self.names = [key[0] for key in self.shared.tensors if key != _CONTROL]
        self.shared.pin(next(model.parameters()).device)
        # unknown: a newer version may have been written since
        self.version = -1

    @torch.no_grad()
    def load(self) -> int:
        """Copy the newest version to the model; returns its number."""
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
    """Move the parameter to an address like the learner's: rounding of matrix products depends on the alignment."""
    if parameter.data_ptr() % _ALIGNMENT != offset:
        size = parameter.element_size()
        room = parameter.new_empty(parameter.numel() + _ALIGNMENT // size)
        first = (offset - room.data_ptr()) % _ALIGNMENT // size
        parameter.data = room[first : first + parameter.numel()].view_as(parameter).copy_(parameter)
