"""One denoising step as a normal distribution (formulas.md, section 1).

Time runs from 1 (noise) to 0 (action) in K steps of h = 1/K: t_k = 1 - k/K. The velocity is v = eps - a.

Letters: B decisions, S denoising steps of each, H steps of a chunk, A action dims.
"""

import torch
from torch import nn

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
