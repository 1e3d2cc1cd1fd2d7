"""Collector: the only place where an env meets a policy."""

from collections.abc import Iterator

import numpy as np
import torch
from tensordict import TensorDict

from sparring.collect.episodes import Episode, EpisodeTracker
from sparring.contract import check_decision, check_observation, check_step
from sparring.data.rollout import RolloutBuffer
from sparring.envs.env import Env
from sparring.noise import keyed_uniform
from sparring.policies.policy import Policy, executed_mask

# evaluation noise never repeats training noise
_EVAL_NOISE = 1 << 40


class Collector:
    """Lets a policy act in an env, decision by decision.

    `greedy` withholds the noise, so the policy acts by its mode. `version` is written by whoever updates the weights.
    """

    def __init__(self, env: Env, policy: Policy, seed: int, split: str = "train", greedy: bool = False, chunk: int = 1):
        self.env, self.policy, self.chunk = env, policy, chunk
        self.seed, self.split = seed, split
        self.noise_size = 0 if greedy else policy.noise_size
        self.version = 0
        # decisions taken so far, the clock of the noise
        self.decision = 0
        # env steps executed so far
        self.env_steps = 0
        self.episodes: list[Episode] = []
        self.tracker = EpisodeTracker(env.num_envs)
        self.root: TensorDict | None = None

    def start(self) -> None:
        """Reset all envs and look once, hard, at whether env and policy keep the contract."""
        self.root = self.env.reset(self.seed, self.split)
        check_observation(self.root, self.env.spec, "env.reset")
        self.tracker = EpisodeTracker(self.env.num_envs)

    @torch.no_grad()
    def decide(self, decisions: int) -> Iterator[TensorDict]:
        """`decisions` transitions [N]: observation, action, `next/*`. `self.root` is where the next one starts."""
        if self.root is None:
            self.start()
        for noise in self._noise(decisions):
            td = self.root
            if noise is not None:
                td["noise"] = noise
            td = self.policy.act(td)
            first = self.decision == 0
            if first:
                check_decision(td, self.chunk, self.env.spec.action_dim, "policy.act")
            after = self.env.step(td)
            if first:
                check_step(after, self.env.spec, self.chunk, "env.step")
            following = after.pop("next")
            td.set("next", following)
            self.root = after
            self.decision += 1
            self.env_steps += int(following["executed"].sum())
            self.episodes += self.tracker.add(td)
            yield td

    @torch.no_grad()
    def collect(self, buffer: RolloutBuffer) -> None:
        """Fill a buffer with fresh experience and complete it: executed log-probs, version, `next/value`."""
        buffer.clear()
        for td in self.decide(buffer.steps):
            buffer.add(td)
        buffer.close(self.root)
        rollout = buffer.get(flatten=False)
        if self.chunk > 1:
            # what was executed is what is scored
            mask = executed_mask(rollout, self.chunk)
            rollout["log_prob"].copy_((rollout["trace", "log_prob"] * mask).sum(-1))
        buffer.set("version", torch.full_like(rollout["next", "executed"], self.version))
        buffer.set(("next", "value"), self._next_values(buffer, rollout))

    def drain_episodes(self) -> list[Episode]:
        """Episodes that ended since the last call."""
        episodes, self.episodes = self.episodes, []
        return episodes

    def _next_values(self, buffer: RolloutBuffer, rollout: TensorDict) -> torch.Tensor:
        """V of the true next observation: the following row's, except where the episode or the rollout ended."""
        following = torch.empty_like(rollout["value"])
        following[:-1] = rollout["value"][1:]
        following[-1] = self.policy.value(buffer.last)
        if buffer.final:
            final = torch.cat(buffer.final)
            step, env = torch.cat(buffer.final_at, 1)
            following[step, env] = self.policy.value(TensorDict({"observation": final}, final.batch_size))
        return following

    def _noise(self, decisions: int):
        """`[N, Z]` for each of the next decisions, drawn at once; None when acting greedily."""
        if not self.noise_size:
            return [None] * decisions
        offset = _EVAL_NOISE if self.split == "eval" else 0
        envs = np.arange(self.env.num_envs) + self.env.first_env
        clock = (np.arange(decisions) + self.decision) // self.policy.noise_hold + offset
        noise = keyed_uniform(self.seed, envs, clock, self.noise_size)
        return torch.from_numpy(noise).to(self.env.device).unbind(0)

    def state_dict(self) -> dict:
        """All that the next rollout depends on, beside the weights; `env` is None where the env cannot tell."""
        env = self.env.state()
        return {
            "decision": self.decision,
            "env_steps": self.env_steps,
            "version": self.version,
            "tracker": self.tracker.state_dict(),
            "env": None if env is None else {name: torch.from_numpy(np.asarray(a)) for name, a in env.items()},
            "root": None if self.root is None else _plain(self.root.exclude("noise")),
        }

    def load_state_dict(self, state: dict) -> bool:
        """Go on from a `state_dict`. False when the env could not be put back, and starts new episodes instead."""
        self.decision, self.env_steps, self.version = state["decision"], state["env_steps"], state["version"]
        if state["env"] is None or state["root"] is None:
            return False
        self.env.set_state({name: tensor.numpy() for name, tensor in state["env"].items()})
        self.tracker.load_state_dict(state["tracker"])
        self.root = TensorDict(state["root"], [self.env.num_envs]).to(self.env.device)
        return True


def _plain(td: TensorDict) -> dict:
    return td.cpu().clone().to_dict()
