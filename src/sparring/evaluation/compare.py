"""`sparring compare`: compares two policies or world models on the same held-out episodes, with paired tests."""

import json
import math
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sparring.api import load_policy, load_world_model
from sparring.collect.camera import Episode
from sparring.config.schema import Config
from sparring.config.text import Setting, flatten, value_text
from sparring.contract import EnvSpec
from sparring.errors import UserError
from sparring.evaluation.files import text_table
from sparring.evaluation.of_run import SAME_EPISODES, episode_differences, load_other_world_model, open_checkpoint
from sparring.evaluation.play import held_out_env, play, wilson
from sparring.evaluation.world_model import WorldModelEvaluation
from sparring.processes.distributed import pick_device
from sparring.processes.files import write_whole

FLIPS, AT_A_TIME = 10_000, 500  # random sign vectors of the permutation test, and how many are in memory at once
SIGNIFICANT = 0.05  # a difference is significant below this p
FEWEST = (
    6  # with 5 pairs, all differences have one sign by chance in 1 of 16 cases, so p of the permutation test is > 0.05
)
# settings that do not change the episodes: what a policy observes and how it acts
_POLICY_VIEW = "cameras image_size depth points object_state pad_state pad_action control_mode action_scale"
MAY_DIFFER = SAME_EPISODES + tuple(f"env.{name}" for name in _POLICY_VIEW.split())


@dataclass(frozen=True)
class _Difference:
    """Mean of A minus mean of B, its 95 % interval, and the p value."""

    effect: float
    low: float
    high: float
    p: float

    @property
    def is_significant(self) -> bool:
        return self.p < SIGNIFICANT and (self.low > 0 or self.high < 0)

    @property
    def is_borderline(self) -> bool:
        return (self.p < SIGNIFICANT) != (self.low > 0 or self.high < 0)


def _success_difference(a: np.ndarray, b: np.ndarray) -> _Difference:
    """For `[n]` bool: McNemar's mid-p test, and Newcombe's interval for paired proportions (1998, method 10)."""
    both, only_a, only_b, neither = (int(x.sum()) for x in (a & b, a & ~b, b & ~a, ~a & ~b))
    effect = (only_a - only_b) / len(a)
    of_a, of_b = wilson(both + only_a, len(a)), wilson(both + only_b, len(b))
    # phi: correlation of the successes of A and B; if positive, it gets a continuity correction towards 0
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    gap: float = both * neither - only_a * only_b
    gap = gap if gap < 0 else max(0.0, gap - len(a) / 2)
    phi = gap / math.sqrt(product) if product else 0.0

    def margin(own: float, other: float) -> float:
        return math.sqrt(max(0.0, own**2 - 2 * phi * own * other + other**2))

    low = effect - margin(of_a.rate - of_a.low, of_b.high - of_b.rate)
    high = effect + margin(of_a.high - of_a.rate, of_b.rate - of_b.low)
    return _Difference(effect, low, high, _mcnemar(only_a, only_b))


