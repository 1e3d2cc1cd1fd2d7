"""The denoising chain of flow-matching policies: sampled, scored, and scored again."""

from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import nn

from sparring.errors import UserError
from sparring.normalize import Normalizer
from sparring.policies.configs import OF_DENOISING_MDP, DenoisingConfig
from sparring.policies.heads import LOG_SQRT_2PI
from sparring.policies.policy import Policy, executed_mask

# ---- Which settings of a flow policy go together. Torch-free.


def check(config: DenoisingConfig, spec, chunk: int) -> None:
    """Refuses what cannot be, and settings that the method does not read."""
    if spec.discrete_actions:
        raise UserError(
            f"policy.name={config.name} draws continuous actions, but the env takes one of several; use actor_critic"
        )
    if config.horizon is not None and config.horizon < chunk:
        raise UserError(
            f"policy.horizon={config.horizon} is shorter than the {chunk} steps that rollout.action_steps executes"
        )
    if config.method != "denoising_mdp":
        fields = DenoisingConfig.model_fields
        unread = [name for name in OF_DENOISING_MDP if getattr(config, name) != fields[name].default]
        if unread:
            given = ", ".join(f"policy.{name}={getattr(config, name)}" for name in unread)
            raise UserError(
                f"{given}: only policy.method=denoising_mdp reads it, not {config.method}; leave it out, or set that "
                "method"
            )
    _check_noise(config)
    if config.denoising_steps is not None and config.denoising_steps > config.sampling_steps:
        raise UserError(
            f"policy.denoising_steps={config.denoising_steps} is more than the policy.sampling_steps="
            f"{config.sampling_steps} that there are"
        )


def _check_noise(config: DenoisingConfig) -> None:
    low, high = config.noise_range
    if not 0 < low < high:
        raise UserError(f"policy.noise_range={[low, high]}: expected 0 < least < most")
    read, unread = ("noise_range", "noise_level") if learns_noise(config) else ("noise_level", "noise_range")
    value, default = getattr(config, unread), DenoisingConfig.model_fields[unread].default
    if value != default:
        value, default = (list(each) if isinstance(each, tuple) else each for each in (value, default))
        method = f"policy.method={config.method}"
        method += f" with policy.kernel={config.kernel}" if config.method == "denoising_mdp" else ""
        raise UserError(
            f"policy.{unread}={value}: {method} reads policy.{read} instead; leave it at {default}, or set another "
            "method"
        )


def learns_noise(config: DenoisingConfig) -> bool:
    return config.method == "flow_noise" or (config.method == "denoising_mdp" and config.kernel == "noise")


# ---- One denoising step as a normal distribution (formulas.md, section 1).
#
# Time runs from 1 (noise) to 0 (action) in K steps of h = 1/K: t_k = 1 - k/K. The velocity is v = eps - a.
#
# Letters: B decisions, S denoising steps of each, H steps of a chunk, A action dims.


# mean and std of x^(k+1), both broadcastable to [B, S, H, A]
Normal = tuple[torch.Tensor, torch.Tensor]


class Grid(nn.Module):
    """The times of the denoising steps; acting and scoring read the same ones."""

    def __init__(self, steps: int):
        super().__init__()
        self.steps, self.size = steps, 1.0 / steps
        times = 1.0 - torch.arange(steps, dtype=torch.float64) / steps
        self.register_buffer("times", times.float(), persistent=False)


def ode_step(x: torch.Tensor, velocity: torch.Tensor, size: float) -> torch.Tensor:
    return torch.sub(x, velocity, alpha=size)


