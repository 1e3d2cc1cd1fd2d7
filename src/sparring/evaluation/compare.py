"""Compares runs on the same held-out episodes."""

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sparring.api import load_policy, load_world_model
from sparring.collect.camera import Episode
from sparring.config.schema import Config
from sparring.config.text import Setting, flatten, value_text
from sparring.errors import UserError
from sparring.evaluation.files import lined_up
from sparring.evaluation.of_run import (
    HOW_WORKED_OUT,
    config_of,
    load_other_world_model,
    refuse_other_env,
    refuse_world_model,
    unlike_episodes,
)
from sparring.evaluation.play import held_out_env, play, wilson
from sparring.evaluation.world_model import foretold_episodes, ratio_by_episode
from sparring.processes.distributed import pick_device
from sparring.runs.checkpoint import checkpoint_folder

# ---- A and B on the same episodes: by how much A is ahead, and how sure that is. All of it is about differences in
# pairs.
#
# Letters: n pairs; of these `both` succeed in both, `only_a`, `only_b`, and `neither`.


# of signs; so many at a time, for the memory's sake
FLIPS, AT_A_TIME = 10_000, 500
# below this p, a difference is said to be shown
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Difference:
    """Mean of A minus mean of B, its 95 % interval, and how often chance alone would put them at least so far apart."""

    effect: float
    low: float
    high: float
    p: float

    @property
    def is_shown(self) -> bool:
        """By the test and by the interval."""
        return self.p < SIGNIFICANT and self._apart

    @property
    def is_on_the_edge(self) -> bool:
        """One of them says so, the other does not."""
        return (self.p < SIGNIFICANT) != self._apart

    @property
    def _apart(self) -> bool:
        return self.low > 0 or self.high < 0


def in_successes(a: np.ndarray, b: np.ndarray) -> Difference:
    """Of `[n]` bool: McNemar's mid-p test, and Newcombe's interval for paired proportions (1998, method 10)."""
    both, only_a, only_b, neither = (int(x.sum()) for x in (a & b, a & ~b, b & ~a, ~a & ~b))
    effect = (only_a - only_b) / len(a)
    of_a, of_b = wilson(both + only_a, len(a)), wilson(both + only_b, len(b))
    phi = _correlation(both, only_a, only_b, neither)
    low = effect - _margin(of_a.rate - of_a.low, of_b.high - of_b.rate, phi)
    high = effect + _margin(of_a.high - of_a.rate, of_b.rate - of_b.low, phi)
    return Difference(effect, low, high, mcnemar(only_a, only_b))


def in_means(a: np.ndarray, b: np.ndarray, seed: int = 0) -> Difference:
    """Of `[n]` numbers, n > 1: Student's interval of the mean gap, and a test that flips the gaps' signs.

    Were A no better than B, each gap could as well be the other way round.
    """
    with np.errstate(invalid="ignore"):  # of what is infinite in both
        gaps = np.asarray(a, float) - np.asarray(b, float)
    if not np.isfinite(gaps).all():
        lost = f"{(~np.isfinite(gaps)).sum()} of {len(gaps)} episodes have figures that are not finite"
        raise UserError(f"{lost}, so means cannot be compared; look for what diverged: sparring eval of each")
    n, effect, rng = len(gaps), float(gaps.mean()), np.random.default_rng(seed)
    # rounding must not make a flip that changes nothing look smaller than what was seen
    seen = abs(effect) - 1e-9 * np.abs(gaps).mean()
    as_far = 0
    for _ in range(FLIPS // AT_A_TIME):
        signs = rng.integers(0, 2, (AT_A_TIME, n)) * 2.0 - 1.0
        as_far += int((np.abs(signs @ gaps / n) >= seen).sum())
    margin = student(n - 1) * float(gaps.std(ddof=1)) / math.sqrt(n)
    return Difference(effect, effect - margin, effect + margin, (1 + as_far) / (1 + FLIPS))


def student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution, by the expansion of Cornish and Fisher; exact enough from 5 on."""
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided: were one of them not better, each unlike pair would be a fair coin.

    What was seen counts half (mid-p; Fagerland, Lydersen, Laake 2013): counted whole, the test is so careful that it
    often finds nothing where the interval does.
    """
    if only_a == only_b:
        return 1.0
    unlike, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(unlike, k) for k in range(fewer + 1))
    return (2 * tail - math.comb(unlike, fewer)) / 2**unlike


