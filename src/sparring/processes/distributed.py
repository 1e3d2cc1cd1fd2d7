"""Several processes as one: rank, device, sums and waits. The only file that imports accelerate.

Alone (the usual case on a laptop) everything here is free: no process group, no import.
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
    ELSEWHERE,
    ENTERED,
    FIRST_TIME,
    PATIENT,
    PLACE,
    TOGETHER,
    UPDATES,
    own_heartbeat,
)

# what gloo says where another process has gone, or does not come
_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket closed")
_LATE = ("Timed out", "timed out")
# how many times rollout.watchdog_s a barrier waits, during evaluations and while the main process saves
_PATIENCE = 180


class Distributed:
    """This process among `world_size`."""

    def __init__(self, device: str = "auto", watchdog_s: float = 60.0):
        # as it was asked for: a name, or auto
        self.asked = device
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        exact_kernels()
        # what the launcher sees of this process
        self.heartbeat = own_heartbeat() if self.world_size > 1 else None
        patience = timedelta(seconds=_PATIENCE * watchdog_s)
        # a launcher of ours has limits of its own, and reports which process it was
        limit = patience if self.heartbeat else timedelta(seconds=FIRST_TIME * watchdog_s)
        self.accelerator = _accelerator(device, limit) if self.world_size > 1 else None
        # by gloo also where there are GPUs, whose waits keep them busy
        self._patient = torch.distributed.new_group(timeout=patience, backend="gloo") if self.accelerator else None
        self.rank = self.accelerator.process_index if self.accelerator else 0
        self.is_main = self.rank == 0
        self.device = self.accelerator.device if self.accelerator else torch.device(pick_device(device))

    @property
    def lacks_gpus(self) -> str | None:
        """A warning where `--gpus N` found none."""
        processes, on = self.world_size, self.device.type
        if processes == 1 or on != "cpu" or self.asked != "auto":
            return None
        return (
            f"--gpus {processes}, but no GPU is visible here: {processes} processes share the CPU; nvidia-smi and "
            "CUDA_VISIBLE_DEVICES say which GPUs there are, device=cpu says that this is meant"
        )

    @torch.no_grad()
    def broadcast_weights(self, module: nn.Module) -> None:
        """All processes go on from the main one's weights and buffers; the same of them must learn everywhere."""
        if not self.accelerator:
            return
        self._check_alike(module)
        for tensor in (held.detach() for held in [*module.parameters(), *module.buffers()]):
            # bytes, which all kinds of numbers are; where they are already here, these are the module's own
            shared = tensor.to(self.device).contiguous()
            with self._in_collective():
                torch.distributed.broadcast(shared.view(-1).view(torch.uint8), src=0)
            tensor.copy_(shared)

    def average_(self, gradient: torch.Tensor) -> None:
        """In place, over the processes. Called once per gradient step: what no loss reads has zeros in it, not None."""
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
        """Each value averaged over the processes; all of them must bring the same keys."""
        if not self.accelerator:
            return values
        own = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        with self._in_collective():
            # NCCL waits for the others where numbers are read
            means = (self.accelerator.reduce(own, "sum") / self.world_size).tolist()
        return dict(zip(values, means, strict=True))

    def mean_of_all(self, values: dict[str, float]) -> dict[str, float]:
        """As `mean`, of each value over the processes that bring it; for now and then: it is slower."""
        everyone = self.gather_objects([values])
        names = dict.fromkeys(name for values in everyone for name in values)
        return {name: fmean(values[name] for values in everyone if name in values) for name in names}

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
        """Where some may come minutes after the others: in any other collective, a rank that is so late hangs."""
        if self.accelerator:
            with self._in_collective(PATIENT):
                torch.distributed.barrier(self._patient)

    def update_done(self) -> None:
        """After the first one, the watchdog is less patient: everything has been compiled."""
        if self.heartbeat:
            self.heartbeat[UPDATES] += 1

    @contextmanager
    def _in_collective(self, place: int = TOGETHER) -> Iterator[None]:
        """Shows the launcher where this rank is; raises PeerGone where another rank has gone."""
        if self.heartbeat:
            self.heartbeat[PLACE] = place
            self.heartbeat[ENTERED] += 1
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, torch.distributed.DistError) and not any(
                word in str(error) for word in _GONE + _LATE
            ):
                raise
            first = str(error).splitlines()[0]
            what = "has gone"
            if any(word in first for word in _LATE):
                what = "did not come to where this one waits; if it was only slow, raise rollout.watchdog_s"
            raise PeerGone(f"process {self.rank}: another process of this run {what} ({first})") from error
        finally:
            if self.heartbeat:
                self.heartbeat[PLACE] = ELSEWHERE

    def _check_alike(self, module: nn.Module) -> None:
        held = [
            f"{name} {list(tensor.shape)} ({tensor.dtype}, {'learns' if tensor.requires_grad else 'does not learn'})"
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        ]
        main, *others = self.gather_objects([held])
        for rank, other in enumerate(others, 1):
            for ours, theirs in zip_longest(main, other, fillvalue="nothing"):
                if ours != theirs:
                    raise UserError(
                        f"the processes do not hold the same {type(module).__name__}: process 0 has {ours} where "
                        f"process {rank} has {theirs}; make it alike in all of them, from the same config and files"
                    )


def exact_kernels() -> None:
    """On a GPU no TF32, which drifts by up to the parity gate's tolerance; and the same weights from the same run."""
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.deterministic = True


def pick_device(name: str) -> str:
    """'auto' is the first visible GPU, else the CPU."""
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
        advice = "choose GPUs by setting CUDA_VISIBLE_DEVICES, with device=cuda"
        raise UserError(f"device={device} names one GPU and {processes} processes run; {advice}")
    if name == "cuda" and processes > gpus:
        raise UserError(f"--gpus {processes}: this machine shows {gpus} GPUs; use --gpus {gpus} or device=cpu")
    return Accelerator(cpu=name == "cpu", kwargs_handlers=[InitProcessGroupKwargs(timeout=limit)])


@contextmanager
def fail_together(distributed: Distributed) -> Iterator[None]:
    """Around collecting: all processes stop together where one of them has lost its robots, and can then save together.

    Others are waited for: robots need not be equally fast.
    """
    failure = None
    try:
        yield
    except Exception as error:  # whatever envs and policies raise; raised again below
        failure = error
    diverged = isinstance(failure, Diverged)
    try:
        distributed.barrier()
    except PeerGone as gone:
        # shows both
        raise gone from failure
    worst = distributed.max(float(failure is not None) + diverged)
    # where one has diverged none of them saves
    if worst == 2 and not diverged:
        raise Diverged("training has diverged in another process of this run") from failure
    if worst:
        raise failure or OtherFailed("another process of this run has failed to collect")


def seed_everything(seed: int) -> None:
    """The global generators, from which fresh weights and the envs and models of users are drawn."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict:
    """In tensors and plain values, so that reading it back never runs code."""
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
