"""Action distributions against torch.distributions and by sampling."""

import pytest
import torch
from torch import distributions as D

from sparring.policies.actor_critic import _DiscreteHead as DiscreteHead
from sparring.policies.actor_critic import _GaussianHead as GaussianHead
from sparring.policies.actor_critic import _SquashedGaussianHead as SquashedGaussianHead
from sparring.policies.actor_critic import _StateDependentHead as StateDependentHead
from sparring.policies.actor_critic import _TokenHead as TokenHead


def features(batch=5, width=4):
    torch.manual_seed(1)
    return torch.randn(batch, width)


def act(head, features, noise):
    """Draw an action (or take the mode) and score it, as a policy does."""
    parameters = head.parameters_of(features)
    action = head.mode(parameters[0]) if noise is None else head.sample(features, parameters, noise)
    return action, head.score(parameters, action), parameters


def with_large_weights(head):
    """Replace the near-zero initial weights, so that the mean matters."""
    torch.manual_seed(2)
    torch.nn.init.normal_(head.linear.weight, std=0.5)
    return head


def test_gaussian_log_prob_equals_torch_distributions():
    head = with_large_weights(GaussianHead(4, chunk=2, action_dim=3, init_std=0.7))
    action, score, _ = act(head, features(), torch.rand(5, 6))
    mean = head.linear(features()).view(5, 2, 3)
    expected = D.Normal(mean, 0.7).log_prob(action).sum(-1)
    torch.testing.assert_close(score.log_prob.float(), expected)
    torch.testing.assert_close(score.entropy, D.Normal(mean, 0.7).entropy().sum(-1))
    assert score.dims == 3
    torch.testing.assert_close(score.z2, ((action - mean) / 0.7).square().sum(-1))


def test_squashed_log_prob_has_the_jacobian_and_actions_stay_inside_the_bounds():
    head = with_large_weights(SquashedGaussianHead(4, chunk=1, action_dim=2, init_std=0.9))
    action, score, _ = act(head, features(), torch.rand(5, 2) * 0.8 + 0.1)
    mean = head.linear(features()).view(5, 1, 2)
    expected = D.TransformedDistribution(D.Normal(mean, 0.9), [D.TanhTransform(cache_size=1)]).log_prob(action).sum(-1)
    torch.testing.assert_close(score.log_prob.float(), expected, atol=1e-4, rtol=1e-4)
    extreme, _, _ = act(head, features() * 1e3, torch.full((5, 2), 0.9999))
    assert extreme.abs().max() < 1
    assert head.score(head.parameters_of(features()), extreme).log_prob.isfinite().all()


def test_state_dependent_noise_has_the_spread_it_is_scored_with():
    head = with_large_weights(StateDependentHead(4, chunk=1, action_dim=2, init_std=0.7))
    one = features(1)
    action, score, parameters = act(
        head, one.expand(20_000, -1), torch.rand(20_000, head.noise_size, generator=torch.manual_seed(3))
    )
    # std = 0.7 * |features|
    expected = 0.7 * one.norm().item()
    assert action.std(0).flatten().tolist() == pytest.approx([expected] * 2, rel=0.02)
    torch.testing.assert_close(
        score.log_prob.float(), D.Normal(parameters[0], expected).log_prob(action).sum(-1), rtol=1e-3, atol=1e-3
    )


def test_discrete_choices_follow_their_probabilities():
    head = with_large_weights(DiscreteHead(4, chunk=1, choices=3))
    one = features(1)
    uniform = (torch.arange(10_000) + 0.5)[:, None] / 10_000
    action, score, _ = act(head, one.expand(10_000, -1), uniform)
    share = torch.bincount(action.flatten().long(), minlength=3) / 10_000
    torch.testing.assert_close(share, head.linear(one).softmax(-1)[0].detach(), atol=2e-4, rtol=0)
    torch.testing.assert_close(score.log_prob[0, 0].float(), share[action[0, 0, 0].long()].log(), atol=1e-2, rtol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GaussianHead(4, 2, 3, 0.5),
        lambda: SquashedGaussianHead(4, 2, 3, 0.5),
        lambda: StateDependentHead(4, 2, 3, 0.5),
        lambda: DiscreteHead(4, 2, 3),
        lambda: TokenHead(4, 2, 3, bins=7),
    ],
)
def test_scoring_a_sample_reproduces_its_log_prob(make):
    head = with_large_weights(make())
    action, acted, parameters = act(head, features(), torch.rand(5, head.noise_size))
    scored = head.score(head.parameters_of(features()), action)
    assert torch.equal(acted.log_prob, scored.log_prob)
    assert torch.equal(acted.z2, scored.z2)


@pytest.mark.parametrize("make", [lambda: GaussianHead(4, 1, 2, 0.5), lambda: SquashedGaussianHead(4, 1, 2, 0.5)])
def test_without_noise_the_mode_is_taken(make):
    head = with_large_weights(make())
    greedy, _, _ = act(head, features(), None)
    middle, _, _ = act(head, features(), torch.full((5, 2), 0.5))
    torch.testing.assert_close(greedy, middle)
