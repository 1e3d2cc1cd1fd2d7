"""`--dry-run`: one rollout and one update, and what they showed. Nothing is written."""

import resource
import sys

from sparring.run import Run
from sparring.tree import Config


def dry_run(config: Config) -> str:
    """Shapes, memory, speed, and the parity of acting and scoring."""
    run = Run(config, folder=False, quiet=True)
    phase = run.phase
    metrics = phase.step(0.0)
    rollout = phase.buffer.rollout()
    steps = phase.progress.env_steps
    lines = [
        f"dry run of '{config.phase}' on {run.distributed.device}: one rollout, one update, nothing written",
        "shapes:",
    ]
    for key, value in sorted(rollout.items(True, True), key=lambda item: str(item[0])):
        name = "/".join(key) if isinstance(key, tuple) else key
        lines.append(f"  {name:28} {str(list(value.shape)):24} {str(value.dtype).removeprefix('torch.')}")
    parameters, stored = sum(p.numel() for p in phase.model.parameters()), phase.buffer.bytes() / 2**20
    lines += [
        f"memory: {parameters:,} parameters, {stored:.3g} MiB of rollout, {_peak():.0f} MiB at most",
        f"speed: {steps / metrics['collect_seconds']:,.0f} env steps/s collecting, "
        f"{metrics['update_seconds']:.2f} s for the update of {steps:,} steps (first calls, warm-up included)",
        f"parity: {metrics['parity']:.3g}",
    ]
    phase.env.close()
    return "\n".join(lines)


def _peak() -> float:
    """Most memory this process ever held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
