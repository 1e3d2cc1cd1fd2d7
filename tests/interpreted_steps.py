"""Run by test_native_vla_steps.py: the kernels by Triton's interpreter on the CPU, against the plain network.

Prints how far each case is from it, relative to the largest velocity. The interpreter knows no bf16: fp16 stands in.
"""

import json
import math

import torch
from doubles_native import make_inputs, make_model

from sparring.policies.native import launches
from sparring.policies.native.steps import Steps


@torch.no_grad()
def difference(model, memory: bool) -> float:
    inputs = make_inputs(2, lengths=(7, 4), memory=memory)
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(2, 5, 8, generator=generator), torch.rand(2, generator=generator)
    expected = model.velocity(x, t, model.prefix(inputs))
    steps = Steps(model, 9, lambda function: function)
    cache = steps.prefix(inputs)
    # what a step leaves in the cache does not matter to the next
    steps.velocity(x + 1, t, cache)
    velocity = steps.velocity(x, t, cache)
    assert not steps._counters.any()
    return float((velocity - expected).abs().max() / expected.abs().max())


def main() -> None:
    torch.set_num_threads(1)
    tables, found = dict(launches.TILES), {}
    for most, tiles in tables.items():
        launches.TILES.clear()
        launches.TILES[math.inf] = tiles
        model = make_model(layers=1, expert_width=64, expert_mlp=96, head_dim=32, kv_heads=1, memory_size=3)
        found[f"{most} fp16"] = difference(model.half(), memory=True)
    model = make_model(layers=1, expert_width=64, expert_mlp=96, head_dim=32, heads=2, kv_heads=2)
    found["inf fp32"] = difference(model, memory=False)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
