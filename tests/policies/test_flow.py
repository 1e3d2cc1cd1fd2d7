"""The flow policy: every method passes the parity gate, and the formulas agree with their definitions."""

import math

import numpy as np
import pytest
import torch
from doubles import IdentityBackend
from parity_cases import (
    DIMS,
    METHODS,
    MUTANTS,
    STATE,
    CountsUnexecutedSteps,
    RandomEnv,
    gate,
    make_policy,
    rollout_of,
)
from tensordict import TensorDict
from torch import nn

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO, ppo_loss
from sparring.algorithms.scoring import ParityError
from sparring.collect.collector import Collector
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.configs import FlowConfig
from sparring.policies.flow.chain import _FlowNoise, _FlowSDE
from sparring.policies.flow.policy import FlowPolicy

# ---- the parity gate


@pytest.mark.parametrize("num_envs", [1, 6, 16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_every_method_passes_the_gate(method, num_envs, reduction):
    policy, buffer = rollout_of(num_envs=num_envs, dropout=0.3, reduction=reduction, **METHODS[method])
    parity = gate(policy, buffer)
    assert parity.drift <= 1e-4 and parity.dims == 0
    parity.check(1e-4)


@pytest.mark.parametrize("encoder", ["flat", "keypoints"])
@pytest.mark.parametrize("method", METHODS)
def test_the_gate_passes_with_images_padding_and_a_longer_horizon(method, encoder):
    policy, buffer = rollout_of(
        num_envs=6, seen={"padding": 2, "images": True}, horizon=6, image_encoder=encoder, **METHODS[method]
    )
    parity = gate(policy, buffer)
    parity.check(1e-4)
    flat = buffer.get()
    assert flat["action"].shape[1:] == (4, DIMS + 2) and (flat["action"][..., DIMS:] == 0).all()
    scored = policy.scored_steps
    assert (flat["trace", "dims"] == DIMS * scored).all()


@pytest.mark.parametrize("method", METHODS)
def test_in_bf16_the_drift_is_within_the_documented_tolerance(method):
    policy, buffer = rollout_of(num_envs=6, precision="bf16", **METHODS[method])
    gate(policy, buffer).check(0.05)
    # the networks compute in bf16, the scores in float32 or float64
    types = []
    for part in (policy.condition, policy.velocity.output):
        part.register_forward_hook(lambda _, inputs, output: types.append(output.dtype))
    flat = buffer.get()
    scored = policy.evaluate(flat)
    assert types == [torch.bfloat16] * 2
    assert scored["trace", "mean"].dtype == torch.float32 and scored["log_prob"].dtype == torch.float64
    exact = make_policy(**METHODS[method]).evaluate(flat)
    assert 1e-4 < (scored["trace", "mean"] - exact["trace", "mean"]).abs().max() < 0.1


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("method", METHODS)
def test_counting_steps_that_were_not_executed_trips_the_gate(method, reduction):
    policy, buffer = rollout_of(CountsUnexecutedSteps, sampling_steps=10, reduction=reduction, **METHODS[method])
    with pytest.raises(ParityError, match="score"):
        PPO(PPOConfig(), policy).update(buffer.get(flatten=False))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS.keys())
def test_each_mutant_trips_the_gate(mutant, method):
    policy, buffer = rollout_of(mutant, seen={"padding": 2}, dropout=0.3, **METHODS[method])
    with pytest.raises(ParityError, match="refuses to train"):
        PPO(PPOConfig(), policy).update(buffer.get(flatten=False))


# ---- log-probabilities


def test_log_prob_equals_torch_distributions_along_the_chain():
    policy, buffer = rollout_of(num_envs=2, sampling_steps=3, noise_level=0.7)
    flat = buffer.get()
    states, executed = flat["trace", "states"], flat["next", "executed"]
    _, condition = policy._encode(flat)
    expected = torch.zeros(len(flat), dtype=torch.float64)
    for k in range(3):
        t, h = 1 - k / 3, 1 / 3
        v = policy.velocity(states[:, k], torch.full((len(flat),), t), condition)
        sigma2 = 0.49 * t / (h if k == 0 else 1 - t)
        a_hat, eps_hat = states[:, k] - t * v, states[:, k] + (1 - t) * v
        mean = a_hat * (1 - (t - h)) + eps_hat * (t - h - sigma2 * h / (2 * t))
        terms = torch.distributions.Normal(mean, math.sqrt(sigma2 * h)).log_prob(states[:, k + 1]).sum(-1)
        expected += (terms * (torch.arange(4) < executed[:, None])).sum(-1).detach()
    torch.testing.assert_close(flat["log_prob"], expected, rtol=1e-5, atol=1e-4)
    # chunks of 4 in episodes of 7: some were cut short
    assert set(executed.tolist()) == {3, 4}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_the_log_ratio_of_fpo_is_the_decrease_of_the_flow_matching_loss(reduction):
    policy, buffer = rollout_of(num_envs=2, method="fpo", loss_samples=3, reduction=reduction)
    flat = buffer.get()
    states, times, executed = flat["trace", "states"], flat["trace", "times"], flat["next", "executed"]

    @torch.no_grad()
    def loss():
        _, condition = policy._encode(flat)
        total = torch.zeros(len(flat), dtype=torch.float64)
        for i in range(3):
            noise, action, t = states[:, i], states[:, 3], times[:, i, None, None]
            v = policy.velocity(t * noise + (1 - t) * action, times[:, i], condition)
            # [B, H]
            squares = (v - (noise - action)).square().sum(-1).double()
            total += (squares * (torch.arange(4) < executed[:, None])).sum(-1) / 3
        return total / (executed * DIMS) if reduction == "mean" else total

    before = loss()
    nn.init.normal_(policy.velocity.output.weight, std=0.2)
    log_ratio = policy.evaluate(flat)["log_prob"] - flat["log_prob"]
    torch.testing.assert_close(log_ratio, before - loss(), rtol=1e-4, atol=1e-5)
    assert log_ratio.abs().min() > 1e-3
    # the action is the end of the ODE, in env units; all noises and times differ
    torch.testing.assert_close(policy._action_of(states[:, 3]), flat["action"])
    assert 0 < times.min() < 0.1 and 0.9 < times.max() < 1 and len(times.unique()) == times.numel()
    assert abs(states[:, :3].mean()) < 0.1 and abs(states[:, :3].std() - 1) < 0.1


def test_fpo_samples_the_same_action_as_greedy_acting_from_the_same_noise():
    """The gate compares velocities; this test checks that they produce the action."""
    policy = make_policy(method="fpo")
    backend = RandomEnv(4)
    backend.reset(lambda *_: 0)
    td = TensorDict({"observation": {"state": torch.from_numpy(backend._observe()["state"])}}, [4])
    noise = torch.rand(4, policy.noise_size, generator=torch.Generator().manual_seed(0))
    sampled = policy.act(td.clone().set("noise", noise))["action"]
    greedy = policy.act(td.clone().set("start", noise[:, : policy.start_size]))["action"]
    torch.testing.assert_close(sampled, greedy)
    assert (sampled - policy.act(td.clone())["action"]).abs().max() > 0.1 and not policy.reports_sampled


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_counted_padding_shows_in_the_score(reduction):
    policy, buffer = rollout_of(MUTANTS["padding counted"], seen={"padding": 2}, reduction=reduction)
    parity = gate(policy, buffer)
    # z of the real dims is unchanged: only the sum is wrong
    assert parity.drift <= 1e-4 and parity.dims == 2 * policy.sampling_steps and parity.score > 0.1


def test_the_ratio_is_computed_before_rounding_to_float32():
    """Sums of thousands of terms: float32 numbers near 1e4 are 1e-3 apart."""
    batch = TensorDict({"log_prob": torch.full((1,), -14_000.0, dtype=torch.float64), "advantage": torch.ones(1)}, [1])
    batch.update({"return": torch.zeros(1), "value": torch.zeros(1)})
    scored = batch.select("value").update({"log_prob": batch["log_prob"] + 1e-5, "entropy": torch.zeros(1)})
    _, terms = ppo_loss(PPOConfig(), 0.2, batch, scored)
    assert terms.log_ratio.dtype == torch.float32 and terms.log_ratio.item() == pytest.approx(1e-5, rel=1e-4)
    flat = rollout_of(num_envs=2)[1].get()
    assert flat["log_prob"].dtype == torch.float64


def test_the_mean_reduction_divides_the_log_prob_by_its_number_of_terms():
    total, _ = rollout_of(num_envs=4), None
    policy, buffer = total
    summed = buffer.get()
    policy_mean, buffer_mean = rollout_of(num_envs=4, reduction="mean")
    mean = buffer_mean.get()
    terms = mean["next", "executed"] * DIMS * policy.sampling_steps
    torch.testing.assert_close(mean["log_prob"], summed["log_prob"] / terms)


def test_each_step_of_a_denoising_mdp_has_a_log_prob_of_its_own():
    policy, buffer = rollout_of(num_envs=4, **METHODS["mdp_sde"], denoising_discount=0.5)
    assert buffer.get()["log_prob"].shape[-1] == 2
    assert policy.step_weights.tolist() == [0.5, 1.0]


def test_flow_noise_stays_within_its_bounds():
    kernel = _FlowNoise(2, (0.1, 0.2), width=4, horizon=1, action_dim=1)
    nn.init.normal_(kernel.net[-1].weight, std=100.0)
    x, condition = torch.zeros(500, 2, 1, 1), torch.randn(500, 4)
    steps = torch.tensor([[0, 1]]).expand(500, 2)
    _, std = kernel(x, x, steps, condition)
    assert std.min() >= 0.1 - 1e-6 and std.max() <= 0.2 + 1e-6 and std.max() - std.min() > 0.05


@pytest.mark.parametrize("method", ["flow_noise", "mdp_noise"])
def test_the_entropy_is_that_of_all_scored_steps(method):
    policy, buffer = rollout_of(num_envs=2, **METHODS[method])
    flat = buffer.get()
    entropy = policy.evaluate(flat)["entropy"]
    _, condition = policy._encode(flat)
    _, std, _ = policy._score(condition, flat["trace"])
    terms = torch.distributions.Normal(0.0, std).entropy().sum((2, 3))
    mask = torch.arange(4) < flat["next", "executed"][:, None]
    torch.testing.assert_close(entropy, (terms * mask).sum(-1), rtol=1e-5, atol=1e-4)
    entropy.sum().backward()
    assert policy.kernel.net[-1].bias.grad.abs().min() > 0


# ---- marginals


def exact_velocity(x, t, spread):
    """For actions N(0, spread^2): E[eps - a | x_t = x]."""
    variance = t**2 + (1 - t) ** 2 * spread**2
    return (t - (1 - t) * spread**2) / variance * x


def sampled_std(steps: int, level: float | None, spread=0.3, draws=200_000) -> float:
    generator = torch.Generator().manual_seed(0)
    kernel = _FlowSDE(steps, level) if level else None
    x = torch.randn(draws, 1, 1, 1, generator=generator)
    for k in range(steps):
        v = exact_velocity(x, 1 - k / steps, spread)
        if kernel is None:
            x = x - v / steps
        else:
            mean, std = kernel(x, v, torch.full((draws, 1), k), None)
            x = mean + std * torch.randn(x.shape, generator=generator)
    return x.std().item()


def test_with_few_steps_the_std_is_the_documented_one():
    """formulas.md: target 0.300; K=4: ODE 0.178, eta 0.5 0.238, eta 1 0.311; K=2, eta 1: 1.03."""
    assert sampled_std(4, None) == pytest.approx(0.178, abs=0.002)
    assert sampled_std(4, 0.5) == pytest.approx(0.238, abs=0.002)
    assert sampled_std(4, 1.0) == pytest.approx(0.311, abs=0.002)
    assert sampled_std(2, 1.0) == pytest.approx(1.03, abs=0.02)


def test_with_many_steps_the_sde_has_the_odes_marginal():
    assert sampled_std(200, None) == pytest.approx(0.3, abs=0.006)
    assert sampled_std(200, 0.5) == pytest.approx(0.3, abs=0.006)
    errors = [abs(sampled_std(steps, 0.5, draws=100_000) - 0.3) for steps in (4, 16, 64)]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


# ---- cost


def test_observations_are_encoded_once_per_decision():
    policy, buffer = rollout_of(num_envs=4, sampling_steps=5)
    calls = {"encoder": 0, "velocity": 0}
    for name in calls:
        getattr(policy, name).register_forward_hook(lambda *_, name=name: calls.__setitem__(name, calls[name] + 1))
    root = Env(RandomEnv(4)).reset(0)
    policy.act(root.set("noise", torch.rand(4, policy.noise_size).clamp(0.01, 0.99)))
    assert calls == {"encoder": 1, "velocity": 5}
    policy.evaluate(buffer.get())
    assert calls == {"encoder": 2, "velocity": 6}


def test_one_step_scores_a_single_state():
    policy, buffer = rollout_of(num_envs=16, sampling_steps=10, **METHODS["one_step"])
    flat = buffer.get()
    assert flat["trace", "states"].shape[1] == 2
    # every step is sample_actions
    assert set(flat["trace", "first"].tolist()) == set(range(10))


# ---- acting


@pytest.mark.parametrize("given", [True, False])
def test_greedy_acting_is_the_ode_from_its_start_or_from_zero(given):
    policy = make_policy(chunk=2, horizon=3)
    root = Env(RandomEnv(4)).reset(0)
    x = torch.randn(4, 3, DIMS, generator=torch.Generator().manual_seed(0)) if given else torch.zeros(4, 3, DIMS)
    start = {"start": torch.special.ndtr(x).flatten(1)} if given else {}
    action = policy.act(root.clone().update(start))["action"]
    _, condition = policy._encode(root)
    for k in range(4):
        x = x - 0.25 * policy.velocity(x, torch.full((4,), 1 - k / 4), condition)
    torch.testing.assert_close(action, x[:, :2] * 0.5 + 0.1)


def test_greedy_robots_start_from_noise_of_their_own():
    policy = make_policy()
    collector = Collector(Env(RandomEnv(4)), policy, seed=0, split="eval", greedy=True, chunk=4)
    decisions = [collector.decide() for _ in range(2)]
    starts = torch.stack([td["start"] for td in decisions]).flatten(0, 1)
    assert len(starts.unique(dim=0)) == 8 and starts.std() > 0.2
    for td in decisions:
        seen = td.select("observation")
        from_zero = policy.act(seen.clone())["action"]
        assert (td["action"] - from_zero).abs().amax((1, 2)).min() > 0.01
        torch.testing.assert_close(td["action"], policy.act(seen.set("start", td["start"]))["action"])


def test_contradictory_settings_are_refused():
    with pytest.raises(UserError, match="horizon=2 is shorter"):
        FlowPolicy(FlowConfig(horizon=2), RandomEnv(1).spec, 4)
    for wrong, message in (
        ({"method": "denoising_mdp", "denoising_steps": 9}, "denoising_steps=9 is more than"),
        ({"denoising_steps": 2}, "denoising_steps=2: read by policy.method=denoising_mdp only, not by flow_sde"),
        ({"method": "flow_noise", "kernel": "noise"}, "kernel=noise: read by policy.method=denoising_mdp only"),
        ({"denoising_discount": 0.5}, "denoising_discount=0.5: read by"),
        ({"loss_samples": 4}, "loss_samples=4: read by policy.method=fpo only, not by flow_sde"),
        ({"method": "fpo", "noise_level": 0.3}, "noise_level=0.3: policy.method=fpo adds no noise"),
        ({"method": "fpo", "noise_range": (0.1, 0.2)}, "noise_range=.*: policy.method=fpo adds no noise"),
        ({"method": "fpo", "consistency": 1.0}, "consistency=1.0: policy.method=fpo scores"),
        ({"width": 30, "heads": 4}, "width=30 .*policy.heads=4"),
        ({"noise_range": (0.2, 0.1)}, "noise_range=.*0 < "),
        (
            {"noise_range": (0.1, 0.2)},
            r"noise_range=\[0.1, 0.2\]: .*=flow_sde reads policy.noise_level instead",
        ),
        ({"method": "flow_noise", "noise_level": 0.3}, "noise_level=0.3: .*flow_noise reads .*; leave it at 0.5, or"),
        ({"method": "denoising_mdp", "noise_range": (0.1, 0.2)}, "denoising_mdp with policy.kernel=sde reads"),
        ({"method": "denoising_mdp", "kernel": "noise", "noise_level": 0.3}, "kernel=noise reads policy.noise_range"),
    ):
        with pytest.raises(UserError, match=message):
            FlowPolicy(FlowConfig(**wrong), RandomEnv(1).spec, 4)
    for valid in (
        {"method": "flow_sde_one_step", "noise_level": 0.3},
        {"method": "denoising_mdp", "noise_level": 0.3},
        {"method": "denoising_mdp", "kernel": "noise", "noise_range": (0.1, 0.2)},
    ):
        FlowPolicy(FlowConfig(**valid), RandomEnv(1).spec, 4)
    with pytest.raises(UserError, match="continuous"):
        FlowPolicy(FlowConfig(), EnvSpec({"state": ((2,), "float32")}, 1, discrete_actions=3), 1)


def test_an_entropy_bonus_needs_noise_that_is_learned():
    config = PPOConfig(entropy_coef=0.01)
    for settings in METHODS.values():
        policy = make_policy(**settings)
        if policy.kernel.learns_noise:
            PPO(config, policy)
        else:
            with pytest.raises(UserError, match="entropy_coef=0.01: .*FlowPolicy"):
                PPO(config, policy)
    assert {m for m, s in METHODS.items() if make_policy(**s).learns_entropy} == {"flow_noise", "mdp_noise"}


# ---- learning


def test_the_critic_does_not_shape_the_encoder():
    policy, buffer = rollout_of(num_envs=2, seen={"images": True})
    flat = buffer.get()[:8]
    for value in (policy.evaluate(flat)["value"], policy.value(flat)):
        policy.zero_grad()
        value.square().sum().backward()
        assert all(parameter.grad is None for parameter in policy.encoder.parameters())
        assert policy.critic.output.weight.grad.abs().max() > 0
    policy.evaluate(flat)["log_prob"].sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in policy.encoder.images.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_each_method_finds_a_known_optimum(method):
    """Reward 1 - |action - state|: the best action is the state."""
    torch.manual_seed(0)
    env = Env(IdentityBackend(64))
    config = FlowConfig(width=32, heads=2, layers=1, normalize_actions=False, **METHODS[method])
    policy = FlowPolicy(config, env.spec, 1).eval()
    # FPO's ratio is an estimate: small steps and more of them (seeds 0 to 4: 0.056 to 0.087)
    clip, updates, worst = (0.05, 30, 0.12) if method == "fpo" else (0.2, 20, 0.08)
    settings = PPOConfig(policy_lr=3e-3, mini_batch_size=256, ppo_epochs=4, gamma=0.0, clip_ratio=clip)
    ppo = PPO(settings, policy)
    collector, buffer = Collector(env, policy, seed=0), RolloutBuffer(8)
    errors = [_ode_error(policy, env)]
    for _ in range(updates):
        collector.collect(buffer)
        ppo.update(buffer.rollout())
        collector.version += 1
        errors.append(_ode_error(policy, env))
    assert errors[0] > 0.4 and np.mean(errors[-5:]) < worst


def _ode_error(policy, env) -> float:
    seen = env.reset(1, "eval")
    return (policy.act(seen.clone())["action"][:, 0, 0] - seen["observation", "state"][:, 0]).abs().mean().item()


# ---- imitation


def two_modes(generator, batch=256):
    """Demonstrations: both steps are -0.5 or both are 0.5; the state is constant."""
    side = torch.randint(0, 2, (batch, 1, 1), generator=generator).float() - 0.5
    action = side.expand(-1, 2, DIMS).clone()
    valid = torch.ones(batch, 2, dtype=torch.bool)
    observation = TensorDict({"state": torch.zeros(batch, STATE)}, [batch])
    return TensorDict({"observation": observation, "action": action, "valid": valid}, [batch])


def imitate(**config):
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(width=48, heads=2, layers=1, **config), RandomEnv(1).spec, 2)
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(600):
        loss, _ = policy.imitation_loss(two_modes(generator), generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


@torch.no_grad()
def draw(policy, condition):
    """[512, 2, A] by the ODE from noise."""
    x = torch.randn(512, 2, DIMS, generator=torch.Generator().manual_seed(1))
    for k in range(policy.sampling_steps):
        x = policy._ode_step(x, policy.denoise(x, policy._time_of(k, x), condition))
    return x


def distance_to_a_mode(x):
    return (x.abs() - 0.5).abs().mean().item()


def test_imitation_learns_both_of_two_modes():
    policy = imitate(sampling_steps=10)
    x = draw(policy, policy.encode(two_modes(torch.Generator(), 512))[1])
    # near one of them, each in 30 to 70 %, and both steps of a chunk near the same one
    assert distance_to_a_mode(x) < 0.12 and 0.3 < (x[:, 0, 0] > 0).float().mean() < 0.7
    assert ((x > 0) == (x[:, :1, :1] > 0)).float().mean() > 0.95


def test_with_the_consistency_term_two_steps_suffice():
    policy = imitate(sampling_steps=2, consistency=1.0, target_decay=0.98)
    batch = two_modes(torch.Generator(), 512)
    plain, consistent = (draw(policy, condition) for condition in (policy._encode(batch)[1], policy.encode(batch)[1]))
    assert distance_to_a_mode(consistent) < 0.1 and distance_to_a_mode(consistent) < 0.5 * distance_to_a_mode(plain)


def test_imitation_learns_normalised_actions_and_acts_in_env_units():
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(width=32, heads=2, layers=1), RandomEnv(1).spec, 2)
    policy.fit_normalizers({"action": {"mean": np.full(DIMS, 0.5), "std": np.full(DIMS, 0.01)}}, "min_max", "mean_std")
    batch = two_modes(torch.Generator().manual_seed(0), 64)
    batch["action"].fill_(0.52)
    optimizer, generator = torch.optim.Adam(policy.parameters(), 3e-3), torch.Generator().manual_seed(0)
    for _ in range(200):
        loss, _ = policy.imitation_loss(batch, generator)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # two standard deviations from the mean; unscaled it would be 0.5 + 0.01 * 0.52
    assert (policy.act(batch.select("observation"))["action"] - 0.52).abs().max() < 0.005


