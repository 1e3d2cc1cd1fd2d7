"""User-defined reward terms by import path (`rewards: {my.module:term: 1.0}`), added to the env's reward."""

import inspect
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from tensordict import TensorDict

from sparring.config.resolve import resolve
from sparring.contract import STEP_KEYS, EnvSpec
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import UserError, describe_error
from sparring.processes.distributed import Distributed
from sparring.rewards.configs import RewardsConfig
from sparring.rewards.reward_model import with_following
from sparring.rewards.terms import RewardTerm

_TASK_REWARD = "task_reward"
# the keys of a transition that a term gets; nothing from the policy, because the sample before training has none of it
_SEEN = ("observation", "action", "is_first", "next")
_EXPECTED = "expected a function from a TensorDict of transitions [N] to a tensor [N], or a RewardTerm class"


class AddedRewards:
    """`next/reward` becomes `task_reward * next/reward`, plus each term times its weight on the last executed step."""

    def __init__(self, config: RewardsConfig, env: Env, chunk: int, distributed: Distributed):
        self.distributed, self.task_weight = distributed, config.task_reward
        self.weights = {path: weight for path, weight in config.terms.items() if weight}  # by import path
        self.names = _names(list(self.weights))
        self.terms = {path: _term(path, config, env.spec, chunk, distributed.device) for path in self.weights}
        # try each term before training starts
        sample = _sample(env.spec, env.num_envs, chunk, distributed.device)
        for path in self.terms:
            self._rewards(path, sample, "on a sample of zeros")

    @torch.no_grad()
    def write_rewards(self, buffer: RolloutBuffer) -> dict[str, float]:
        """Change the rewards of the newest rollout; returns the means of the env's reward and of each term."""
        rollout = with_following(buffer).select(*_SEEN, "valid", strict=False).exclude(("next", "value"))
        valid = cast(torch.Tensor, rollout.pop("valid", torch.ones_like(rollout["is_first"])))
        of_task = rollout["next", "reward"]
        # cloned, because a term may write into its input
        reward, decisions = self.task_weight * of_task, rollout.clone().unbind(0)
        means = {_TASK_REWARD: float(of_task.sum(-1)[valid].mean())}
        last = rollout["next", "executed"][..., None] - 1
        for path, weight in self.weights.items():
            added = torch.stack([self._rewards(path, decision) for decision in decisions])  # [T, N]
            if not added[valid].isfinite().all():
                raise UserError(f"rewards.{path} returned NaN or infinity for a transition; expected finite numbers")
            added = torch.where(valid, added, 0.0)
            reward.scatter_add_(-1, last, weight * added[..., None].to(reward.dtype))
            means[self.names[path]] = float(added[valid].mean())
            if type(self.terms[path]).learn is not RewardTerm.learn:
                self.terms[path].learn(rollout[valid], self.distributed)
        buffer.set(("next", "reward"), reward)
        return self.distributed.mean({f"reward/{name}": mean for name, mean in means.items()})

    def state_dict(self) -> dict:
        return {"terms": {path: term.state_dict() for path, term in self.terms.items()}}

    def process_state(self) -> dict:
        return {}

    def load_state_dict(self, state: dict, process_state: dict) -> None:
        for path, term in self.terms.items():
            term.load_state_dict(state["terms"][path])

    def _rewards(self, path: str, transitions: TensorDict, when: str = "") -> torch.Tensor:
        """The rewards `[N]` of transitions `[N]`."""
        try:
            rewards = self.terms[path](transitions)
        except Exception as error:
            hint = "; the td has observation, action, is_first and next" if isinstance(error, KeyError) else ""
            when = f"{when} " if when else ""
            # name the line in the user's file, not in a library that it called
            own = getattr(sys.modules.get(path.partition(":")[0]), "__file__", None)
            raise UserError(f"rewards.{path} failed {when}with {describe_error(error, own)}{hint}") from error
        shape = tuple(transitions.batch_size)
        if not isinstance(rewards, torch.Tensor):
            raise UserError(f"rewards.{path} returned {type(rewards).__name__}, expected a tensor {list(shape)}")
        if tuple(rewards.shape) != shape:
            given = f"returned shape {list(rewards.shape)}"
            raise UserError(f"rewards.{path} {given}, expected {list(shape)}: one reward per transition")
        return rewards.to(transitions["action"].device, torch.float32)


class _Function(RewardTerm):
    """A function of a td as a term."""

    def __init__(self, function: Callable[[TensorDict], torch.Tensor]):
        self.function = function

    def __call__(self, td: TensorDict) -> torch.Tensor:
        return self.function(td)


def _term(path: str, config: RewardsConfig, spec: EnvSpec, chunk: int, device: torch.device) -> RewardTerm:
    found: Any = resolve(path, {}, "reward term")
    if isinstance(found, type):
        if not issubclass(found, RewardTerm):
            raise UserError(f"reward term '{path}' is not a RewardTerm; {_EXPECTED} (sparring.rewards.terms)")
        try:
            return found(config, spec, chunk, device)
        except TypeError as error:
            raise UserError(f"reward term '{path}' cannot be created ({describe_error(error)}); {_EXPECTED}") from error
    if not callable(found):
        raise UserError(f"reward term '{path}' is a {type(found).__name__}; {_EXPECTED}")
    try:
        signature = inspect.signature(found)
        signature.bind(None)
    except TypeError:
        raise UserError(f"reward term '{path}' takes {signature}; {_EXPECTED}") from None
    except ValueError:
        pass  # a builtin has no signature; the call with a sample tests it
    return _Function(found)


def _names(paths: list[str]) -> dict[str, str]:
    """The name of each term in metrics: its function name, or the whole path if two terms share it."""
    short = [path.partition(":")[2] for path in paths]
    unique = {name for name in short if short.count(name) == 1} - {_TASK_REWARD}
    return {path: name if name in unique else path for path, name in zip(paths, short, strict=True)}


def _sample(spec: EnvSpec, robots: int, chunk: int, device: torch.device) -> TensorDict:
    """Transitions `[N]` of zeros with the shapes and dtypes of training."""
    td = TensorDict({"action": torch.zeros(robots, chunk, spec.action_dim)}, [robots])
    for name, (shape, dtype) in spec.observation.items():
        for side in ((), ("next",)):
            td[(*side, "observation", *name.split("/"))] = torch.zeros(robots, *shape, dtype=getattr(torch, dtype))
    for key, dtype in STEP_KEYS.items():
        steps = [chunk] if key == ("next", "reward") else []
        td.set(cast(tuple[str, ...], key), torch.zeros(robots, *steps, dtype=getattr(torch, dtype)))
    td["next", "executed"] += 1
    return td.to(device)
