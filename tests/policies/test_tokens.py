"""Action tokens: bins to numbers and back, their probabilities, padding, and learning with them."""

import numpy as np
import pytest
import torch
from doubles import IdentityBackend
from torch import distributions as D

from sparring.algorithms.configs import PPOConfig
from sparring.algorithms.ppo import PPO
from sparring.algorithms.scoring import Decisions
from sparring.collect.collector import Collector
from sparring.contract import EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError
from sparring.policies.actor_critic import ActorCritic
from sparring.policies.actor_critic import _TokenHead as TokenHead
from sparring.policies.configs import ActorCriticConfig


def head_of(chunk=2, action_dim=3, bins=5) -> TokenHead:
    torch.manual_seed(0)
    head = TokenHead(4, chunk, action_dim, bins)
    torch.nn.init.normal_(head.linear.weight, std=0.7)
    return head


def log_probs_of(*probabilities: float) -> torch.Tensor:
    # [1, 1, 1, bins]
    return torch.tensor(probabilities).log().view(1, 1, 1, -1)


def test_an_action_is_the_centre_of_its_bin():
    head = head_of(chunk=1, action_dim=1, bins=4)
    parameters = (log_probs_of(0.1, 0.2, 0.6, 0.1), None)
    assert head.mode(parameters[0]).item() == 0.25
    drawn = [head.sample(None, parameters, torch.tensor([[u]])).item() for u in (0.05, 0.2, 0.5, 0.95, 0.9999999)]
    assert drawn == [-0.75, -0.25, 0.25, 0.75, 0.75]
    # a demonstrated number is scored as its bin, one outside the range as the nearest bin
    scores = [head.score(parameters, torch.tensor([[[x]]])).log_prob.exp().item() for x in (-3, -0.51, -0.49, 0.4, 1)]
    assert scores == pytest.approx([0.1, 0.1, 0.2, 0.6, 0.1])


@pytest.mark.parametrize("bins", [2, 7, 64, 255, 1000])
def test_every_bin_centre_maps_back_to_its_bin(bins):
    head = head_of(bins=bins)
    index = torch.arange(bins)
    assert torch.equal(head._bin(head._centre(index)), index)
    assert head._centre(index).abs().max() < 1


def test_log_prob_and_entropy_are_those_of_independent_choices():
    head, features = head_of(), torch.randn(6, 4, generator=torch.manual_seed(1))
    parameters = head.parameters_of(features)
    action = head.sample(features, parameters, torch.rand(6, 6, generator=torch.manual_seed(2)))
    assert action.shape == (6, 2, 3)
    score, expected = head.score(parameters, action), D.Categorical(logits=parameters[0])
    index = ((action + 1) / 2 * 5 - 0.5).round()
    torch.testing.assert_close(score.log_prob.float(), expected.log_prob(index).sum(-1))
    torch.testing.assert_close(score.entropy, expected.entropy().sum(-1))
    assert score.dims == 3 and torch.equal(score.z2, torch.zeros(6, 2))
    # the gradient of cross-entropy: it raises the action's logit and lowers the others
    score.log_prob[0, 0].backward()
    assert head.linear.bias.grad.view(2, 3, 5)[0].sum(-1).abs().max() < 1e-6
    assert (head.linear.bias.grad.view(2, 3, 5)[0].gather(-1, index[0, 0].long()[:, None]) > 0).all()


def test_draws_follow_the_probabilities():
    head = head_of(chunk=1, action_dim=1, bins=3)
    uniform = (torch.arange(10_000) + 0.5)[:, None] / 10_000
    parameters = (log_probs_of(0.25, 0.05, 0.7).expand(10_000, 1, 1, 3), None)
    drawn = head.sample(None, parameters, uniform).flatten()
    share = [(drawn - centre).abs().lt(1e-6).float().mean().item() for centre in (-2 / 3, 0, 2 / 3)]
    assert share == pytest.approx([0.25, 0.05, 0.7], abs=2e-4)


class PaddedBackend(IdentityBackend):
    """Three more action entries, which are padding."""

    def __init__(self, num_envs):
        super().__init__(num_envs)
        self.spec = EnvSpec({"state": ((1,), "float32")}, 4, action_padding=3, max_episode_steps=8)

    def step(self, action):
        assert not action[..., 1:].any()
        return super().step(action)


@pytest.mark.parametrize("num_envs", [1, 6, 16])
def test_padding_is_zero_and_not_scored(num_envs):
    torch.manual_seed(0)
    env = Env(PaddedBackend(num_envs))
    policy = ActorCritic(ActorCriticConfig(distribution="tokens", bins=9), env.spec, 3)
    torch.nn.init.normal_(policy.head.linear.weight, std=0.3)
    buffer = RolloutBuffer(256 // num_envs)
    Collector(env, policy, seed=0, chunk=3).collect(buffer)
    flat = buffer.get()
    parity = PPO(PPOConfig(), policy).scorer.parity(Decisions(flat))
    parity.check(1e-4)
    assert parity.drift <= 1e-5
    assert flat["action"].shape[1:] == (3, 4) and (flat["trace", "dims"] == 1).all()


def test_the_identity_is_learned():
    torch.manual_seed(0)
    env = Env(IdentityBackend(64))
    policy = ActorCritic(ActorCriticConfig(distribution="tokens", bins=9), env.spec, 1)
    ppo = PPO(PPOConfig(policy_lr=1e-2, mini_batch_size=512, gamma=0.0, ppo_epochs=4), policy)
    buffer = RolloutBuffer(16)
    collector = Collector(env, policy, seed=0)
    rewards = []
    for _ in range(15):
        collector.collect(buffer)
        rewards.append(buffer.get()["next", "reward"].mean().item())
        ppo.update(buffer.get(flatten=False))
        collector.version += 1
    # bins are 0.22 wide: the best of them is 0.056 away on average
    assert rewards[0] < 0.5 and np.mean(rewards[-3:]) > 0.9


def test_tokens_are_refused_for_discrete_actions():
    with pytest.raises(UserError, match="distribution=tokens, but the env takes one of 4 choices"):
        ActorCritic(ActorCriticConfig(distribution="tokens"), IdentityBackend(2, choices=4).spec, 1)
