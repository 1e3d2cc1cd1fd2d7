"""Checks of a policy: one rollout and one update, then its decisions again: twice, alone, and after save and load."""

import io
import statistics
import time
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from tensordict import TensorDict

from sparring.check.findings import ERROR, NOTE, WARNING, Finding
from sparring.config.schema import Config
from sparring.config.text import shortened
from sparring.contract import POLICY_MEMORY
from sparring.phases.finetune import Finetune
from sparring.policies.policy import Policy, make_policy
from sparring.policies.vla.policy import VLAPolicy
from sparring.processes.memory import free_ram
from sparring.runs.run import Run

# policies that need a setting in addition to their name -> the setting, and an example
NEEDS = {
    "vla": ("model_class", "policy.model_class=package.module:Class policy.model_path=WEIGHTS 'env.cameras=[head]'"),
    "pi0": ("model_path", "policy.model_path=FOLDER 'env.cameras=[head,wrist]'"),
}
_ROWS = 8  # decisions that are made again
_CERTAIN = 0.5  # entropy below which choices may all be the same with other noise
_OUTSIDE = 0.5  # share of action entries that the env clips
_ROUNDING = {"fp32": 1e-3, "bf16": 0.05}  # difference of the same decision in another batch, or in other memory


def policy_findings(config: Config) -> Iterator[Finding]:
    name = config.policy.name
    key, example = NEEDS.get(name, (None, ""))
    if key is not None and getattr(config.policy, key) is None:
        yield Finding(
            "policy", f"'{name}' needs policy.{key}", ERROR, f"write: sparring check {name} {example} (docs/vla.md)"
        )
        return
    run, doing = None, "policy"
    try:
        run = Run(config, folder=False, quiet=True)
        parameters = sum(p.numel() for p in run.phase.model.parameters())
        fresh = ", random weights (no policy.model_path)" if getattr(config.policy, "model_path", "") is None else ""
        yield Finding("policy", f"{name}: {parameters:,} parameters{fresh}")
        doing = "act and evaluate"
        assert isinstance(run.phase, Finetune)
        metrics = run.phase.step(0.0)
        yield Finding(doing, f"parity {metrics['parity']:.3g} (limit {config.ppo.parity_tolerance:g})")
        finite = bool(np.isfinite(metrics["loss"]))
        fix = "check evaluate() for logarithms and divisions of 0"
        yield Finding("update", f"loss {metrics['loss']:.4g}", *(() if finite else (ERROR, fix)))
        doing = "decisions"
        yield from _decisions(run.phase, config)
    except (Exception, SystemExit) as error:  # a policy is third-party code: every exception is a finding
        yield Finding.of_error(doing, error, "correct the policy at that line")
    finally:
        if run is not None:
            run.phase.env.close()


def _decisions(phase: Finetune, config: Config) -> Iterator[Finding]:
    policy, rollout = phase.policy, phase.buffer.rollout().flatten(0, 1)
    yield _actions(rollout["action"], phase.env.spec.discrete_actions)
    picks = torch.linspace(0, len(rollout) - 1, min(_ROWS, len(rollout))).round().long().unique()
    rows = rollout[picks.to(rollout["action"].device)].clone()
    noise = _noise(policy, len(rows), 0).to(rows["action"].device)
    same = _same(policy, rows, noise)
    yield same
    if same.severity == ERROR:
        return  # what follows compares decisions
    rounding = _ROUNDING[getattr(config.policy, "precision", "fp32")]
    yield _alone(policy, rows, noise, rounding)
    yield _gradients(policy, rows)
    yield _saved(phase, config, rows, noise, rounding)
    robots, seconds = phase.env.num_envs, []
    root = rows[torch.arange(robots) % len(rows)]
    for _ in range(5):
        began = time.perf_counter()
        _act(policy, root, noise[torch.arange(robots) % len(rows)]).cpu()
        seconds.append(time.perf_counter() - began)
    size = sum(p.numel() * p.element_size() for p in policy.parameters())
    took = f"{1000 * statistics.median(seconds):.3g} ms for {robots} robots"
    yield Finding("decision", f"{took}; {size / 1e6:.3g} MB of weights")


def _noise(policy: Policy, rows: int, seed: int) -> torch.Tensor:
    drawn = torch.rand(rows, policy.noise_size, generator=torch.Generator().manual_seed(seed))
    return drawn.clamp(1e-6, 1 - 1e-6)


@torch.no_grad()
def _act(policy: Policy, rows: TensorDict, noise: torch.Tensor) -> torch.Tensor:
    """Actions `[B, C, A]` for the observations and memories of decisions."""
    td = TensorDict({"observation": rows["observation"].clone(), "noise": noise.clone()}, rows.batch_size)
    for key in ("is_first", POLICY_MEMORY):
        if (value := rows.get(key, None)) is not None:
            td.set(key, value.clone())
    return policy.act(td)["action"]


def _actions(action: torch.Tensor, choices: int) -> Finding:
    low, high = float(action.min()), float(action.max())
    if choices:
        taken = len(action.unique())
        return Finding("actions", f"{taken} of {choices} choices in {len(action):,} decisions")
    outside = float((action.abs() > 1).float().mean())
    found = f"{low:.3g} to {high:.3g}, {outside:.0%} of the entries outside of [-1, 1]"
    if outside <= _OUTSIDE:
        return Finding("actions", found)
    fix = "scale them: the env clips actions to [-1, 1], so most differences are lost (policy.init_std is the noise)"
    return Finding("actions", found, WARNING, fix)


