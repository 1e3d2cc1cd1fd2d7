"""`sparring compare`: two policies, or two world models, on the same held-out episodes, and a verdict."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from sparring.api import load_policy, load_world_model
from sparring.checkpoint import checkpoint_folder
from sparring.collect.episodes import Episode
from sparring.config_text import Setting, flatten, value_text
from sparring.distributed import pick_device
from sparring.errors import UserError
from sparring.evaluate import held_out_env, play
from sparring.evaluate_run import (
    HOW_WORKED_OUT,
    config_of,
    load_other_world_model,
    refuse_other_env,
    refuse_world_model,
    unlike_episodes,
)
from sparring.measures.evaluation import foretold_episodes
from sparring.measures.paired import Difference, in_means, in_successes
from sparring.measures.table import lined_up
from sparring.measures.world_model import ratio_by_episode
from sparring.tree import Config

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
