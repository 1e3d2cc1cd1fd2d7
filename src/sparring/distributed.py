"""Several processes as one: rank, device, sums and waits. The only file that imports accelerate.

Alone (the usual case on a laptop) everything here is free: no process group, no wrapper, no import.
"""

import os
from datetime import timedelta

import torch
from torch import nn

from sparring.errors import UserError


class DeviceError(UserError):
    """A device that is not there."""


class Distributed:
    """This process among `world_size`."""

    def __init__(self, device: str = "auto"):
        self.world_size = int(os.environ.get("WORLD_SIZE", "1"))
        exact_float32()
        self.accelerator = _accelerator(device) if self.world_size > 1 else None
        self.rank = self.accelerator.process_index if self.accelerator else 0
        self.device = self.accelerator.device if self.accelerator else torch.device(pick_device(device))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def wrap(self, module: nn.Module) -> nn.Module:
        """A module whose backward averages gradients over the processes; the module itself when alone."""
        return self.accelerator.prepare_model(module) if self.accelerator else module

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(tensor, "sum") if self.accelerator else tensor

    def mean(self, values: dict[str, float]) -> dict[str, float]:
        """Each value averaged over the processes; all of them must bring the same keys."""
        if not self.accelerator:
            return values
        total = self.sum(torch.tensor(list(values.values()), dtype=torch.float64, device=self.device))
        return dict(zip(values, (total / self.world_size).tolist(), strict=True))

    def max(self, value: float) -> float:
        if not self.accelerator:
            return value
        return float(self.accelerator.gather(torch.tensor([value], dtype=torch.float64, device=self.device)).max())

    def gather_objects(self, values: list) -> list:
        """The lists of all processes, joined in order of rank."""
        if not self.accelerator:
            return values
        from accelerate.utils import gather_object

        return gather_object(values)

    def barrier(self) -> None:
        if self.accelerator:
            self.accelerator.wait_for_everyone()


def exact_float32() -> None:
    """TF32 convolutions drift by up to the parity gate's whole tolerance."""
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")


def pick_device(name: str) -> str:
    """'auto' is the first visible GPU, else the CPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda"):
        count = torch.cuda.device_count()
        index = int(name.partition(":")[2] or 0)
        if index >= count:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
            raise DeviceError(
                f"device={name}: this process sees {count} CUDA devices (CUDA_VISIBLE_DEVICES is {visible}); "
                f"set device={'cuda:' + str(count - 1) if count else 'cpu'}"
            )
    return name


def _accelerator(device: str):
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    name = pick_device(device)
    processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if ":" in name:
        raise DeviceError(
            f"device={device} names one GPU and {processes} processes run; choose GPUs by setting "
            "CUDA_VISIBLE_DEVICES, with device=cuda"
        )
    if name == "cuda" and processes > gpus:
        raise DeviceError(f"--gpus {processes}: this machine shows {gpus} GPUs; use --gpus {gpus} or device=cpu")
    # the others wait while the main process evaluates and saves
    patience = InitProcessGroupKwargs(timeout=timedelta(hours=3))
    return Accelerator(cpu=name == "cpu", kwargs_handlers=[patience])
