"""ActingGraphs: CUDA graphs of compiled code for acting; one launch per graph instead of thousands of small kernels."""

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from sparring.policies.native.hopper.forward import Cache, HopperForward
from sparring.policies.native.model import Inputs, NativeModel, Prefix, RMSNorm

_SHAPES = 4  # maximum number of batch sizes with graphs; other batch sizes run without graphs
_WARM_UP = 3  # calls before a graph is recorded


class ActingGraphs:
    """Replays a network's `prefix`, `velocity` and `sample` as CUDA graphs, with its current weights (`refresh`)."""

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
        """`half`: compute in bf16; weights of other dtypes are copied. `autotune`: try several kernels (minutes).
        `record(function, tensors)` returns its replay. `kernels`: use hopper/forward.py; `room`: tokens of a step."""
        self._weights, self._steps = list(model.parameters()), steps
        self._model = _half(model) if half else model
        pairs = zip(self._model.parameters(), self._weights, strict=True)
        self._copies = [(copied.data, weight) for copied, weight in pairs if copied is not weight]
        self._addresses, self._versions = self._pointers(), self._version_sum()
        # fused kernels must round like separate ones, because scoring does not fuse
        options = {"emulate_precision_casts": True, "max_autotune": autotune}
        compile_it = partial(torch.compile, dynamic=False, options=options) if compiled else lambda function: function
        if kernels and HopperForward.can_run(self._model):
            hopper = HopperForward(self._model, room, compile_it)
            self._prefix, self._velocity = hopper.prefix, hopper.velocity
        else:
            self._prefix, self._velocity = compile_it(self._model.prefix), compile_it(self._model.velocity)
        self._record = record or _CudaGraph
        self._graphs: dict[tuple, Callable] = {}  # (method, shapes) -> its graph
        self._shapes: tuple = ()
        self._cached: Prefix | Cache | None = None

    def __deepcopy__(self, memo) -> None:
        """Return None: a copy of a policy records its own graphs."""

    def is_valid(self) -> bool:
        """Whether the weights are still in the memory that the graphs read."""
        return self._addresses == self._pointers()

    def refresh(self, learned: bool) -> None:
        """Copy changed weights. `learned`: an update may have changed them; loaded weights are detected here."""
        versions = self._version_sum()
        if self._copies and (learned or versions != self._versions):
            with torch.no_grad():
                torch._foreach_copy_([copied for copied, _ in self._copies], [weight for _, weight in self._copies])
        self._versions = versions

    def supports(self, robots: int) -> bool:
        known = {shapes[0][0] for _, shapes in self._graphs}
        return robots in known or len(known) < _SHAPES

    @torch.no_grad()
    def prefix(self, inputs: Inputs) -> Prefix | Cache:
        tensors = self._tensors_of(inputs)
        self._cached = self._replay("prefix", lambda *tensors: self._prefix(Inputs(*tensors)), tensors)
        return self._cached

    @torch.no_grad()
    def velocity(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """Use the prefix of the last call; the next call overwrites the returned tensor."""
        cached = self._cached
        return self._replay("velocity", lambda x, t: self._velocity(x, t, cached), [x, t])  # type: ignore[arg-type]

    @torch.no_grad()
    def sample(self, inputs: Inputs, noise: torch.Tensor) -> torch.Tensor:
        tensors = self._tensors_of(inputs)

        def sampled(*tensors: torch.Tensor) -> torch.Tensor:
            *inputs, noise = tensors
            prefix = self._prefix(Inputs(*inputs), features=False)
            return NativeModel.integrate(noise, self._steps, lambda x, t: self._velocity(x, t, prefix))

        return self._replay("sample", sampled, [*tensors, noise]).clone()

    def _tensors_of(self, inputs: Inputs) -> list[torch.Tensor]:
        tensors = [tensor for tensor in inputs if tensor is not None]
        self._shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return tensors

    def _replay(self, method: str, function: Callable, tensors: list[torch.Tensor]):
        key = (method, self._shapes)
        if key not in self._graphs:
            self._graphs[key] = self._record(function, tensors)
        return self._graphs[key](*tensors)

    def _pointers(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights]

    def _version_sum(self) -> int:
        """Increases with each in-place change that autograd tracks; an algorithm's update is not tracked."""
        return sum(weight._version for weight in self._weights)


class _CudaGraph:
    """Records `function` once for tensors of these shapes, and replays it with other values."""

    def __init__(self, function: Callable, tensors: list[torch.Tensor]):
        self._inputs = [tensor.clone() for tensor in tensors]
        # a graph's kernels have the priority of the stream that recorded them, not of the stream that replays it
        stream = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)
        stream.wait_stream(torch.cuda.current_stream())  # warm up: compilation and library set-up must not be recorded
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
    """A bf16 copy. It shares weights that are bf16 already, and weights of norms, which compute in fp32."""
    norms = {id(w) for m in model.modules() if isinstance(m, RMSNorm | nn.LayerNorm) for w in m.parameters()}
    shared = {id(w): w for w in model.parameters() if w.dtype == torch.bfloat16 or id(w) in norms}
    half = copy.deepcopy(model, dict(shared))
    for weight in half.parameters():
        if id(weight) not in shared:
            weight.data = weight.data.to(torch.bfloat16)
    return half