def _mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided mid-p (Fagerland, Lydersen, Laake 2013). If A and B are equal, each discordant pair is a fair coin."""
    if only_a == only_b:
        return 1.0
    discordant, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(discordant, k) for k in range(fewer + 1))
    return (2 * tail - math.comb(discordant, fewer)) / 2**discordant


def _mean_difference(a: np.ndarray, b: np.ndarray, seed: int = 0) -> _Difference:
    """For `[n]` numbers, n > 1: Student's interval of the mean difference, and a permutation test of signs."""
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        gaps = np.asarray(a, float) - np.asarray(b, float)
    if not np.isfinite(gaps).all():
        lost = f"{(~np.isfinite(gaps)).sum()} of {len(gaps)} episodes have results that are not finite"
        raise UserError(f"{lost}, so means cannot be compared; run sparring eval on A and B to see which one diverged")
    n, effect, rng = len(gaps), float(gaps.mean()), np.random.default_rng(seed)
    # the tolerance counts signs that reproduce the observed effect in spite of rounding
    observed = abs(effect) - 1e-9 * np.abs(gaps).mean()
    as_large = 0
    for _ in range(FLIPS // AT_A_TIME):
        signs = rng.integers(0, 2, (AT_A_TIME, n)) * 2.0 - 1.0
        as_large += int((np.abs(signs @ gaps / n) >= observed).sum())
    margin = _student_quantile(n - 1) * float(gaps.std(ddof=1)) / math.sqrt(n)
    return _Difference(effect, effect - margin, effect + margin, (1 + as_large) / (1 + FLIPS))


def _student_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t by the Cornish-Fisher expansion; accurate for 5 degrees of freedom or more."""
    z = 1.959964
    first, second, third = z**3 + z, 5 * z**5 + 16 * z**3 + 3 * z, 3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z
    terms = (z, first / 4, second / 96, third / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


@dataclass(frozen=True)
class _Measured:
    """One measure of A and of B in the same episodes. `unit` and `scale` are for printing."""

    name: str
    a: float
    b: float
    difference: _Difference  # A minus B
    unit: str
    scale: int = 1
    more_is_better: bool = True

    @classmethod
    def success(cls, a: np.ndarray, b: np.ndarray, name: str = "success, %") -> "_Measured":
        return cls(name, a.mean(), b.mean(), _success_difference(a, b), "points of success", 100)

    @classmethod
    def mean(cls, name: str, a: np.ndarray, b: np.ndarray, unit: str, more_is_better: bool = True) -> "_Measured":
        return cls(name, a.mean(), b.mean(), _mean_difference(a, b), unit, more_is_better=more_is_better)

    def row(self) -> tuple[str, ...]:
        digits = 1 if self.scale == 100 else 3
        d = self.difference
        effect, low, high = (f"{value * self.scale:+.{digits}f}" for value in (d.effect, d.low, d.high))
        means = (f"{mean * self.scale:.{digits}f}" for mean in (self.a, self.b))
        return self.name, *means, effect, f"{low} to {high}", "< 0.001" if d.p < 0.001 else f"{d.p:.3f}"

    def sentence(self) -> str:
        _, _, _, effect, interval, p = self.row()
        return f"{effect} {self.unit} (95 % {interval}), p {p if p.startswith('<') else f'= {p}'}"

    def winner(self) -> str:
        d = self.difference
        if (d.effect > 0) == self.more_is_better:
            return f"A is better: {self.sentence()}"
        swapped = replace(self, a=self.b, b=self.a, difference=_Difference(-d.effect, -d.high, -d.low, d.p))
        return f"B is better: {swapped.sentence()}"


@dataclass(frozen=True)
class Comparison:
    a: str
    b: str
    episodes: int
    seed: int
    measured: list[_Measured]
    same: bool  # equal results in every episode

    @classmethod
    def of_policies(cls, a: str, b: str, settings: list[Setting]) -> "Comparison":
        """Compare policies with greedy actions. `settings` apply to both; the config of A determines the episodes."""
        opened = [open_checkpoint(path, settings) for path in (a, b)]
        config = opened[0][1]
        _refuse_other_episodes(config, opened[1][1])
        episodes, seed = config.evaluation.episodes, config.seed
        _refuse_too_few(episodes)
        plan = f"running A, then B, on the same {episodes} held-out episodes of seed {seed} ({config.env.name})"
        print(f"{plan}; this may take minutes", file=sys.stderr)
        played: list[list[Episode]] = []
        for checkpoint, own in opened:
            device = pick_device(own.device)
            env = held_out_env(own, device, config.rollout.n_envs)
            try:
                found, _ = play(load_policy(checkpoint, device), env, episodes, seed, own.rollout.action_steps)
            finally:
                env.close()
            played.append(_in_order(found, env.num_envs))
        results = [[(e.success, e.reward, e.steps) for e in found] for found in played]
        return cls(a, b, episodes, seed, _measured(played[0], played[1], env.spec), results[0] == results[1])

    @classmethod
    def of_world_models(cls, a: str, b: str, settings: list[Setting]) -> "Comparison":
        """Compare predictions on episodes with random actions. The config of A determines the episodes."""
        config = open_checkpoint(a, settings, is_policy=False)[1]
        device = pick_device(config.device)
        models = [load_world_model(a, device), load_other_world_model(b, a, config)]
        _refuse_other_episodes(config, open_checkpoint(b, settings, is_policy=False)[1])
        plan = f"running {config.evaluation.episodes} held-out episodes of seed {config.seed} with random actions"
        print(f"{plan}, then A and B predict them; this may take minutes", file=sys.stderr)
        episodes, _ = WorldModelEvaluation.random_episodes(config, device)
        ratios = [WorldModelEvaluation.ratio_by_episode(model, episodes).numpy() for model in models]
        known = np.isfinite(ratios[0]) | np.isfinite(ratios[1])  # an episode without any change has no ratio
        ratio_a, ratio_b = (ratio[known] for ratio in ratios)
        _refuse_too_few(len(ratio_a))
        found = _Measured.mean("MSE ratio", ratio_a, ratio_b, "of the MSE ratio", more_is_better=False)
        return cls(a, b, len(ratio_a), config.seed, [found], bool((ratio_a == ratio_b).all()))

    def table(self, width: int | None = None) -> str:
        rows = [("", "A", "B", "A - B", "95 % interval", "p"), *(measured.row() for measured in self.measured)]
        return f"A  {self.a}\nB  {self.b}\n\n{text_table(rows, width=width)}"

    def verdict(self) -> str:
        if self.same:
            return f"no difference: A and B have the same results in all {self.episodes} episodes"
        first, *others = self.measured
        if first.difference.is_significant:
            return first.winner()
        verdict, advice = "no significant difference", "four times as many episodes would halve the interval"
        if first.difference.is_borderline:
            verdict, advice = "borderline", "only one of interval and p shows a difference; evaluate more episodes"
        verdict = f"{verdict} with {self.episodes} episodes: {first.sentence()}; {advice}"
        # a shaped reward may differ significantly if there are few successes
        by_reward = [other for other in others if other.name == "reward" and other.difference.is_significant]
        return f"{verdict}; by reward, {by_reward[0].winner()}" if by_reward else verdict

    def write(self, path: Path) -> Path:
        write_whole(path, json.dumps(asdict(self) | {"split": "eval", "verdict": self.verdict()}, indent=2) + "\n")
        return path


def _in_order(episodes: list[Episode], robots: int) -> list[Episode]:
    """Sort episodes, given in the order of their ends, by number: robot i ran i, i+N, i+2N, ... in this order."""
    played, numbered = Counter[int](), {}
    for episode in episodes:
        numbered[episode.env + robots * played[episode.env]] = episode
        played[episode.env] += 1
    return [numbered[number] for number in sorted(numbered)]


def _measured(a: list[Episode], b: list[Episode], spec: EnvSpec) -> list[_Measured]:
    reward_a, reward_b = (np.array([e.reward for e in episodes]) for episodes in (a, b))
    reward = _Measured.mean("reward", reward_a, reward_b, "reward")
    if not spec.reports_success:
        return [reward]
    success_a, success_b = (np.array([e.success for e in episodes]) for episodes in (a, b))
    tasks = np.array([spec.task_names[episode.task] for episode in a])
    names = list(dict.fromkeys(tasks.tolist()))
    measured = [_Measured.success(success_a, success_b), reward]
    for name in names if len(names) > 1 else ():
        measured.append(_Measured.success(success_a[tasks == name], success_b[tasks == name], f"  {name}"))
    return measured


def _refuse_too_few(episodes: int) -> None:
    if episodes < FEWEST:
        raise UserError(f"{episodes} episode(s) are too few for a significance test; give --episodes {FEWEST} or more")


def _refuse_other_episodes(a: Config, b: Config) -> None:
    if a.env.name != b.env.name:
        raise UserError(f"A was trained in '{a.env.name}', B in '{b.env.name}'; the two cannot run the same episodes")
    differing = episode_differences(a, b, MAY_DIFFER)
    if differing:
        of_a, of_b = flatten(a.dump()), flatten(b.dump())
        listed = [f"  {key}: A {value_text(of_a.get(key))}, B {value_text(of_b.get(key))}" for key in differing]
        both = f"give both the same settings, e.g. {differing[0]}={value_text(of_a.get(differing[0]))}"
        raise UserError("\n".join([f"A and B were trained on different episodes; {both}:", *listed]))
