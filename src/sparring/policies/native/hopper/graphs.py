"""Acting by CUDA graphs of compiled code: one launch per graph instead of thousands of small kernels."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from sparring.policies.native.hopper.forward import Cache, HopperForward
from sparring.policies.native.model import Inputs, NativeModel, Prefix, RMSNorm

_SHAPES = 4  # batch sizes for which graphs are kept; others act without
_WARM_UP = 3


class ActingGraphs:
    """A network's `prefix`, `velocity` and `sample` by graphs, with the weights that it has at the time."""

    def __init__(
        self,
        model: NativeModel,
        steps: int,
        half: bool,
        compiled: bool = True,
        autotune: bool = False,
        record=None,
        kernels: bool = False,
        room: int = 64,
    ):
        """`half`: in bf16, from a copy of other weights (`refresh`). `autotune`: try several kernels (minutes).
        `record(function, tensors)` gives its replay. `kernels`: use hopper/forward.py; `room`: tokens of a step."""
        self._own, self._steps = list(model.parameters()), steps
        self._model = _half(model) if half else model
        pairs = zip(self._model.parameters(), self._own, strict=True)
        self._copies = [(copied.data, weight) for copied, weight in pairs if copied is not weight]
        self._addresses, self._versions = self._pointers(), self._count()
        # fused kernels round where single ones do: what is scored later is not fused
        options = {"emulate_precision_casts": True, "max_autotune": autotune}
        compile_it = partial(torch.compile, dynamic=False, options=options) if compiled else lambda function: function
        if kernels and HopperForward.can_run(self._model):
            own = HopperForward(self._model, room, compile_it)
            self._prefix, self._velocity = own.prefix, own.velocity
        else:
            self._prefix, self._velocity = compile_it(self._model.prefix), compile_it(self._model.velocity)
        self._record = record or _CudaGraph
        self._graphs: dict[tuple, Callable] = {}  # (what, shapes) -> its graph
        self._shapes: tuple = ()
        self._cached: Prefix | Cache | None = None

    def __deepcopy__(self, memo) -> None:
        """The copy of a policy records graphs of its own."""

    def is_valid(self) -> bool:
        return self._addresses == self._pointers()

    def refresh(self, learned: bool) -> None:
        """`learned`: weights may have changed in an update; whether others were loaded is noticed here."""
        versions = self._count()
        if self._copies and (learned or versions != self._versions):
            with torch.no_grad():
                torch._foreach_copy_([copied for copied, _ in self._copies], [weight for _, weight in self._copies])
        self._versions = versions

    def admits(self, robots: int) -> bool:
        known = {shapes[0][0] for _, shapes in self._graphs}
        return robots in known or len(known) < _SHAPES

    @torch.no_grad()
    def prefix(self, inputs: Inputs) -> Prefix | Cache:
        tensors = self._tensors_of(inputs)
        self._cached = self._replay("prefix", lambda *tensors: self._prefix(Inputs(*tensors)), tensors)
        return self._cached

    @torch.no_grad()
    def velocity(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """With the prefix of the last call, in a buffer that the next one writes to."""
        cached = self._cached
        return self._replay("velocity", lambda x, t: self._velocity(x, t, cached), [x, t])  # type: ignore[arg-type]

    @torch.no_grad()
    def sample(self, inputs: Inputs, noise: torch.Tensor) -> torch.Tensor:
        tensors = self._tensors_of(inputs)

        def decide(*tensors: torch.Tensor) -> torch.Tensor:
            *inputs, noise = tensors
            prefix = self._prefix(Inputs(*inputs), features=False)
            return NativeModel.integrate(noise, self._steps, lambda x, t: self._velocity(x, t, prefix))

        return self._replay("sample", decide, [*tensors, noise]).clone()

    def _tensors_of(self, inputs: Inputs) -> list[torch.Tensor]:
        tensors = [tensor for tensor in inputs if tensor is not None]
        self._shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return tensors

    def _replay(self, what: str, function: Callable, tensors: list[torch.Tensor]):
        key = (what, self._shapes)
        if key not in self._graphs:
            self._graphs[key] = self._record(function, tensors)
        return self._graphs[key](*tensors)

    def _pointers(self) -> list[int]:
        return [weight.data_ptr() for weight in self._own]

    def _count(self) -> int:
        """Goes up with each change in place that autograd knows of; an algorithm's update is none."""
        return sum(weight._version for weight in self._own)


class _CudaGraph:
    """`function` on tensors of these shapes, recorded once and replayed with others."""

    def __init__(self, function: Callable, tensors: list[torch.Tensor]):
        self._inputs = [tensor.clone() for tensor in tensors]
        # kernels of a graph have the priority of the stream that they were recorded on, not of the one that replays it
        stream = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)
        stream.wait_stream(torch.cuda.current_stream())  # compilation, and what libraries do once, is not recorded
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._outputs = function(*self._inputs)

    def __call__(self, *tensors: torch.Tensor):
        for static, tensor in zip(self._inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._outputs


def _half(model: NativeModel) -> NativeModel:
    """The same in bf16. It shares weights that are in bf16 already, and those of norms, which compute in fp32."""
    norms = {id(w) for m in model.modules() if isinstance(m, RMSNorm | nn.LayerNorm) for w in m.parameters()}
    shared = {id(w): w for w in model.parameters() if w.dtype == torch.bfloat16 or id(w) in norms}
    half = copy.deepcopy(model, dict(shared))
    for weight in half.parameters():
        if id(weight) not in shared:
            weight.data = weight.data.to(torch.bfloat16)
    return half