class FlowSDE(nn.Module):
    """Flow-SDE: the ODE's marginals, with noise of level eta. No weights: the policy is the velocity alone."""

    learns_noise = False

    def __init__(self, grid: Grid, level: float):
        super().__init__()
        k, count, h = torch.arange(grid.steps, dtype=torch.float64), grid.steps, grid.size
        t = 1.0 - k / count
        # sigma_t = eta sqrt(t / (1 - t)); at t = 1 the next grid point's 1 - t
        sigma2 = level**2 * t / torch.where(k == 0, torch.full_like(t, h), 1.0 - t)
        after = t - h
        # mu = a_hat (1 - (t - h)) + eps_hat (t - h - sigma^2 h / 2t) with a_hat = x - t v and eps_hat = x + (1 - t) v
        noise_share = after - sigma2 * h / (2.0 * t)
        of_x = (1.0 - after) + noise_share
        of_v = -t * (1.0 - after) + (1.0 - t) * noise_share
        for name, values in (("of_x", of_x), ("of_v", of_v), ("std", (sigma2 * h).sqrt())):
            self.register_buffer(name, values.float(), persistent=False)

    def forward(self, x: torch.Tensor, velocity: torch.Tensor, step: torch.Tensor, about: torch.Tensor) -> Normal:
        # [B, S, H, A], the same, [B, S] -> [B, S, 1, 1]
        of_x, of_v, std = (values[step][..., None, None] for values in (self.of_x, self.of_v, self.std))
        return of_x * x + of_v * velocity, std


class FlowNoise(nn.Module):
    """Flow-Noise: the ODE's step plus learned noise, kept between two bounds. It has an entropy."""

    learns_noise = True

    def __init__(self, grid: Grid, bounds: tuple[float, float], width: int, horizon: int, action_dim: int):
        super().__init__()
        self.size, self.shape = grid.size, (horizon, action_dim)
        low, high = torch.tensor(bounds, dtype=torch.float64).log().tolist()
        self.middle, self.reach = (low + high) / 2, (high - low) / 2
        # of the condition and the step: [W] and K more
        self.steps = grid.steps
        self.net = nn.Sequential(nn.Linear(width + grid.steps, 64), nn.SiLU(), nn.Linear(64, horizon * action_dim))
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: torch.Tensor, velocity: torch.Tensor, step: torch.Tensor, about: torch.Tensor) -> Normal:
        # [B, W] -> [B, S, W + K] -> [B, S, H, A]
        which = nn.functional.one_hot(step, self.steps).to(about.dtype)
        inputs = torch.cat([about[:, None].expand(-1, step.shape[1], -1), which], -1)
        log_std = self.middle + self.reach * torch.tanh(self.net(inputs).float())
        return ode_step(x, velocity, self.size), log_std.exp().unflatten(-1, self.shape)


# ---- Which denoising steps of a decision are random, and scored; all others follow the ODE.
#
# `states` of a decision are what these steps went through: x before the first of them, and after each.
#
# Letters: B decisions, S scored steps of each, K denoising steps.


Rows = slice | torch.Tensor


class WholeChain:
    """Every step: the likelihood of all that was drawn."""

    # uniform numbers that choose the steps
    choices = 0

    def __init__(self, steps: int):
        self.scored = steps
        self.first_step = 0

    def first(self, batch: int, uniform: torch.Tensor, device: torch.device) -> torch.Tensor:
        """`[B]`: the first of the S scored steps."""
        return torch.full((batch,), self.first_step, device=device)

    def at(self, step: int, first: torch.Tensor) -> tuple[Rows, int] | None:
        """Which decisions are scored at this step, and as which of their S; None: none is."""
        return (slice(None), step - self.first_step) if step >= self.first_step else None


class LastSteps(WholeChain):
    """The last S steps, each an action of its own in a denoising MDP: later ones count more."""

    def __init__(self, steps: int, scored: int, discount: float):
        self.scored = scored
        self.first_step = steps - scored
        # gamma_d^(S - 1 - k)
        self.weights = discount ** torch.arange(scored - 1, -1, -1, dtype=torch.float64).float()


class OneStep(WholeChain):
    """One step, drawn for each decision: scoring it takes one pass of the network instead of K.

    The ratio of two such scores is not that of two policies: what is learned from must be fresh.
    """

    choices = 1

    def __init__(self, steps: int):
        self.steps, self.scored = steps, 1

    def first(self, batch: int, uniform: torch.Tensor, device: torch.device) -> torch.Tensor:
        return (uniform[:, 0] * self.steps).long().clamp_max(self.steps - 1)

    def at(self, step: int, first: torch.Tensor) -> tuple[Rows, int] | None:
        rows = (first == step).nonzero()[:, 0]
        return (rows, 0) if len(rows) else None


# ---- The log-probability of a denoising chain, term by term.
#
# Letters: B decisions, C executed steps of a chunk, S scored denoising steps, A action dims.