def test_times_near_the_noise_are_drawn_more_often():
    policy = make_policy(chunk=2)
    times = []
    policy.velocity.register_forward_hook(lambda _, inputs, output: times.append(inputs[1]))
    policy.imitation_loss(two_modes(torch.Generator().manual_seed(0), 8192), torch.Generator().manual_seed(1))
    (t,) = times
    # Beta(1.5, 1): mean 1.5 / 2.5, P(t < 1/2) = (1/2)^1.5
    assert t.mean().item() == pytest.approx(0.6, abs=0.01)
    assert (t < 0.5).float().mean().item() == pytest.approx(0.5**1.5, abs=0.02)


def test_imitation_ignores_steps_past_the_end_of_an_episode():
    policy = make_policy(chunk=2)
    batch = two_modes(torch.Generator().manual_seed(0), 8)
    batch["valid"][:, 1] = False
    batch["action"][:, 1] = 100.0
    # without blocks the positions of a chunk do not interact, so the masked position can only enter the average
    policy.velocity.blocks = nn.ModuleList()
    loss, _ = policy.imitation_loss(batch, torch.Generator().manual_seed(1))
    batch["action"][:, 1] = -100.0
    again, _ = policy.imitation_loss(batch, torch.Generator().manual_seed(1))
    assert loss.item() == again.item()
