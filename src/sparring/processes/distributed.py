"""Several processes of one run: rank, device, reductions and barriers. The only file that imports accelerate.

With a single process nothing here has a cost: there is no process group and no import.
"""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import zip_longest
from statistics import fmean
from typing import cast

import numpy as np
import torch
from torch import nn

from sparring.errors import Diverged, OtherFailed, PeerGone, UserError
from sparring.processes.heartbeat import (
    BARRIER,
    COLLECTIVE,
    ENTERED,
    FIRST_TIME,
    OUTSIDE,
    PLACE,
    UPDATES,
    own_heartbeat,
)

# parts of gloo's messages if another process has ended, or is late
_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket closed")
_LATE = ("Timed out", "timed out")
# timeout of a barrier in units of rollout.watchdog_s; processes wait during evaluations and while the main one saves
_BARRIER_FACTOR = 180


class Distributed:
    """This process among `world_size`."""

    def __init__(self, device: str = "auto", watchdog_s: float = 60.0):
        # as configured: a name, or auto
        self.requested = device
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        exact_kernels()
        # read by the launcher
        self.heartbeat = own_heartbeat() if self.world_size > 1 else None
        long = timedelta(seconds=_BARRIER_FACTOR * watchdog_s)
        # our launcher has its own limits, and reports which process exceeded them
        limit = long if self.heartbeat else timedelta(seconds=FIRST_TIME * watchdog_s)
        self.accelerator = _accelerator(device, limit) if self.world_size > 1 else None
        # gloo even with GPUs, because NCCL keeps a GPU busy while it waits
        self._barrier_group = torch.distributed.new_group(timeout=long, backend="gloo") if self.accelerator else None
        self.rank = self.accelerator.process_index if self.accelerator else 0
        self.is_main = self.rank == 0
        self.device = self.accelerator.device if self.accelerator else torch.device(pick_device(device))

    @property
    def lacks_gpus(self) -> str | None:
        """A warning if `--gpus N` was given and no GPU is visible."""
        processes, used = self.world_size, self.device.type
        if processes == 1 or used != "cpu" or self.requested != "auto":
            return None
        return (
            f"--gpus {processes}, but no GPU is visible: {processes} processes share the CPU. Check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES; device=cpu turns this warning off"
        )

    @torch.no_grad()
    def broadcast_weights(self, module: nn.Module) -> None:
        """Copy weights and buffers of the main process to all others; the same parameters must learn everywhere."""
        if not self.accelerator:
            return
        self._check_equal(module)
        for tensor in (own.detach() for own in [*module.parameters(), *module.buffers()]):
            # as bytes, which works for every dtype; without a copy if the tensor is already on this device
            shared = tensor.to(self.device).contiguous()
            with self._in_collective():
                torch.distributed.broadcast(shared.view(-1).view(torch.uint8), src=0)
            tensor.copy_(shared)

    def average_(self, gradient: torch.Tensor) -> None:
        """Average over the processes, in place. Called per gradient step; unused parameters have zeros, not None."""
        if not self.accelerator:
            return
        shared = gradient.to(self.device)
        with self._in_collective():
            torch.distributed.all_reduce(shared)
        gradient.copy_(shared.div_(self.world_size))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.accelerator:
            return tensor
        with self._in_collective():
            return self.accelerator.reduce(tensor, "sum")

    def mean(self, values: dict[str, float]) -> dict[str, float]:
        """Average each value over the processes; all of them must give the same keys."""
        if not self.accelerator:
            return values
        own = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        with self._in_collective():
            # inside the collective, because NCCL waits for the others when the numbers are read
            means = (self.accelerator.reduce(own, "sum") / self.world_size).tolist()
        return dict(zip(values, means, strict=True))

    def mean_of_all(self, values: dict[str, float]) -> dict[str, float]:
        """Average each value over the processes that have it. Slower than `mean`."""
        gathered = self.gather_objects([values])
        names = dict.fromkeys(name for values in gathered for name in values)
        return {name: fmean(values[name] for values in gathered if name in values) for name in names}

    def max(self, value: float) -> float:
        if not self.accelerator:
            return value
        with self._in_collective():
            return float(self.accelerator.gather(torch.tensor([value], dtype=torch.float64, device=self.device)).max())

    def gather_objects(self, values: list) -> list:
        """The lists of all processes, joined in order of rank."""
        if not self.accelerator:
            return values
        from accelerate.utils import gather_object

        with self._in_collective():
            return gather_object(values)

    def barrier(self) -> None:
        """Wait for all processes, even for minutes; in any other collective the watchdog reports such a delay."""
        if self.accelerator:
            with self._in_collective(BARRIER):
                torch.distributed.barrier(self._barrier_group)

    def update_done(self) -> None:
        """Count an update. After the first one, everything is compiled and the watchdog's timeout is shorter."""
        if self.heartbeat:
            self.heartbeat[UPDATES] += 1

    @contextmanager
    def _in_collective(self, place: int = COLLECTIVE) -> Iterator[None]:
        """Record for the launcher where this rank is; raise PeerGone if another rank has ended or is too late."""
        if self.heartbeat:
            self.heartbeat[PLACE] = place
            self.heartbeat[ENTERED] += 1
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.distributed.DistError) and not any(
                text in str(error) for text in _GONE + _LATE
            ):
                raise
            first = str(error).splitlines()[0]
            what = "has ended"
            if any(text in first for text in _LATE):
                what = "did not reach this collective; if it was only slow, raise rollout.watchdog_s"
            raise PeerGone(f"process {self.rank}: another process of this run {what} ({first})") from error
        finally:
            if self.heartbeat:
                self.heartbeat[PLACE] = OUTSIDE

    def _check_equal(self, module: nn.Module) -> None:
        own = [
            f"{name} {list(tensor.shape)} ({tensor.dtype}, {'learns' if tensor.requires_grad else 'does not learn'})"
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        ]
        main, *others = self.gather_objects([own])
        for rank, other in enumerate(others, 1):
            for ours, theirs in zip_longest(main, other, fillvalue="nothing"):
                if ours != theirs:
                    raise UserError(
                        f"{type(module).__name__} differs between processes: process 0 has {ours}, process {rank} has "
                        f"{theirs}; create it in all of them from the same config and files"
                    )


