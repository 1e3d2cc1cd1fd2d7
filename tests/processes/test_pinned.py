"""Pinned shared memory, with a double of the CUDA runtime."""

import gc
from contextlib import nullcontext

import pytest
import torch

from sparring.processes.memory import Column, SharedMemory

GPU = torch.device("cuda:1")


class Runtime:
    """Records calls and, with `refuses`, returns an error."""

    def __init__(self, refuses: bool):
        self.refuses, self.calls = refuses, []

    def cudaHostRegister(self, pointer, nbytes, flags):
        self.calls.append(("register", pointer, nbytes))
        return int(self.refuses)

    def cudaHostUnregister(self, pointer):
        self.calls.append(("unregister", pointer))


@pytest.fixture
def runtime(request, monkeypatch):
    runtime = Runtime(request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda device: runtime.calls.append(("on", device)) or nullcontext())
    return runtime


@pytest.mark.parametrize("runtime", [False], indirect=True)
def test_memory_is_pinned_on_its_device_until_it_is_freed(runtime, tmp_path):
    shared = SharedMemory.make({("x",): Column((3, 5), torch.float32)}, tmp_path)
    data = shared.bytes
    shared.pin(torch.device("cpu"))
    assert not runtime.calls
    shared.pin(GPU)
    # 60 bytes, filled up to a cache line
    assert runtime.calls == [("on", GPU), ("register", data.ctypes.data, 64)]
    pointer = data.ctypes.data
    del shared
    gc.collect()
    # the memory still exists when it is unregistered
    assert runtime.calls[-1] == ("unregister", pointer) and data.ctypes.data == pointer


@pytest.mark.parametrize("runtime", [True], indirect=True)
def test_failed_pinning_clears_the_cuda_error(runtime, tmp_path, monkeypatch):
    def kernel(*size, device):
        runtime.calls.append(("kernel", device))
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", kernel)
    shared = SharedMemory.make({("x",): Column((3, 5), torch.float32)}, tmp_path)
    shared.pin(GPU)
    assert [name for name, *_ in runtime.calls] == ["on", "register", "kernel"]
    del shared
    gc.collect()
    assert runtime.calls[-1][0] == "kernel"