def _same(policy: Policy, rows: TensorDict, noise: torch.Tensor) -> Finding:
    """Make the same decisions twice, and other ones in between."""
    first = _act(policy, rows, noise)
    other = _act(policy, rows.flip(0), _noise(policy, len(rows), 1).to(noise.device))
    again = _act(policy, rows, noise)
    if not torch.equal(first, again):
        fix = "draw all randomness from td['noise'], and keep what it remembers in memory/policy (remember)"
        found = f"act() gives another action for the same decision and noise (by {_far(first, again):.3g})"
        return Finding("same decision", found, ERROR, fix)
    with torch.no_grad():
        entropy = float(policy.evaluate(rows)["entropy"].double().mean())
    if torch.equal(first, other.flip(0)):
        # the entropy of choices is at least 0
        if -1e-3 < entropy < _CERTAIN:
            return Finding("same decision", "gives the same action again; too certain to show the effect of noise")
        fix = "draw the action from td['noise'], so that the policy explores"
        return Finding("same decision", "act() gives the same actions for other noise", ERROR, fix)
    return Finding("same decision", "gives the same action again, and another one for other noise")


def _alone(policy: Policy, rows: TensorDict, noise: torch.Tensor, rounding: float) -> Finding:
    """Make the last decision alone."""
    row = slice(len(rows) - 1, None)
    with torch.no_grad():
        values = policy.value(rows)
        far = float((policy.value(rows[row]) - values[row]).abs().max() / values.abs().max().clamp_min(1))
    # without sample(), one seed may serve a whole batch (policy.draws=batch): then only values are comparable
    if not isinstance(policy, VLAPolicy) or policy.sampler.samples or policy.sampler.by_rows:
        far = max(far, _far(_act(policy, rows[row], noise[row]), _act(policy, rows, noise)[row]))
    if far > rounding:
        fix = "compute each row by itself: no statistics over the batch, no shapes without the batch"
        found = f"a decision alone differs by {far:.3g} from the same one in a batch of {len(rows)}"
        return Finding("batch", found, ERROR, fix)
    return Finding("batch", f"a decision alone equals the same one in a batch of {len(rows)} (to {rounding:g})")


def _far(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


def _gradients(policy: Policy, rows: TensorDict) -> Finding:
    learning = {name: weight for name, weight in policy.named_parameters() if weight.requires_grad}
    scored = policy.evaluate(rows)
    loss = sum(scored[key].float().sum() for key in ("log_prob", "value", "entropy"))
    missing = _unreached(loss, learning)
    if missing and type(policy).imitation_loss is not Policy.imitation_loss:
        # [B, C, A] -> [B, H, A]: imitation learns whole plans
        action = rows["action"]
        plan = action[:, (torch.arange(policy.horizon) % action.shape[1]).to(action.device)]
        valid = torch.ones(plan.shape[:2], dtype=torch.bool, device=plan.device)
        batch = TensorDict({"observation": rows["observation"], "action": plan, "valid": valid}, rows.batch_size)
        loss, _ = policy.imitation_loss(batch, torch.Generator(plan.device).manual_seed(0))
        missing = _unreached(loss, missing)
    if not missing:
        return Finding("gradient", f"reaches all {len(learning)} weight tensors that learn")
    fix = "use them in evaluate(), without detach() or no_grad() before them; or remove or freeze them"
    names = shortened(", ".join(missing), 120)
    return Finding("gradient", f"{len(missing)} of {len(learning)} weight tensors get none: {names}", WARNING, fix)


def _unreached(loss: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    if not loss.requires_grad:
        return weights
    gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
    return {name: weights[name] for name, gradient in zip(weights, gradients, strict=True) if gradient is None}


def _saved(phase: Finetune, config: Config, rows: TensorDict, noise: torch.Tensor, rounding: float) -> Finding:
    policy = phase.policy
    size = sum(value.numel() * value.element_size() for value in policy.state_dict().values())
    if 3 * size > free_ram():
        found = f"not checked: a second policy needs {2 * size / 1e9:.2g} GB more"
        return Finding("save and load", found, NOTE, "check on a machine with more memory")
    fix = "keep all that act() reads in parameters, buffers (nn.Buffer) and modules (nn.ModuleList)"
    device = rows["action"].device
    try:
        file = io.BytesIO()
        torch.save(policy.state_dict(), file)
        file.seek(0)
        loaded = make_policy(config.policy, phase.policy_spec(config, phase.env.spec), policy.chunk, device).eval()
        loaded.load_state_dict(torch.load(file, map_location=device, weights_only=True))
    except (Exception, SystemExit) as error:  # as above
        return Finding.of_error("save and load", error, fix)
    far = _far(_act(loaded, rows, noise), _act(policy, rows, noise))
    if far > rounding:
        return Finding("save and load", f"the loaded policy acts differently (by {far:.3g})", ERROR, fix)
    return Finding("save and load", "the loaded policy gives the same actions")
