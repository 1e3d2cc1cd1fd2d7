"""RewardModel: intrinsic rewards from a world model. The world model scores each decision in time order, with memories
that carry over to the next rollout. Each term is normalised by its running mean and standard deviation; their weighted
sum is `next/reward`. Letters: T decisions, N robots, K terms, C steps of a decision, D memory size."""

import torch
from tensordict import TensorDict

from sparring.config.resolve import build
from sparring.data.buffer import RolloutBuffer
from sparring.envs.env import Env
from sparring.errors import Diverged, UserError
from sparring.normalize import RunningNormalizer
from sparring.processes.distributed import Distributed
from sparring.rewards import TERMS
from sparring.rewards.configs import RewardsConfig
from sparring.rewards.terms import RewardTerm
from sparring.world_models.world_model import MemoryStateManager, WorldModel

_SCORED_BY = ("observation", "action", "is_first", "next")


class RewardModel:
    """`unseen`: cameras of the world model that the explorer does not have."""

    def __init__(
        self,
        config: RewardsConfig,
        world_model: WorldModel,
        env: Env,
        chunk: int,
        unseen: tuple[str, ...],
        distributed: Distributed,
    ):
        weights, device = _weights_of(config), distributed.device
        about = (env.spec, chunk, device)
        self.world_model, self.unseen, self.distributed = world_model, unseen, distributed
        terms = {name: build(config, TERMS, *about, kind="reward term", name=name) for name in weights}
        self.terms: dict[str, RewardTerm] = terms
        self.learning = [term for term in self.terms.values() if type(term).learn is not RewardTerm.learn]
        self.weights = torch.tensor(list(weights.values()), device=device)
        self.normalizer = RunningNormalizer(len(weights), clip=config.clip).to(device)
        self.compares_memories = any(term.compares_memories for term in self.terms.values())
        if self.compares_memories and not unseen:
            why = "compares the memory from the explorer's cameras with that from all cameras, but the explorer has all"
            advice = "set it to 0, or give the explorer fewer cameras (student.cameras)"
            raise UserError(f"rewards.memory_divergence {why} ({', '.join(world_model.cameras)}); {advice}")
        self.memory = MemoryStateManager(env.num_envs, world_model.memory_size, device=device)
        self.memory_wrist = MemoryStateManager(env.num_envs, world_model.memory_size, device=device)
        self.running = torch.zeros(env.num_envs, device=device)  # [N]: return so far of the unfinished episodes

    @torch.no_grad()
    def write_rewards(self, buffer: RolloutBuffer) -> dict[str, float]:
        """Write `judged/error` and `next/reward` of the newest rollout, on the last executed step of each decision."""
        rollout = with_following(buffer)
        # [T, N]: `judged/*`, and the memories before and after each decision
        rollout.update(torch.stack([self._score(decision) for decision in rollout.select(*_SCORED_BY).unbind(0)]))  # type: ignore[arg-type]
        valid = rollout.get("valid", torch.ones_like(rollout["is_first"]))
        raw = torch.stack([term(rollout) for term in self.terms.values()], -1)  # [T, N, K]
        self.normalizer.update(raw[valid], self.distributed.sum)
        # the same in all processes, so that all of them stop
        if not self.normalizer.var.isfinite().all():
            raise Diverged(
                f"training has diverged: the world model's scores of a rollout ({', '.join(self.terms)}) are NaN or "
                "infinite; lower adversarial.learning_rate, or teacher.learning_rate if the world model is a teacher's"
            )
        # the mean is subtracted: disagreement is 13 deviations above 0, which a critic would have to learn first
        normalized = self.normalizer(raw)
        total = (normalized * self.weights).sum(-1)
        # [T, N] -> [T, N, C]: on the last executed step of each decision, zero elsewhere
        reward, last = torch.zeros_like(rollout["next", "reward"]), rollout["next", "executed"][..., None] - 1
        buffer.set(("next", "reward"), reward.scatter_(-1, last, total[..., None].to(reward.dtype)))
        buffer.set(("judged", "error"), rollout["judged", "error"])
        for term in self.learning:
            term.learn(rollout[valid], self.distributed)
        return self._metrics(raw[valid], normalized[valid], rollout["judged"][valid]) | self._episodes(total, rollout)

    def state_dict(self) -> dict:
        terms = {name: term.state_dict() for name, term in self.terms.items()}
        return {"normalizer": self.normalizer.state_dict(), "terms": terms}

    def process_state(self) -> dict:
        memories = {"memory": self.memory.state_dict(), "memory_wrist": self.memory_wrist.state_dict()}
        return memories | {"running": self.running.cpu()}

    def load_state_dict(self, state: dict, process_state: dict) -> None:
        self.normalizer.load_state_dict(state["normalizer"])
        for name, term in self.terms.items():
            term.load_state_dict(state["terms"][name])
        self.memory.load_state_dict(process_state["memory"])
        self.memory_wrist.load_state_dict(process_state["memory_wrist"])
        self.running = process_state["running"].to(self.running.device)

    def _score(self, td: TensorDict) -> TensorDict:
        td = self.memory.enter(td)
        entered = {"world_model": td["memory", "world_model"]}
        judged = self.world_model.score(td)
        after: dict = {"world_model": judged.pop("memory")}
        self.memory.leave(after["world_model"])
        if self.compares_memories:
            td = self.memory_wrist.enter(td)
            entered["world_model_wrist"] = td["memory", "world_model"]
            after["world_model_wrist"] = self.world_model.observe(td, without=self.unseen)
            self.memory_wrist.leave(after["world_model_wrist"])
        return TensorDict({"judged": judged, "memory": entered, "next": {"memory": after}}, td.batch_size)

    def _metrics(self, raw: torch.Tensor, normalized: torch.Tensor, judged: TensorDict) -> dict[str, float]:
        means = {f"reward/{name}": float(x) for name, x in zip(self.terms, raw.mean(0), strict=True)}
        means |= {f"reward/{name}_normalized": float(x) for name, x in zip(self.terms, normalized.mean(0), strict=True)}
        means |= {f"wm_{name}": float(judged[name].mean()) for name in ("error", "accuracy", "disagreement")}
        return self.distributed.mean(means)

    def _episodes(self, reward: torch.Tensor, rollout: TensorDict) -> dict[str, float]:
        done = rollout["next", "terminated"] | rollout["next", "truncated"]
        counts = rollout.get("valid", torch.ones_like(done)) & done
        totals = []
        for t, is_first in enumerate(rollout["is_first"]):
            self.running = torch.where(is_first, 0.0, self.running) + reward[t]
            totals += self.running[counts[t]].tolist()
        totals = self.distributed.gather_objects(totals)
        return {"episode_reward": sum(totals) / len(totals)} if totals else {}


def with_following(buffer: RolloutBuffer, robots: int | None = None) -> TensorDict:
    """The newest rollout `[T, N]` of the first `robots`, with `next/observation` (the final one at episode ends)."""
    rollout = buffer.rollout()[:, :robots]
    # a copy: [T, N] rows 1 to T-1, and the observation after the last decision
    following = torch.cat([rollout["observation"][1:], buffer.last["observation"][None, :robots]])
    ends = buffer.finals()
    if ends is not None:
        (step, env), final = ends
        kept = env < rollout.shape[1]
        following[step[kept], env[kept]] = final[kept]
    rollout["next"] = rollout["next"].copy().set("observation", following)
    return rollout


def _weights_of(config: RewardsConfig) -> dict[str, float]:
    return {name: weight for name in TERMS if (weight := getattr(config, name))}
