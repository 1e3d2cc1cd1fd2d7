"""The flow policy: action chunks by denoising, with the log-probability of what was drawn (formulas.md, section 1).

Acting stores what it drew; scoring goes through the same states with the same times. Densities are those of normalised
actions: the shift and scale to the env's own are constants, which cancel in every ratio.

Letters: B decisions, K denoising steps, S of them scored, H steps of a chunk, C of them executed, A action dims.
"""

import copy

import torch
from tensordict import TensorDict
from torch import nn

from sparring.normalize import Normalizer
from sparring.policies.configs import FlowConfig
from sparring.policies.critic import Critic
from sparring.policies.dit import ActionTransformer
from sparring.policies.encoded import EncodedPolicy
from sparring.policies.encoders import ObservationEncoder
from sparring.policies.flow_kernels import FlowNoise, FlowSDE, Grid, ode_step
from sparring.policies.flow_scored import LastSteps, OneStep, WholeChain
from sparring.policies.flow_settings import check, learns_noise
from sparring.policies.flow_terms import Terms
from sparring.policies.policy import executed_mask

# along a path, in one step of the consistency term
_LONGEST_STRIDE = 0.2


class FlowPolicy(EncodedPolicy):
    """Observations are encoded once per decision; only the action transformer runs in every denoising step.

    The critic reads the encoder's features and does not shape them.
    """

    # few denoising steps: the ODE and the SDE are different policies
    reports_sampled = True

    def __init__(self, config: FlowConfig, spec, chunk: int):
        super().__init__()
        self.config, self.chunk, self.horizon = config, chunk, config.horizon or chunk
        check(config, spec, chunk)
        self.averages_log_prob = config.reduction == "mean"
        self.padding = spec.action_padding
        self.action_dim = spec.action_dim - spec.action_padding
        self.grid = Grid(config.sampling_steps)
        self.encoder = ObservationEncoder(config, spec)
        self.condition = nn.Linear(self.encoder.size, config.width)
        self.velocity = ActionTransformer(
            self.horizon, self.action_dim, config.width, config.layers, config.heads, config.dropout
        )
        self.kernel = _kernel(config, self.grid, self.horizon, self.action_dim)
        self.learns_entropy = self.kernel.learns_noise
        # imitation knows no noise net, nor do other methods
        self.may_be_new = ("kernel.net.",) if self.kernel.learns_noise else ()
        self.scored = _scored_steps(config)
        if config.method == "denoising_mdp":
            self.register_buffer("_step_weights", self.scored.weights, persistent=False)
        self.actions = Normalizer(self.action_dim) if config.normalize_actions else None
        self.target = self.aim = None
        if config.consistency:
            # follows the velocity slowly
            self.target = copy.deepcopy(self.velocity).requires_grad_(False)
            # told to the network where its velocity is to point at the end of the path, not along it
            self.aim = nn.Parameter(torch.randn(config.width) * 0.02)
        self.critic = Critic(config, spec, self.encoder.size, config.normalize_observations)
        self.in_keys = [*self.encoder.in_keys, *self.critic.in_keys, ("trace", "states"), ("trace", "first")]
        # a start, one draw for each scored step, and what chooses the steps
        self.draws = (1 + self.scored.scored) * self.horizon * self.action_dim
        self.noise_size = self.draws + self.scored.choices
        self.start_size = self.horizon * self.action_dim

    @property
    def step_weights(self) -> torch.Tensor | None:
        return self._step_weights if self.config.method == "denoising_mdp" else None

    def act(self, td: TensorDict) -> TensorDict:
        features, about = self._decide(td)
        noise = td.get("noise", None)
        if noise is None:
            return td.set("action", self._emitted(self._ode(about, td.get("start", None))))
        action, trace = self._sample(about, noise)
        td.set("action", self._emitted(action)).set("value", self.critic(features.detach(), td))
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
        features, about = self._decide(td)
        states, first = td["trace", "states"], td["trace", "first"]
        mean, std = self._replay(about, states[:, :-1], self._steps(first))
        mean, std = self._executable(mean), self._executable(std.expand_as(mean))
        terms = Terms.of(mean, std, self._executable(states[:, 1:]))
        scored = {
            "log_prob": self._reduced(terms.log_prob, td),
            "entropy": self._reduced(terms.entropy, td, over_steps=True).float(),
            "value": self.critic(features.detach(), td),
        }
        if td["trace"].get("mean", None) is not None:
            trace = {"mean": mean, "std": std, "z2": terms.z2, "dims": terms.dims}
            scored["trace"] = TensorDict(trace, td.batch_size)
        return TensorDict(scored, td.batch_size)

    def value(self, td: TensorDict) -> torch.Tensor:
        with self._precision():
            features = self.encoder(td)
        return self.critic(features.float().detach(), td)

    def imitation_loss(
        self, td: TensorDict, generator: torch.Generator
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Flow matching: the velocity from noise to what the demonstrator did, at t ~ Beta(1.5, 1)."""
        _, about = self._encode(td)
        action = td["action"][..., : self.action_dim]
        action = self.actions(action) if self.actions is not None else action
        noise = torch.randn(action.shape, generator=generator, device=generator.device).to(action.device)
        # the inverse of Beta(1.5, 1)'s distribution function, t^1.5
        t = _uniform(len(action), generator, action.device) ** (1 / 1.5)
        valid = td["valid"][..., None].float()
        x = _between(action, noise, t)
        velocity = self._velocity(self.velocity, x, t, about)
        loss = _masked_mean((velocity - (noise - action)).square(), valid)
        told = {"flow_matching": loss.detach()}
        if self.target is not None:
            velocity = self._velocity(self.velocity, x, t, about + self.aim)
            end = self._later_end(x, t, about, generator)
            aimed = (x - end) / t[:, None, None].clamp_min(1e-3)
            told["consistency"] = _masked_mean((velocity - aimed).square(), valid)
            loss = loss + self.config.consistency * told["consistency"]
        return loss, {name: value.detach() for name, value in told.items()}

    def fit_normalizers(self, statistics, state: str, action: str) -> None:
        self._fit(statistics, self.actions, state, action)

    # ---- the network

    def _encode(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [B, F], and what the action transformer is told of them [B, W]."""
        with self._precision():
            features = self.encoder(td)
            about = self.condition(features).float()
        return features.float(), about

    def _decide(self, td: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        features, about = self._encode(td)
        return features, about if self.aim is None else about + self.aim

    def _velocity(self, net: nn.Module, x: torch.Tensor, t: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        with self._precision():
            velocity = net(x, t, about)
        return velocity.float()

    # ---- drawing

    def _ode(self, about: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
        """From the noise of `start`, as it was trained; without one from the middle of the noise."""
        if start is None:
            start = about.new_full((len(about), self.start_size), 0.5)
        x = torch.special.ndtri(start).view(-1, self.horizon, self.action_dim)
        for step in range(self.grid.steps):
            x = ode_step(x, self._velocity_at(step, x, about), self.grid.size)
        return x

    def _sample(self, about: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A chunk [B, H, A], and what scoring it again takes."""
        batch = len(about)
        # [B, 1 + S, H, A]
        draws = torch.special.ndtri(noise[:, : self.draws]).view(batch, -1, self.horizon, self.action_dim)
        first = self.scored.first(batch, noise[:, self.draws :], about.device)
        states, x = torch.empty_like(draws), draws[:, 0]
        mean, std = torch.empty_like(draws[:, 1:]), torch.empty_like(draws[:, 1:])
        for step in range(self.grid.steps):
            velocity = self._velocity_at(step, x, about)
            following = ode_step(x, velocity, self.grid.size)
            scored = self.scored.at(step, first)
            if scored is not None:
                rows, place = scored
                here = torch.full((len(x[rows]), 1), step, device=x.device)
                centre, spread = self.kernel(x[rows][:, None], velocity[rows][:, None], here, about[rows])
                states[rows, place], mean[rows, place], std[rows, place] = (
                    x[rows],
                    centre[:, 0],
                    spread[:, 0].expand_as(x[rows]),
                )
                following[rows] = states[rows, place + 1] = centre[:, 0] + spread[:, 0] * draws[rows, place + 1]
            x = following
        trace = {"states": states, "first": first, "mean": self._executable(mean)}
        return x, trace | ({"std": self._executable(std)} if self.kernel.learns_noise else {})

    def _velocity_at(self, step: int, x: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
        return self._velocity(self.velocity, x, self.grid.times[step].expand(len(x)), about)

    # ---- scoring

    def _replay(
        self, about: torch.Tensor, before: torch.Tensor, steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The normals [B, S, H, A] that the states after `before` were drawn from; all steps in one pass."""
        scored = steps.shape[1]
        about_each = about if scored == 1 else about.repeat_interleave(scored, 0)
        # [B, S, H, A] -> [B*S, H, A] -> [B, S, H, A]
        velocity = self._velocity(self.velocity, before.flatten(0, 1), self.grid.times[steps].flatten(), about_each)
        return self.kernel(before, velocity.view_as(before), steps, about)

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

    # ---- imitation

    @torch.no_grad()
    def _later_end(self, x, t, about, generator) -> torch.Tensor:
        """Where a point a little further along the path leads to, by the slow network: this one must lead there too."""
        self.target.eval()
        for slow, fast in zip(self.target.parameters(), self.velocity.parameters(), strict=True):
            slow.lerp_(fast, 1 - self.config.target_decay)
        stride = torch.minimum(t, _LONGEST_STRIDE * _uniform(len(t), generator, t.device))
        later = t - stride
        x = x - stride[:, None, None] * self._velocity(self.target, x, t, about)
        return x - later[:, None, None] * self._velocity(self.target, x, later, about + self.aim)

    def _emitted(self, x: torch.Tensor) -> torch.Tensor:
        # [B, H, A] -> [B, C, A with padding]
        action = x[:, : self.chunk]
        action = self.actions.inverse(action) if self.actions is not None else action
        return nn.functional.pad(action, (0, self.padding)) if self.padding else action


def _kernel(config: FlowConfig, grid: Grid, horizon: int, action_dim: int) -> FlowSDE | FlowNoise:
    if learns_noise(config):
        return FlowNoise(grid, config.noise_range, config.width, horizon, action_dim)
    return FlowSDE(grid, config.noise_level)


def _scored_steps(config: FlowConfig) -> WholeChain:
    if config.method == "flow_sde_one_step":
        return OneStep(config.sampling_steps)
    if config.method == "denoising_mdp":
        scored = config.denoising_steps or config.sampling_steps
        return LastSteps(config.sampling_steps, scored, config.denoising_discount)
    return WholeChain(config.sampling_steps)


def _between(action: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """x_t = t eps + (1 - t) a."""
    t = t[:, None, None]
    return t * noise + (1 - t) * action


def _masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (values * mask).sum() / (mask.sum() * values.shape[-1]).clamp_min(1)


def _uniform(count: int, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    return torch.rand(count, generator=generator, device=generator.device).to(device)
