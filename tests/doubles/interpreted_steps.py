"""Run by test_native_forward.py: compares the kernels, in Triton's interpreter on the CPU, with the plain network.

Prints the largest difference of each case, relative to the largest velocity. The interpreter lacks bf16; fp16 is used.
"""

import json
import math

import torch
from doubles_launches import Kernels as PlainKernels
from doubles_native import make_inputs, make_model

from sparring.policies.native.hopper import forward, kernels
from sparring.policies.native.hopper.forward import HopperForward


@torch.no_grad()
def difference(model, memory: bool) -> float:
    inputs = make_inputs(2, lengths=(7, 4), memory=memory)
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(2, 5, 8, generator=generator), torch.rand(2, generator=generator)
    expected = model.velocity(x, t, model.prefix(inputs))
    own = HopperForward(model, 9, lambda function: function)
    cache = own.prefix(inputs)
    # a step must not depend on what the previous one left in the cache
    own.velocity(x + 1, t, cache)
    velocity = own.velocity(x, t, cache)
    assert not own._kernels.counters.any()
    return float((velocity - expected).abs().max() / expected.abs().max())


def main() -> None:
    torch.set_num_threads(1)
    # this activation differs on CPUs
    kernels._gelu_product = PlainKernels.gelu_product
    tables, found = dict(kernels.TILES), {}
    sizes = {"layers": 2, "width": 64, "mlp": 128, "expert_width": 64, "expert_mlp": 128, "head_dim": 32}
    for most, tiles in [*tables.items(), ("many", tables[math.inf])]:
        kernels.TILES.clear()
        kernels.TILES[math.inf] = tiles
        forward.FEW_TOKENS = 0 if most == "many" else 1000
        found[f"{most} fp16"] = difference(make_model(**sizes, kv_heads=1, memory_size=3).half(), memory=True)
        if most != 64:
            found[f"{most} fp32"] = difference(make_model(**sizes, heads=4, kv_heads=2), memory=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
