"""Memory that a GPU copies from by itself, played by a double of CUDA's runtime."""

import gc
from contextlib import nullcontext

import pytest
import torch

from sparring.processes.memory import Column, SharedMemory

GPU = torch.device("cuda:1")


class Runtime:
    """What was asked of it, and whether that is refused."""

    def __init__(self, refuses: bool):
        self.refuses, self.asked = refuses, []

    def cudaHostRegister(self, pointer, nbytes, flags):
        self.asked.append(("register", pointer, nbytes))
        return int(self.refuses)

    def cudaHostUnregister(self, pointer):
        self.asked.append(("unregister", pointer))


@pytest.fixture
def runtime(request, monkeypatch):
    runtime = Runtime(request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: runtime.asked.append(("on", device)) or nullcontext())
    return runtime


@pytest.mark.parametrize("runtime", [False], indirect=True)
def test_it_is_pinned_on_its_device_until_it_goes(runtime, tmp_path):
    shared = SharedMemory.make({("x",): Column((3, 5), torch.float32)}, tmp_path)
    data = shared.bytes
    shared.pin(torch.device("cpu"))
    assert not runtime.asked
    shared.pin(GPU)
    # 60 bytes, filled up to a cache line
    assert runtime.asked == [("on", GPU), ("register", data.ctypes.data, 64)]
    pointer = data.ctypes.data
    del shared
    gc.collect()
    # the bytes are still there while it is taken back
    assert runtime.asked[-1] == ("unregister", pointer) and data.ctypes.data == pointer


@pytest.mark.parametrize("runtime", [True], indirect=True)
def test_where_that_is_refused_no_kernel_is_blamed_for_it(runtime, tmp_path, monkeypatch):
    def kernel(*size, device):
        runtime.asked.append(("kernel", device))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", kernel)
    shared = SharedMemory.make({("x",): Column((3, 5), torch.float32)}, tmp_path)
    shared.pin(GPU)
    assert [name for name, *_ in runtime.asked] == ["on", "register", "kernel"]
    del shared
    gc.collect()
    assert runtime.asked[-1][0] == "kernel"
