"""How long does one decision of pi0 take on one GPU, in Sparring and in transformers?

    python benchmarks/gpu/pi0_decision.py [--batch 1 16] [--steps 10] [--rounds 20] [--no-compile] [--no-kernels]
    python benchmarks/gpu/pi0_decision.py --quick --device cpu --no-compile     # checks that it runs: tiny, not stored

Both use the same random weights at pi0's full size in bf16, and the same inputs: 2 cameras of 224 px, 32 text tokens,
chunks of 50 actions, 10 denoising steps. transformers runs its `sample_actions` in eager mode; the native VLA runs
`ActingGraphs.sample`: custom kernels (on Hopper GPUs) and compiled code, as one CUDA graph. CUDA events time both, from
inputs on the GPU to actions on the GPU; medians are compared. Also printed: the time of the first decision, which
compiles, and with --parts those of its parts.

The outputs must be equal within bf16, which rounds differently in every kernel: relative to the same weights in fp32,
the error of Sparring may be at most 1.5 times that of transformers.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import PI0Config, PI0ForConditionalGeneration

from sparring.policies.native.checkpoint import _from_transformers, _settings_of
from sparring.policies.native.config import PRESETS
from sparring.policies.native.hopper.graphs import ActingGraphs
from sparring.policies.native.model import Inputs, NativeModel

sys.path.insert(0, str(Path(__file__).parents[1]))
import report  # noqa: E402

CAMERAS, WORDS, CHUNK = 2, 32, 50
# batch -> (largest milliseconds, smallest speedup)
TARGETS = {1: (15.0, 15.0), 16: (95.0, 3.4)}
LARGEST_ERROR_RATIO = 1.5


def make_pi0(preset: str, device: str) -> PI0ForConditionalGeneration:
    """A pi0 with random weights, created on the device; buffers stay in fp32."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = PI0ForConditionalGeneration(PI0Config(**_settings_of(PRESETS[preset]), chunk_size=CHUNK))
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def make_native(pi0: PI0ForConditionalGeneration) -> NativeModel:
    weights, sizes = _from_transformers(pi0)
    with torch.device("meta"):
        native = NativeModel(sizes)
    native.load_state_dict(weights, assign=True)
    return native.eval().requires_grad_(False)


