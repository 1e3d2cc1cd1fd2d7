"""FlowChain: samples action chunks by denoising and computes the log-probability of the samples.

Time runs from 1 (noise) to 0 (action) in K steps of h = 1/K; the network predicts the velocity v = eps - a. A step
follows the ODE, x' = x - h v, or draws x' from a normal (the kernel) and is scored, in the space of normalised actions.
In FPO every step follows the ODE, and the flow-matching loss of the action at S sampled points replaces the log-prob.
Letters: B decisions, K denoising steps, S of them scored, H steps of a chunk, C of them executed, A action dims."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.normalize import Normalizer
from sparring.policies.actor_critic import LOG_SQRT_2PI, EncodedPolicy
from sparring.policies.configs import OF_ONE_METHOD, DenoisingConfig
from sparring.policies.policy import Loss, executed_mask

# encoded observations for `denoise`, one row per decision: a Tensor, or a TensorDict with `features` [B, F]
Prefix = Any
Normal = tuple[torch.Tensor, torch.Tensor]  # mean and std of the next state, both broadcastable to [B, S, H, A]


class FlowChain(EncodedPolicy):
    """Base of all denoising policies. A subclass has a `critic`, `encode` (once per decision), `denoise` (per step)."""

    config: DenoisingConfig

    def __init__(self, config: DenoisingConfig, spec: EnvSpec, chunk: int, noise_inputs: int, normalize_actions: bool):
        """`noise_inputs`: size of the input of the learned noise (`_noise_condition`)."""
        super().__init__()
        self.config, self.chunk, self.horizon = config, chunk, config.horizon or chunk
        _check_settings(config, spec, chunk)
        self.averages_log_prob = config.reduction == "mean"
        self.padding = spec.action_padding
        self.action_dim = spec.action_dim - spec.action_padding
        self.sampling_steps, self.step_size = config.sampling_steps, 1.0 / config.sampling_steps
        steps, shape = self.sampling_steps, (self.horizon, self.action_dim)
        self.times = nn.Buffer((1.0 - torch.arange(steps, dtype=torch.float64) / steps).float(), persistent=False)
        self.is_fpo = config.method == "fpo"
        self.reports_sampled = not self.is_fpo  # with few denoising steps the ODE and the SDE are different policies
        self.trace_keys = [("trace", "states"), ("trace", "times" if self.is_fpo else "first")]
        self.kernel: _FlowNoise | _FlowSDE | _FlowMatching
        if self.is_fpo:
            self.kernel = _FlowMatching(config.loss_samples, config.reduction)
        elif _learns_noise(config):
            self.kernel = _FlowNoise(steps, config.noise_range, noise_inputs, *shape)
        else:
            self.kernel = _FlowSDE(steps, config.noise_level)
        self.learns_entropy = self.kernel.learns_noise
        # imitation and other methods do not train a noise net, so pretrained weights may lack it
        self.may_be_new = ("kernel.net.",) if self.kernel.learns_noise else ()
        self.actions = Normalizer(self.action_dim) if normalize_actions else None

        # all steps are scored; in flow_sde_one_step one random step; in denoising_mdp the last ones, each as an action
        self.scored_steps = self.sampling_steps
        self.random_step = config.method == "flow_sde_one_step"
        if self.random_step:
            self.scored_steps = 1
        elif self.is_fpo:
            self.scored_steps = config.loss_samples
        elif config.method == "denoising_mdp":
            self.scored_steps = config.denoising_steps or self.sampling_steps
            # later steps count more: gamma_d^(S - 1 - k)
            powers = torch.arange(self.scored_steps - 1, -1, -1, dtype=torch.float64)
            self._step_weights = nn.Buffer(config.denoising_discount ** powers.float(), persistent=False)
        self.scores_all = self.scored_steps == self.sampling_steps and not self.is_fpo
        # noise of the start and of each scored step; then numbers that select the random step, or the times of FPO
        self.start_size = self.horizon * self.action_dim
        self.draws = (1 + self.scored_steps) * self.start_size
        self.noise_size = self.draws + (self.scored_steps if self.is_fpo else int(self.random_step))

    @property
    def step_weights(self) -> torch.Tensor | None:
        return self._step_weights if self.config.method == "denoising_mdp" else None

    @torch.no_grad()
    def act(self, td: TensorDict) -> TensorDict:
        """Add actions that are not clipped (the env clips them) and carry no autograd graph."""
        return self._act_with(self.encode, self.denoise, td)

    def _act_with(self, encode: Callable, denoise: Callable, td: TensorDict) -> TensorDict:
        features, prefix = encode(td)
        noise = td.get("noise", None)
        if noise is None:
            return td.set("action", self._action_of(self._follow_ode(denoise, prefix, self._start(td))))
        x, trace = self._sample(denoise, prefix, noise)
        td.set("action", self._action_of(x)).set("value", self.value_of(features, td))
        return td.set("trace", TensorDict(trace, td.batch_size))

    def _start(self, td: TensorDict) -> torch.Tensor:
        start = td.get("start", None)
        if start is None:
            start = torch.full((len(td), self.start_size), 0.5, device=self.times.device)
        return torch.special.ndtri(start).view(-1, self.horizon, self.action_dim)

    def _follow_ode(self, denoise: Callable, prefix: Prefix, x: torch.Tensor) -> torch.Tensor:
        for step in range(self.sampling_steps):
            x = self._ode_step(x, denoise(x, self._time_of(step, x), prefix))
        return x

    def _sample(self, denoise: Callable, prefix: Prefix, noise: torch.Tensor) -> tuple[torch.Tensor, dict]:
        batch, condition = len(prefix), self._noise_condition(prefix)
        # [B, 1 + S, H, A]
        draws = torch.special.ndtri(noise[:, : self.draws]).view(batch, -1, self.horizon, self.action_dim)
        if self.is_fpo:
            return self._sample_points(denoise, prefix, draws, times=noise[:, self.draws :])
        if self.random_step:  # `first` [B]: the first of the S scored steps
            first = (noise[:, self.draws] * self.sampling_steps).long().clamp_max(self.sampling_steps - 1)
        else:
            first = torch.full((batch,), self.sampling_steps - self.scored_steps, device=prefix.device)
        states, x = torch.empty_like(draws), draws[:, 0]
        mean, std = torch.empty_like(draws[:, 1:]), torch.empty_like(draws[:, 1:])
        for step in range(self.sampling_steps):
            velocity = denoise(x, self._time_of(step, x), prefix)
            next_x = self._ode_step(x, velocity)
            # the decisions with a scored step here, and its index among their S scored steps
            rows = (first == step).nonzero()[:, 0] if self.random_step else slice(None)
            index = 0 if self.random_step else step - (self.sampling_steps - self.scored_steps)
            state = x[rows]
            if index >= 0 and len(state):
                steps = torch.full((len(state), 1), step, device=x.device)
                centre, spread = self.kernel(state[:, None], velocity[rows][:, None], steps, condition[rows])
                centre, spread = centre[:, 0], spread[:, 0].expand_as(state)
                states[rows, index], mean[rows, index], std[rows, index] = state, centre, spread
                next_x[rows] = states[rows, index + 1] = centre + spread * draws[rows, index + 1]
            x = next_x
        trace = {"states": states, "first": first, "mean": self._executable(mean)}
        return x, trace | ({"std": self._executable(std)} if self.kernel.learns_noise else {})

    def _sample_points(self, denoise: Callable, prefix: Prefix, draws: torch.Tensor, times: torch.Tensor):
        """FPO: the action by the ODE, and the velocity at points between the action and S noises."""
        x = self._follow_ode(denoise, prefix, draws[:, 0])
        # S noises, and the action as the last state
        trace = {"states": torch.cat([draws[:, 1:], x[:, None]], 1), "times": times}
        points, _ = self._transitions(trace)
        # one call per point: CUDA graphs are recorded for B decisions, and overwrite their output in the next call
        velocity = [denoise(points[:, i], times[:, i], prefix).clone() for i in range(self.scored_steps)]
        return x, trace | {"mean": self._executable(torch.stack(velocity, 1))}

    def _transitions(self, trace) -> tuple[torch.Tensor, torch.Tensor]:
        """The inputs of the velocity, and the states that the kernel's normals score; both [B, S, H, A]."""
        states = trace["states"]
        if not self.is_fpo:
            return states[:, :-1], states[:, 1:]
        noise, action, t = states[:, :-1], states[:, -1:], trace["times"][..., None, None]
        return t * noise + (1 - t) * action, noise - action

    def _time_of(self, step: int, x: torch.Tensor) -> torch.Tensor:
        return self.times[step].expand(len(x))

    def _ode_step(self, x: torch.Tensor, velocity: torch.Tensor) -> torch.Tensor:
        return torch.sub(x, velocity, alpha=self.step_size)

    def _action_of(self, x: torch.Tensor) -> torch.Tensor:
        action = x[:, : self.chunk]  # [B, H, A] -> [B, C, A with padding]
        action = self.actions.inverse(action) if self.actions is not None else action
        return nn.functional.pad(action, (0, self.padding)) if self.padding else action

    def complete(self, td: TensorDict) -> TensorDict:
        trace = td["trace"]
        if isinstance(self.kernel, _FlowSDE):
            std: torch.Tensor = self.kernel.std[self._steps_from(trace["first"])][:, None, :, None]
        else:
            std = self.kernel.std if isinstance(self.kernel, _FlowMatching) else trace["std"]
        terms = _Terms.of(trace["mean"], std, self._executable(self._transitions(trace)[1]))
        scores = {"log_prob": terms.per_position(self.config.reduction), "z2": terms.z2, "dims": terms.dims}
        completed = {"log_prob": self._reduced(terms.log_prob, td), "trace": TensorDict(scores, td.batch_size)}
        return TensorDict(completed, td.batch_size)

    def evaluate(self, td: TensorDict) -> TensorDict:
        features, prefix = self.encode(td)
        mean, std, terms = self._score(prefix, td["trace"])
        scored = {"log_prob": self._reduced(terms.log_prob, td), "value": self.value_of(features, td)}
        scored["entropy"] = self._reduced(terms.entropy, td, over_steps=True).float()
        if td["trace"].get("mean", None) is not None:
            trace = {"mean": mean, "std": std, "z2": terms.z2, "dims": terms.dims}
            scored["trace"] = TensorDict(trace, td.batch_size)
        return TensorDict(scored, td.batch_size)

    def _score(self, prefix: Prefix, trace: TensorDict):
        """Mean and std [B, C, S, A] of the drawn states, and their log-probs; one network pass for all steps."""
        before, after = self._transitions(trace)
        # [B, S]; the kernel of FPO ignores `steps`
        steps = trace["times"] if self.is_fpo else self._steps_from(trace["first"])
        times = steps if self.is_fpo else self.times[steps]
        repeated = prefix if self.scored_steps == 1 else prefix.repeat_interleave(self.scored_steps, 0)
        # [B, S, H, A] -> [B*S, H, A] -> [B, S, H, A]
        velocity = self.denoise(before.flatten(0, 1), times.flatten(), repeated).view_as(before)
        mean, std = self.kernel(before, velocity, steps, self._noise_condition(prefix))
        mean, std = self._executable(mean), self._executable(std.expand_as(mean))
        return mean, std, _Terms.of(mean, std, self._executable(after))

    def _steps_from(self, first: torch.Tensor) -> torch.Tensor:
        return first[:, None] + torch.arange(self.scored_steps, device=first.device)  # [B] -> [B, S]

    def _executable(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, :, : self.chunk].transpose(1, 2)  # [B, S, H, A] -> [B, C, S, A]

    def _reduced(self, terms: torch.Tensor, td: TensorDict, over_steps: bool = False) -> torch.Tensor:
        """Reduce over executed positions, and over steps unless each is a separate action (denoising_mdp); float64."""
        mask = executed_mask(td, self.chunk)
        # [B, C, S] -> [B, S]
        total, count = (terms * mask[..., None]).sum(1), mask.sum(1, keepdim=True) * self.action_dim
        if over_steps or self.config.method != "denoising_mdp":
            total, count = total.sum(1), count[:, 0] * terms.shape[2]
        return total / count if self.config.reduction == "mean" else total

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, Prefix]:
        """Features for the critic, and the prefix for `denoise`; both depend only on the observations of `td [B]`."""
        raise NotImplementedError

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """Noisy chunks [B, H, A] at times [B] -> velocity [B, H, A] in float32."""
        raise NotImplementedError

    def value_of(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        """V, [B]; no gradient reaches the features."""
        return self.critic(features.detach(), td)

    def value(self, td: TensorDict) -> torch.Tensor:
        return self.value_of(self.encode(td)[0], td)

    def _normalizers(self) -> dict[str, nn.Module | None]:
        return super()._normalizers() | {"action": self.actions}

    def _noise_condition(self, prefix: Prefix) -> torch.Tensor:
        return prefix if isinstance(prefix, torch.Tensor) else prefix["features"]

    def imitation_loss(self, td: TensorDict, generator: torch.Generator) -> Loss:
        _, prefix = self.encode(td)
        points = self._points(td, generator)
        loss = points.mean((self.denoise(points.x, points.t, prefix) - points.velocity).square())
        return loss, {"flow_matching": loss.detach()}

    def _points(self, td: TensorDict, generator: torch.Generator) -> "_PathPoints":
        """Points between noise and demonstrated actions, x_t = t eps + (1 - t) a, at t ~ Beta(1.5, 1)."""
        action = td["action"][..., : self.action_dim]
        action = self.actions(action) if self.actions is not None else action
        noise = torch.randn(action.shape, generator=generator, device=generator.device).to(action.device)
        # the inverse of Beta(1.5, 1)'s distribution function, t^1.5
        t = torch.rand(len(action), generator=generator, device=generator.device).to(action.device) ** (1 / 1.5)
        weight = t[:, None, None]
        x = weight * noise + (1 - weight) * action
        return _PathPoints(x, t, noise - action, td["valid"][..., None].float())


class _FlowSDE(nn.Module):
    """Flow-SDE: the same marginals as the ODE, with noise of level eta. It has no weights."""

    learns_noise = False

    def __init__(self, steps: int, level: float):
        super().__init__()
        k, h = torch.arange(steps, dtype=torch.float64), 1.0 / steps
        t = 1.0 - k / steps
        # sigma_t = eta sqrt(t / (1 - t)); at t = 1 the divisor is the 1 - t of the next grid point, h
        sigma2 = level**2 * t / torch.where(k == 0, torch.full_like(t, h), 1.0 - t)
        after = t - h
        # mu = a_hat (1 - (t - h)) + eps_hat (t - h - sigma^2 h / 2t) with a_hat = x - t v and eps_hat = x + (1 - t) v
        noise_share = after - sigma2 * h / (2.0 * t)
        self.x_factor = nn.Buffer(((1.0 - after) + noise_share).float(), persistent=False)
        self.v_factor = nn.Buffer((-t * (1.0 - after) + (1.0 - t) * noise_share).float(), persistent=False)
        self.std = nn.Buffer((sigma2 * h).sqrt().float(), persistent=False)

    def forward(self, x: torch.Tensor, velocity: torch.Tensor, step: torch.Tensor, condition: torch.Tensor) -> Normal:
        # x and velocity [B, S, H, A]; factors [B, S, 1, 1]
        x_factor, v_factor, std = (values[step][..., None, None] for values in (self.x_factor, self.v_factor, self.std))
        return x_factor * x + v_factor * velocity, std


class _FlowNoise(nn.Module):
    """Flow-Noise: the ODE's step plus learned noise with bounded std. Its entropy can be trained."""

    learns_noise = True

    def __init__(self, steps: int, bounds: tuple[float, float], width: int, horizon: int, action_dim: int):
        super().__init__()
        self.steps, self.size, self.shape = steps, 1.0 / steps, (horizon, action_dim)
        low, high = torch.tensor(bounds, dtype=torch.float64).log().tolist()
        self.middle, self.half_range = (low + high) / 2, (high - low) / 2
        hidden, output = nn.Linear(width + steps, 64), nn.Linear(64, horizon * action_dim)
        self.net = nn.Sequential(hidden, nn.SiLU(), output)
        nn.init.zeros_(output.weight)
        nn.init.zeros_(output.bias)

    def forward(self, x: torch.Tensor, velocity: torch.Tensor, step: torch.Tensor, condition: torch.Tensor) -> Normal:
        one_hot = nn.functional.one_hot(step, self.steps).to(condition.dtype)  # [B, S, K]; the condition is [B, W]
        inputs = torch.cat([condition[:, None].expand(-1, step.shape[1], -1), one_hot], -1)
        log_std = self.middle + self.half_range * torch.tanh(self.net(inputs).float())
        return torch.sub(x, velocity, alpha=self.size), log_std.exp().unflatten(-1, self.shape)


class _FlowMatching(nn.Module):
    """FPO: the log ratio is the decrease of the flow-matching loss, `mean_i |v_old - u_i|^2 - |v - u_i|^2`.
    This equals a difference of log-probs of u_i = eps_i - a under normals with mean v and variance S/2 (1/2 if dims and
    points are averaged anyway), so FPO can be written as a kernel like the others."""

    learns_noise = False

    def __init__(self, samples: int, reduction: str):
        super().__init__()
        self.std = nn.Buffer(torch.tensor(0.5 if reduction == "mean" else 0.5 * samples).sqrt(), persistent=False)

    def forward(self, x: torch.Tensor, velocity: torch.Tensor, step: torch.Tensor, condition: torch.Tensor) -> Normal:
        return velocity, self.std


@dataclass
class _Terms:
    """Log-probs of a decision's states per position and scored step, summed over dims; [B, C, S]."""

    # float64: in float32, rounding errors of sums of thousands of terms would exceed the tolerance of a ratio
    log_prob: torch.Tensor
    entropy: torch.Tensor
    squares: torch.Tensor
    action_dim: int

    @classmethod
    def of(cls, mean: torch.Tensor, std: torch.Tensor, state: torch.Tensor) -> "_Terms":
        """All arguments are [B, C, S, A]; `std` may be broadcast."""
        squares = ((state - mean) / std).square().sum(-1, dtype=torch.float64)
        volume = (std.log() + LOG_SQRT_2PI).expand_as(mean).sum(-1, dtype=torch.float64)
        return cls(-0.5 * squares - volume, volume + 0.5 * mean.shape[-1], squares, mean.shape[-1])

    def per_position(self, reduction: str) -> torch.Tensor:
        return self.log_prob.mean(-1) / self.action_dim if reduction == "mean" else self.log_prob.sum(-1)  # [B, C]

    @property
    def z2(self) -> torch.Tensor:
        return self.squares.sum(-1).float()

    @property
    def dims(self) -> torch.Tensor:
        return torch.full_like(self.log_prob[..., 0], self.action_dim * self.log_prob.shape[2], dtype=torch.float32)


@dataclass
class _PathPoints:
    x: torch.Tensor
    t: torch.Tensor
    velocity: torch.Tensor
    valid: torch.Tensor

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        return (values * self.valid).sum() / (self.valid.sum() * values.shape[-1]).clamp_min(1)


def _learns_noise(config: DenoisingConfig) -> bool:
    return config.method == "flow_noise" or (config.method == "denoising_mdp" and config.kernel == "noise")


def _check_settings(config: DenoisingConfig, spec: EnvSpec, chunk: int) -> None:
    if spec.discrete_actions:
        name = config.name  # type: ignore[attr-defined]  # every policy's config has a name
        raise UserError(f"policy.name={name} needs continuous actions, but the env's are discrete; use actor_critic")
    if config.horizon is not None and config.horizon < chunk:
        raise UserError(f"policy.horizon={config.horizon} is shorter than rollout.action_steps={chunk}; increase it")
    defaults = {name: field.default for name, field in DenoisingConfig.model_fields.items()}
    for method, names in OF_ONE_METHOD.items():
        unread = [] if method == config.method else [name for name in names if getattr(config, name) != defaults[name]]
        if unread:
            given = ", ".join(f"policy.{name}={getattr(config, name)}" for name in unread)
            advice = f"not by {config.method}; remove, or set that method"
            raise UserError(f"{given}: read by policy.method={method} only, {advice}")
    low, high = config.noise_range
    if not 0 < low < high:
        raise UserError(f"policy.noise_range={[low, high]}: expected 0 < lowest < highest")
    is_learned = _learns_noise(config)
    for name, is_read in (("noise_level", not is_learned), ("noise_range", is_learned)):
        value, default = (list(v) if isinstance(v, tuple) else v for v in (getattr(config, name), defaults[name]))
        if value == default or is_read and config.method != "fpo":
            continue
        method = f"policy.method={config.method}"
        method += f" with policy.kernel={config.kernel}" if config.method == "denoising_mdp" else ""
        reads = f"reads policy.{'noise_range' if is_learned else 'noise_level'} instead"
        reads = "adds no noise to denoising steps" if config.method == "fpo" else reads
        raise UserError(f"policy.{name}={value}: {method} {reads}; leave it at {default}, or set another method")
    if config.denoising_steps is not None and config.denoising_steps > config.sampling_steps:
        limit = f"policy.sampling_steps={config.sampling_steps}"
        raise UserError(f"policy.denoising_steps={config.denoising_steps} is more than {limit}; set at most that many")