def _correlation(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Between A's successes and B's, corrected towards 0 for small numbers where it is positive."""
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if not product:
        return 0.0
    gap = both * neither - only_a * only_b
    gap = gap if gap < 0 else max(0.0, gap - (both + only_a + only_b + neither) / 2)
    return gap / math.sqrt(product)


def _margin(own: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, own**2 - 2 * phi * own * other + other**2))


# ---- `sparring compare`: two policies, or two world models, on the same held-out episodes, and a verdict.


# the same episodes whatever these say: how a policy sees and acts in them, and how they are worked out
OWN_WAY = HOW_WORKED_OUT + tuple(
    f"env.{name}"
    for name in (
        *("cameras", "image_size", "depth", "points", "object_state", "pad_state", "pad_action"),
        *("control_mode", "action_scale"),
    )
)
# of fewer gaps all have one sign by chance in one of 16 cases or more: nothing could be shown
FEWEST = 6


@dataclass(frozen=True)
class Measured:
    """One figure of A and of B in the same episodes. `unit` and `scale` are for people."""

    name: str
    a: float
    b: float
    # of A over B
    difference: Difference
    unit: str
    scale: int = 1
    more_is_better: bool = True

    @classmethod
    def of_success(cls, a: np.ndarray, b: np.ndarray, name: str = "success, %") -> "Measured":
        return cls(name, a.mean(), b.mean(), in_successes(a, b), "points of success", 100)

    @classmethod
    def of_reward(cls, a: np.ndarray, b: np.ndarray) -> "Measured":
        return cls("reward", a.mean(), b.mean(), in_means(a, b), "reward")

    @classmethod
    def of_foretelling(cls, a: np.ndarray, b: np.ndarray) -> "Measured":
        """Squared error on pixels that changed; copying the last frame makes 1."""
        return cls("MSE ratio", a.mean(), b.mean(), in_means(a, b), "of the MSE ratio", more_is_better=False)

    def row(self) -> tuple[str, ...]:
        found = self.difference
        shown = f"{found.low * self.scale:+.{self._digits}f} to {found.high * self.scale:+.{self._digits}f}"
        means = (f"{mean * self.scale:.{self._digits}f}" for mean in (self.a, self.b))
        return self.name, *means, f"{found.effect * self.scale:+.{self._digits}f}", shown, _p(found.p)

    def winner(self) -> str:
        """In words."""
        a_wins = (self.difference.effect > 0) == self.more_is_better
        return f"A is better: {self.in_words()}" if a_wins else f"B is better: {self._turned().in_words()}"

    def in_words(self) -> str:
        _, _, _, effect, interval, p = self.row()
        return f"{effect} {self.unit} (95 % {interval}), p {p if p.startswith('<') else f'= {p}'}"

    @property
    def _digits(self) -> int:
        return 1 if self.scale == 100 else 3

    def _turned(self) -> "Measured":
        d = self.difference
        return replace(self, a=self.b, b=self.a, difference=Difference(-d.effect, -d.high, -d.low, d.p))


@dataclass(frozen=True)
class Comparison:
    """Of A and B, by the paths they were given as; the verdict is about the first of the figures."""

    a: str
    b: str
    episodes: int
    seed: int
    measured: list[Measured]
    # in every episode
    same: bool

    def table(self) -> str:
        rows = [("", "A", "B", "A - B", "95 % interval", "p"), *(measured.row() for measured in self.measured)]
        return "\n".join([f"A  {self.a}", f"B  {self.b}", "", *lined_up(rows)])

    def verdict(self) -> str:
        """In a sentence."""
        if self.same:
            return f"no difference: A and B did the same in all {self.episodes} episodes"
        first, *others = self.measured
        if first.difference.is_shown:
            return first.winner()
        doubt, advice = "no difference could be shown", "four times as many would halve the interval"
        if first.difference.is_on_the_edge:
            doubt, advice = "on the edge", "by only one of interval and p there is a difference, and more would tell"
        doubt = f"{doubt} with {self.episodes} episodes: {first.in_words()}; {advice}"
        # a shaped reward may tell what few successes do not
        by_reward = [other for other in others if other.name == "reward" and other.difference.is_shown]
        return f"{doubt}; by reward, {by_reward[0].winner()}" if by_reward else doubt

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(asdict(self) | {"split": "eval", "verdict": self.verdict()}, indent=2) + "\n")
        return path


def compare_policies(a: str, b: str, settings: list[Setting]) -> Comparison:
    """Acting greedily. `settings` are for both; what they do not say of the episodes, A's config does."""
    checkpoints = [checkpoint_folder(path) for path in (a, b)]
    configs = [config_of(checkpoint, settings) for checkpoint in checkpoints]
    for path, checkpoint, config in zip((a, b), checkpoints, configs, strict=True):
        refuse_world_model(path, config)
        refuse_other_env(checkpoint, config)
    _refuse_other_episodes(*configs)
    episodes, seed, robots = configs[0].evaluation.episodes, configs[0].seed, configs[0].rollout.n_envs
    _refuse_too_few(episodes)
    played = []
    for checkpoint, config in zip(checkpoints, configs, strict=True):
        device = pick_device(config.device)
        env = held_out_env(config, device, robots)
        try:
            policy = load_policy(checkpoint, device)
            found, _ = play(policy, env, episodes, seed, config.rollout.action_steps)
        finally:
            env.close()
        played.append(in_order(found, env.num_envs))
    return Comparison(a, b, episodes, seed, measured(*played, env.spec), _same(*played))


def compare_world_models(a: str, b: str, settings: list[Setting]) -> Comparison:
    """By what they foretell of episodes in which robots act at random, as A's config has it."""
    config = config_of(checkpoint_folder(a), settings)
    device = pick_device(config.device)
    models = [load_world_model(a, device), load_other_world_model(b, a, config, device)]
    refuse_other_env(checkpoint_folder(a), config)
    _refuse_other_episodes(config, config_of(checkpoint_folder(b), settings))
    seen, _ = foretold_episodes(config, device)
    ratios = [ratio_by_episode(model, seen).numpy() for model in models]
    # where nothing changed, there was nothing to foretell, for either
    told = np.isfinite(ratios[0]) | np.isfinite(ratios[1])
    _refuse_too_few(int(told.sum()))
    found = Measured.of_foretelling(*(ratio[told] for ratio in ratios))
    return Comparison(a, b, int(told.sum()), config.seed, [found], bool((ratios[0] == ratios[1])[told].all()))


def in_order(episodes: list[Episode], robots: int) -> list[Episode]:
    """By their numbers: robot i played i, i+N, i+2N, ... one after the other, and they ended in any order."""
    turns, numbered = Counter(), {}
    for episode in episodes:
        numbered[episode.env + robots * turns[episode.env]] = episode
        turns[episode.env] += 1
    return [numbered[number] for number in sorted(numbered)]


def measured(a: list[Episode], b: list[Episode], spec) -> list[Measured]:
    """Success where the env tells it, reward, and the success of each of several tasks."""
    rewards = Measured.of_reward(*(np.array([e.reward for e in episodes]) for episodes in (a, b)))
    if not spec.reports_success:
        return [rewards]
    successes = [np.array([e.success for e in episodes]) for episodes in (a, b)]
    tasks = np.array([spec.task_names[episode.task] for episode in a])
    names = list(dict.fromkeys(tasks.tolist()))
    apart = [
        Measured.of_success(*(success[tasks == name] for success in successes), f"  {name}")
        for name in (names if len(names) > 1 else ())
    ]
    return [Measured.of_success(*successes), rewards, *apart]


def _same(a: list[Episode], b: list[Episode]) -> bool:
    return all((x.success, x.reward, x.steps) == (y.success, y.reward, y.steps) for x, y in zip(a, b, strict=True))


def _refuse_too_few(episodes: int) -> None:
    if episodes < FEWEST:
        raise UserError(
            f"{episodes} episode(s) to tell from are too few to know what is chance; give {FEWEST} or more: "
            "--episodes N"
        )


def _refuse_other_episodes(a: Config, b: Config) -> None:
    if a.env.name != b.env.name:
        raise UserError(f"A was trained in '{a.env.name}', B in '{b.env.name}'; they cannot play the same episodes")
    unlike = unlike_episodes(a, b, OWN_WAY)
    if unlike:
        mine, theirs = flatten(a.dump()), flatten(b.dump())
        told = [f"  {key}: A {value_text(mine.get(key))}, B {value_text(theirs.get(key))}" for key in unlike]
        both = f"give both the same, e.g. {unlike[0]}={value_text(mine.get(unlike[0]))}"
        raise UserError("\n".join([f"A and B were trained in different episodes; {both}:", *told]))


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