def make_inputs(native: NativeModel, batch: int, device: str) -> tuple[Inputs, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    sizes = native.sizes
    images = torch.rand(batch, CAMERAS, 3, sizes.image_size, sizes.image_size, generator=generator) * 2 - 1
    tokens = torch.randint(3, sizes.vocabulary, (batch, WORDS), generator=generator)
    # every other text is a quarter shorter
    lengths = torch.where(torch.arange(batch) % 2 == 0, WORDS, WORDS * 3 // 4)
    text = torch.arange(WORDS) < lengths[:, None]
    state = torch.randn(batch, sizes.max_state_dim, generator=generator)
    noise = torch.randn(batch, CHUNK, sizes.max_action_dim, generator=generator)
    # noise that bf16 represents exactly, so that both start from the same values
    noise = noise.bfloat16().float()
    inputs = Inputs(images.bfloat16(), tokens, text, state.bfloat16())
    return Inputs(*(x.to(device) for x in inputs if x is not None)), noise.to(device)


def theirs(pi0: PI0ForConditionalGeneration, native: NativeModel, inputs: Inputs, noise: torch.Tensor, steps: int):
    batch, patches = len(noise), CAMERAS * native.vision.count
    images = torch.full((batch, patches), native.sizes.vocabulary, device=noise.device)
    given = {
        "input_ids": torch.cat([images, torch.where(inputs.text, inputs.tokens, 0)], 1),
        "attention_mask": torch.cat([torch.ones_like(images), inputs.text.long()], 1),
        "pixel_attention_mask": torch.ones(batch, CAMERAS, dtype=torch.bool, device=noise.device),
        "pixel_values": inputs.images,
        "state": inputs.state,
        "noise": noise.bfloat16(),
    }
    return lambda: pi0.sample_actions(num_steps=steps, **given)


def median_ms(function, rounds: int, device: str) -> float:
    for _ in range(2):
        function()
    if device == "cpu":
        started = time.perf_counter()
        function()
        return (time.perf_counter() - started) * 1e3
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@torch.no_grad()
def in_fp32(native: NativeModel, inputs: Inputs, noise: torch.Tensor, steps: int) -> torch.Tensor:
    with torch.device("meta"):
        exact = NativeModel(native.sizes)
    exact.load_state_dict({name: value.float() for name, value in native.state_dict().items()}, assign=True)
    return exact.sample(inputs._replace(images=inputs.images.float(), state=inputs.state.float()), noise, steps)


def distance(actions: torch.Tensor, exact: torch.Tensor) -> float:
    """Root mean square of the difference, relative to that of `exact`."""
    return float((actions.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def measure(pi0, native: NativeModel, batch: int, args) -> dict:
    device, rounds = args.device, args.rounds
    inputs, noise = make_inputs(native, batch, device)
    exact = in_fp32(native, inputs, noise, args.steps)
    their = theirs(pi0, native, inputs, noise, args.steps)
    their_actions = their()
    result = {"batch": batch, "transformers_ms": round(median_ms(their, max(rounds // 2, 1), device), 2)}
    record = None if device != "cpu" else lambda function, tensors: function
    fast = ActingGraphs(native, args.steps, True, not args.no_compile, args.autotune, record, not args.no_kernels)
    started = time.perf_counter()
    actions = fast.sample(inputs, noise)
    result["first_s"] = round(time.perf_counter() - started, 1)
    result["native_ms"] = round(median_ms(lambda: fast.sample(inputs, noise), rounds, device), 3)
    result["times_as_fast"] = round(result["transformers_ms"] / result["native_ms"], 2)
    result["native_from_fp32"] = distance(actions, exact)
    result["transformers_from_fp32"] = distance(their_actions, exact)
    with torch.no_grad():
        result["native_eager_ms"] = round(median_ms(lambda: native.sample(inputs, noise, args.steps), 3, device), 2)
    if args.parts:
        t = torch.full((batch,), 0.5, device=device)
        result["prefix_ms"] = round(median_ms(lambda: fast.prefix(inputs), rounds, device), 3)
        result["denoising_step_ms"] = round(median_ms(lambda: fast.velocity(noise, t), rounds, device), 3)
    return result


def judged(result: dict) -> list[str]:
    most, least = TARGETS.get(result["batch"], (float("inf"), 0.0))
    equal = result["native_from_fp32"] <= LARGEST_ERROR_RATIO * result["transformers_from_fp32"]
    checks = {
        f"<= {most:g} ms": result["native_ms"] <= most,
        f">= {least:g}x": result["times_as_fast"] >= least,
        "equal within bf16": equal,
    }
    return [f"{name}: {'met' if met else 'NOT MET'}" for name, met in checks.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="CUDA graphs of single kernels")
    parser.add_argument("--autotune", action="store_true", help="let the compiler try several kernels; takes minutes")
    parser.add_argument("--no-kernels", action="store_true", help="only compiled code, as on other GPUs")
    parser.add_argument("--parts", action="store_true", help="also time the prefix and a denoising step")
    parser.add_argument("--quick", action="store_true", help="check that it runs: tiny, any device, not stored")
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    about = report.metadata() | {"device": report.device(args.device), "sizes": vars(args) | {"chunk": CHUNK}}
    about["versions"]["transformers"] = transformers.__version__
    pi0 = make_pi0("tiny" if args.quick else "pi0", args.device)
    native = make_native(pi0)
    results = []
    for batch in args.batch:
        result = measure(pi0, native, batch, args)
        result["targets"] = [] if args.quick else judged(result)
        results.append(result)
        print("\n".join(f"{name:24} {value}" for name, value in result.items()), flush=True)
        if not args.quick:
            # after each batch, so that an interrupted run keeps its results
            report.write_json(report.RESULTS / "pi0_decision.json", {"about": about, "results": results})


if __name__ == "__main__":
    main()