def exact_kernels() -> None:
    """On a GPU disable TF32, whose errors may reach the parity gate's tolerance, and make cuDNN deterministic."""
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.deterministic = True


def pick_device(name: str) -> str:
    """'auto' is the first visible GPU, or the CPU if there is none."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        count = torch.cuda.device_count()
        index = int(name.partition(":")[2] or 0)
        if index >= count:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise UserError(
                f"device={name}: this process sees {count} CUDA devices (CUDA_VISIBLE_DEVICES is {visible}); "
                f"set device={'cuda:' + str(count - 1) if count else 'cpu'}"
            )
    return name


def _accelerator(device: str, limit: timedelta):
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    name = pick_device(device)
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ":" in name:
        advice = "set device=cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
        raise UserError(f"device={device} names one GPU for {processes} processes; {advice}")
    if name == "cuda" and processes > gpus:
        raise UserError(f"--gpus {processes}: only {gpus} GPUs are visible; use --gpus {gpus} or device=cpu")
    return Accelerator(cpu=name == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)])


@contextmanager
def fail_together(distributed: Distributed) -> Iterator[None]:
    """Context of collecting: if it fails in one process, all processes stop after it and can save together.

    Processes wait for each other at its end, because robots need not be equally fast.
    """
    failure = None
    try:
        yield
    except Exception as error:  # any error of envs and policies; raised again below
        failure = error
    diverged = isinstance(failure, Diverged)
    try:
        distributed.barrier()
    except PeerGone as gone:
        # chained, so that both are shown
        raise gone from failure
    worst = distributed.max(float(failure is not None) + diverged)
    # if one has diverged, no process saves
    if worst == 2 and not diverged:
        raise Diverged("training has diverged in another process of this run") from failure
    if worst:
        raise failure or OtherFailed("collecting has failed in another process of this run")


def seed_everything(seed: int) -> None:
    """Seed the global generators, which initial weights and user-defined envs and models use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict:
    """The state of the global generators as tensors and plain values, so that loading it never runs code."""
    version, numbers, gauss = random.getstate()
    name, keys, position, has_gauss, cached = cast(tuple, np.random.get_state())
    numpy = [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached]
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return {"python": [version, list(numbers), gauss], "numpy": numpy, "torch": torch.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict, device: torch.device) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