@dataclass
class Terms:
    """How likely the states of a decision are: one number per position and scored step, summed over dims; [B, C, S]."""

    # float64: a sum of thousands of terms in float32 is off by more than what a ratio may be off
    log_prob: torch.Tensor
    entropy: torch.Tensor
    squares: torch.Tensor
    action_dim: int

    @classmethod
    def of(cls, mean: torch.Tensor, std: torch.Tensor, state: torch.Tensor) -> "Terms":
        """All [B, C, S, A]; a std may be smaller."""
        squares = ((state - mean) / std).square().sum(-1, dtype=torch.float64)
        volume = (std.log() + LOG_SQRT_2PI).expand_as(mean).sum(-1, dtype=torch.float64)
        return cls(-0.5 * squares - volume, volume + 0.5 * mean.shape[-1], squares, mean.shape[-1])

    def positions(self, reduction: str) -> torch.Tensor:
        # [B, C]
        return self.log_prob.mean(-1) / self.action_dim if reduction == "mean" else self.log_prob.sum(-1)

    @property
    def z2(self) -> torch.Tensor:
        return self.squares.sum(-1).float()

    @property
    def dims(self) -> torch.Tensor:
        """How many numbers of each position were scored, [B, C]."""
        return torch.full(
            self.log_prob.shape[:2], float(self.action_dim * self.log_prob.shape[2]), device=self.log_prob.device
        )


# ---- Action chunks by denoising, with the log-probability of what was drawn (formulas.md, section 1).
#
# Acting stores what it drew; scoring goes through the same states with the same times. Densities are those of
# normalised
# actions: the shift and scale to the env's own are constants, which cancel in every ratio.
#
# Letters: B decisions, K denoising steps, S of them scored, H steps of a chunk, C of them executed, A action dims.


# what is known before the first denoising step, a row per decision
Prefix = torch.Tensor | TensorDict


class FlowChain(Policy):
    """What all policies that denoise share. One of them says how it sees (`encode`), moves (`denoise`), judges.

    Observations are encoded once per decision; only `denoise` runs in every denoising step.
    """

    # few denoising steps: the ODE and the SDE are different policies
    reports_sampled = True

    def __init__(self, config: DenoisingConfig, spec, chunk: int, noise_inputs: int, normalize_actions: bool):
        """`noise_inputs`: numbers of a decision that noise which is learned depends on (`noise_condition`)."""
        super().__init__()
        self.config, self.chunk, self.horizon = config, chunk, config.horizon or chunk
        check(config, spec, chunk)
        self.averages_log_prob = config.reduction == "mean"
        self.padding = spec.action_padding
        self.action_dim = spec.action_dim - spec.action_padding
        self.grid = Grid(config.sampling_steps)
        self.kernel = _kernel(config, self.grid, noise_inputs, self.horizon, self.action_dim)
        self.learns_entropy = self.kernel.learns_noise
        # imitation knows no noise net, nor do other methods
        self.may_be_new = ("kernel.net.",) if self.kernel.learns_noise else ()
        self.scored = _scored_steps(config)
        self.scores_all = self.scored.scored == config.sampling_steps
        if config.method == "denoising_mdp":
            self.register_buffer("_step_weights", self.scored.weights, persistent=False)
        self.actions = Normalizer(self.action_dim) if normalize_actions else None
        # a start, one draw for each scored step, and what chooses the steps
        self.draws = (1 + self.scored.scored) * self.horizon * self.action_dim
        self.noise_size = self.draws + self.scored.choices
        self.start_size = self.horizon * self.action_dim

    # ---- what a policy of this kind says of itself

    # beside what `encode` and `judge` read
    trace_keys = [("trace", "states"), ("trace", "first")]

    def encode(self, td: TensorDict) -> tuple[torch.Tensor, Prefix]:
        """Features for `judge`, and what `denoise` is told: both of the observations of `td [B]` alone."""
        raise NotImplementedError

    def denoise(self, x: torch.Tensor, t: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        """[B, H, A], [B] -> the velocity [B, H, A] in float32, from noise at t = 1 to actions at 0."""
        raise NotImplementedError

    def judge(self, features: torch.Tensor, td: TensorDict) -> torch.Tensor:
        """V, [B]."""
        raise NotImplementedError

    def noise_condition(self, prefix: Prefix) -> torch.Tensor:
        """What learned noise depends on, [B, `noise_inputs`]."""
        return prefix

    # ---- Policy

    @property
    def step_weights(self) -> torch.Tensor | None:
        return self._step_weights if self.config.method == "denoising_mdp" else None

    def act(self, td: TensorDict) -> TensorDict:
        features, prefix = self.encode(td)
        noise = td.get("noise", None)
        if noise is None:
            return td.set("action", self._emitted(self._ode(prefix, td.get("start", None))))
        action, trace = self._sample(prefix, noise)
        td.set("action", self._emitted(action)).set("value", self.judge(features, td))
        return td.set("trace", TensorDict(trace, td.batch_size))

    def complete(self, td: TensorDict) -> TensorDict:
        trace = td["trace"]
        # [B, S, H, A] -> [B, C, S, A]
        after = self._executable(trace["states"][:, 1:])
        std = (
            trace["std"] if self.kernel.learns_noise else self.kernel.std[self._steps(trace["first"])][:, None, :, None]
        )
        terms = Terms.of(trace["mean"], std, after)
        scores = {"log_prob": terms.positions(self.config.reduction), "z2": terms.z2, "dims": terms.dims}
        return TensorDict(
            {"log_prob": self._reduced(terms.log_prob, td), "trace": TensorDict(scores, td.batch_size)}, td.batch_size
        )

    def evaluate(self, td: TensorDict) -> TensorDict:
        features, prefix = self.encode(td)
        states, first = td["trace", "states"], td["trace", "first"]
        mean, std = self._replay(prefix, states[:, :-1], self._steps(first))
        mean, std = self._executable(mean), self._executable(std.expand_as(mean))
        terms = Terms.of(mean, std, self._executable(states[:, 1:]))
        scored = {
            "log_prob": self._reduced(terms.log_prob, td),
            "entropy": self._reduced(terms.entropy, td, over_steps=True).float(),
            "value": self.judge(features, td),
        }
        if td["trace"].get("mean", None) is not None:
            trace = {"mean": mean, "std": std, "z2": terms.z2, "dims": terms.dims}
            scored["trace"] = TensorDict(trace, td.batch_size)
        return TensorDict(scored, td.batch_size)

    def imitation_loss(
        self, td: TensorDict, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        _, prefix = self.encode(td)
        loss = self.shown(td, generator).loss(lambda x, t: self.denoise(x, t, prefix))
        return loss, {"flow_matching": loss.detach()}

    def shown(self, td: TensorDict, generator: torch.Generator) -> "Shown":
        """Points on the way from noise to what a demonstrator did, at t ~ Beta(1.5, 1)."""
        action = td["action"][..., : self.action_dim]
        action = self.actions(action) if self.actions is not None else action
        noise = torch.randn(action.shape, generator=generator, device=generator.device).to(action.device)
        # the inverse of Beta(1.5, 1)'s distribution function, t^1.5
        t = uniform(len(action), generator, action.device) ** (1 / 1.5)
        return Shown(action, noise, t, td["valid"][..., None].float())

    # ---- drawing

    def _ode(self, prefix: Prefix, start: torch.Tensor | None) -> torch.Tensor:
        """From the noise of `start`, as it was trained; without one from the middle of the noise."""
        if start is None:
            start = torch.full((len(prefix), self.start_size), 0.5, device=prefix.device)
        x = torch.special.ndtri(start).view(-1, self.horizon, self.action_dim)
        for step in range(self.grid.steps):
            x = ode_step(x, self._velocity_at(step, x, prefix), self.grid.size)
        return x

    def _sample(self, prefix: Prefix, noise: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A chunk [B, H, A], and what scoring it again takes."""
        batch, condition = len(prefix), self.noise_condition(prefix)
        # [B, 1 + S, H, A]
        draws = torch.special.ndtri(noise[:, : self.draws]).view(batch, -1, self.horizon, self.action_dim)
        first = self.scored.first(batch, noise[:, self.draws :], prefix.device)
        states, x = torch.empty_like(draws), draws[:, 0]
        mean, std = torch.empty_like(draws[:, 1:]), torch.empty_like(draws[:, 1:])
        for step in range(self.grid.steps):
            velocity = self._velocity_at(step, x, prefix)
            following = ode_step(x, velocity, self.grid.size)
            scored = self.scored.at(step, first)
            if scored is not None:
                rows, place = scored
                here = torch.full((len(x[rows]), 1), step, device=x.device)
                centre, spread = self.kernel(x[rows][:, None], velocity[rows][:, None], here, condition[rows])
                states[rows, place], mean[rows, place], std[rows, place] = (
                    x[rows],
                    centre[:, 0],
                    spread[:, 0].expand_as(x[rows]),
                )
                following[rows] = states[rows, place + 1] = centre[:, 0] + spread[:, 0] * draws[rows, place + 1]
            x = following
        trace = {"states": states, "first": first, "mean": self._executable(mean)}
        return x, trace | ({"std": self._executable(std)} if self.kernel.learns_noise else {})

    def _velocity_at(self, step: int, x: torch.Tensor, prefix: Prefix) -> torch.Tensor:
        return self.denoise(x, self.grid.times[step].expand(len(x)), prefix)

    # ---- scoring

    def _replay(self, prefix: Prefix, before: torch.Tensor, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The normals [B, S, H, A] that the states after `before` were drawn from; all steps in one pass."""
        scored = steps.shape[1]
        each = prefix if scored == 1 else prefix.repeat_interleave(scored, 0)
        # [B, S, H, A] -> [B*S, H, A] -> [B, S, H, A]
        velocity = self.denoise(before.flatten(0, 1), self.grid.times[steps].flatten(), each)
        return self.kernel(before, velocity.view_as(before), steps, self.noise_condition(prefix))

    def _steps(self, first: torch.Tensor) -> torch.Tensor:
        # [B] -> [B, S]
        return first[:, None] + torch.arange(self.scored.scored, device=first.device)

    def _executable(self, x: torch.Tensor) -> torch.Tensor:
        # [B, S, H, A] -> [B, C, S, A]
        return x[:, :, : self.chunk].transpose(1, 2)

    def _reduced(self, terms: torch.Tensor, td: TensorDict, over_steps: bool = False) -> torch.Tensor:
        """Over the positions that were executed, and the steps, unless each is an action of its own; float64."""
        mask = executed_mask(td, self.chunk)
        # [B, C, S] -> [B, S]
        total, count = (terms * mask[..., None]).sum(1), mask.sum(1, keepdim=True) * self.action_dim
        if over_steps or self.config.method != "denoising_mdp":
            total, count = total.sum(1), count[:, 0] * terms.shape[2]
        return total / count if self.config.reduction == "mean" else total

    def _emitted(self, x: torch.Tensor) -> torch.Tensor:
        # [B, H, A] -> [B, C, A with padding]
        action = x[:, : self.chunk]
        action = self.actions.inverse(action) if self.actions is not None else action
        return nn.functional.pad(action, (0, self.padding)) if self.padding else action


class Shown:
    """Demonstrated actions, noise, and points x between them: x_t = t eps + (1 - t) a."""

    def __init__(self, action: torch.Tensor, noise: torch.Tensor, t: torch.Tensor, valid: torch.Tensor):
        self.t, self.valid, self.velocity = t, valid, noise - action
        t = t[:, None, None]
        self.x = t * noise + (1 - t) * action

    def loss(self, denoise) -> torch.Tensor:
        """Flow matching: how far `denoise(x, t)` is from the velocity."""
        return self.mean((denoise(self.x, self.t) - self.velocity).square())

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Over the steps that there are."""
        return (values * self.valid).sum() / (self.valid.sum() * values.shape[-1]).clamp_min(1)


def _kernel(config: DenoisingConfig, grid: Grid, inputs: int, horizon: int, action_dim: int) -> FlowSDE | FlowNoise:
    if learns_noise(config):
        return FlowNoise(grid, config.noise_range, inputs, horizon, action_dim)
    return FlowSDE(grid, config.noise_level)


def _scored_steps(config: DenoisingConfig) -> WholeChain:
    if config.method == "flow_sde_one_step":
        return OneStep(config.sampling_steps)
    if config.method == "denoising_mdp":
        scored = config.denoising_steps or config.sampling_steps
        return LastSteps(config.sampling_steps, scored, config.denoising_discount)
    return WholeChain(config.sampling_steps)


def uniform(count: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.rand(count, generator=generator, device=generator.device).to(device)
