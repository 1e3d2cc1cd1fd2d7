"""Checks of an env: contract, ranges, reward, success, ends of episodes, determinism, state, speed, memory, close."""

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.check.cameras import contact_sheet_of, picture_findings
from sparring.check.findings import ERROR, NOTE, WARNING, Finding
from sparring.check.play import PICTURES, TEXTS, Facts, Player
from sparring.check.processes import Closable, close_findings, marked_processes, memory_findings
from sparring.check.spaces import gymnasium_findings
from sparring.config.schema import Config
from sparring.contract import EnvSpec
from sparring.demos.expert_env import make_expert_env
from sparring.envs.backend import EpisodeSeeds, drawn
from sparring.envs.configs import GymConfig, TabletopConfig
from sparring.envs.env import Env, make_env
from sparring.envs.gym import GymRobot
from sparring.envs.tabletop.tasks.registry import TASKS
from sparring.errors import UserError
from sparring.evaluation.play import why_no_picture
from sparring.processes.heartbeat import OwnStage, OwnStages
from sparring.record.overlay import write_png

ROBOTS = 4
# a run of random actions ends after so many episodes of every robot, decisions, or seconds
_EPISODES, _LEAST, _MOST, _SECONDS = 3, 200, 1000, 5.0
_ROUNDING = 1e-3  # a smaller difference of the state, relative to its range, comes from a solver or from rounding
_HUGE, _HUGE_REWARD, _SLOW = 1e4, 1e3, 30
_FEWEST = 20  # decisions that show whether actions change anything
_EXACT = 1 / 255  # a smaller mean difference of pictures, relative to their range, comes from the renderer
_JUMP = 3.0  # the last step of an episode changes the state this many times more than any other
_BREAKS = "correct the env at that line"


def env_findings(config: Config, sheet: Path) -> Iterator[Finding]:
    if OwnStages.now is None:
        OwnStages(1, config.rollout.watchdog_s).watch()
    opened: list[Closable] = []  # all that must be closed
    with marked_processes():
        try:
            yield from _checked(config, sheet, opened)
        except (Exception, SystemExit) as error:  # an env is third-party code: every exception is a finding
            yield Finding.of_error("contract", error, _BREAKS)
        except BaseException:
            for each in opened:
                each.close()
            raise
        yield from close_findings(opened)


def _checked(config: Config, sheet: Path, opened: list[Closable]) -> Iterator[Finding]:
    section, limit = config.env, config.rollout.max_episode_steps
    tasks = len(getattr(section, "task", ())) or 1
    env, again = (make_env(section, -(-ROBOTS // tasks) * tasks, limit) for _ in range(2))
    opened += [env.backend, again.backend]
    yield from _spec(env.spec, config)
    if isinstance(section, GymConfig):
        robot = GymRobot(section, limit)
        opened.append(robot)
        with OwnStage("simulate"):
            found = list(gymnasium_findings(robot))
        yield from found
        has_expert = robot.env.has_wrapper_attr("expert_action") and not robot.spec.discrete_actions
    else:
        has_expert = isinstance(section, TabletopConfig)
    yield from _played(env, again, config, sheet, opened, has_expert)


def _spec(spec: EnvSpec, config: Config) -> Iterator[Finding]:
    tasks = ", ".join(dict.fromkeys(task for task in spec.task_names if task))
    yield Finding("env", f"{config.env.name}: {tasks or 'no task name'}")
    for key, (shape, dtype) in spec.observation.items():
        yield Finding(f"observation/{key}", f"{list(shape)} {dtype}")
    kind = f"one of {spec.discrete_actions}" if spec.discrete_actions else "continuous in [-1, 1]"
    yield Finding("action", f"{spec.action_dim} dims, {kind}")


def _played(
    env: Env, again: Env, config: Config, sheet: Path, opened: list[Closable], has_expert: bool
) -> Iterator[Finding]:
    """Play random actions, the bounds of actions, and the random actions again in the second env."""
    chunk, seed, is_ours = config.rollout.action_steps, config.seed, isinstance(config.env, GymConfig | TabletopConfig)
    player, other = Player(env, chunk), Player(again, chunk)
    digests, facts = [player.digests(player.reset(seed))], Facts(player.td, env.spec)
    deadline = time.monotonic() + _SECONDS
    limit = max(_MOST, env.spec.max_episode_steps // chunk + 1)
    for action in islice(player.random_actions(), limit):
        before = player.td
        digests.append(player.digests(player.step(action)))
        facts.add(before, player)
        enough = facts.decisions >= _LEAST and len(facts.ended) >= _EPISODES * env.num_envs
        # a Backend must end episodes of some of its robots, to show the rows of Step.final
        enough &= is_ours or facts.ended_apart
        # without a time limit, only many steps show that no episode ends
        patience = 0.0 if facts.ended or env.spec.max_episode_steps else 3 * _SECONDS
        if enough or time.monotonic() > deadline + patience:
            break
    late = facts.decisions < limit and not enough
    yield Finding(
        "contract", f"reset and step return valid values in {facts.decisions} decisions of {env.num_envs} robots"
    )
    yield from _episodes(facts, env, is_ours, late)
    yield from _ranges(facts)
    yield from _reward(facts)
    yield from _success(facts, env, config, opened, has_expert)
    yield from _last_observation(facts)
    # the second env has a history when it replays: what step() changes, reset() must restore
    starts = other.digests(other.reset(seed + 1))
    yield from _bounds(other, digests, seed, clips=is_ours)
    differs, noise, _ = _replay(other, digests, seed, facts)
    if noise and not differs:
        fix = "draw without what differs from run to run (dithering, multisampling); right if it cannot be avoided"
        found = f"rendering is not exact: the same seed and actions give another {noise}, which hardly differs"
        yield Finding("determinism", found, WARNING, fix)
    else:
        yield from _determinism(differs, digests[0] != starts or any(facts.varied_starts.values()), facts)
    drawn_differs, _, frames = _replay(other, digests, seed, facts, records=True)
    if drawn_differs and not differs:
        fix = "have render() change nothing that step() reads; until then, runs with videos differ from those without"
        yield Finding("render", f"drawing frames changes {drawn_differs[0]}", WARNING, fix)
    yield from _state(player, other, exact=not noise)
    yield from picture_findings(facts)
    yield from memory_findings(player, config)
    yield _speed(player)
    picture = contact_sheet_of(facts, frames)
    if picture is None:
        yield Finding("contact sheet", f"none: {why_no_picture(again)}")
    else:
        yield Finding("contact sheet", f"{write_png(sheet, picture)}; look whether cameras show the scene upright")


def _episodes(facts: Facts, env: Env, is_ours: bool, late: bool) -> Iterator[Finding]:
    ended, robots, limit = facts.ended, env.num_envs, env.spec.max_episode_steps
    found = f"{len(ended)} ended in {facts.decisions} decisions of {robots} robots"
    if not ended:
        fix = "have it return terminated or truncated, or set rollout.max_episode_steps"
        # a limit ends every episode, but the check of a slow env may stop before
        slow = f"; the check stops after {_SECONDS:g} s" if late else ""
        fix = "for a complete check, set a smaller rollout.max_episode_steps" if late and limit else fix
        yield Finding("episodes end", f"{found}{slow}", NOTE if late else ERROR, fix)
        return
    steps = [episode.steps for episode in ended]
    length = f"{min(steps)} to {max(steps)}" if min(steps) < max(steps) else f"{steps[0]}"
    terminated = sum(episode.terminated for episode in ended)
    same = len(ended) >= 4 and min(steps) == max(steps) > 1
    early = [episode for episode in ended if not episode.terminated and episode.steps != limit]
    if same and terminated == len(ended):
        fix = "return a time limit as truncated: the value of a terminated state counts as 0"
        yield Finding("episodes end", f"all {len(ended)} are terminated after {length} steps", WARNING, fix)
    elif len({episode.steps for episode in early}) > 1:
        shown = f"{len(early)} are truncated after {min(e.steps for e in early)} to {max(e.steps for e in early)} steps"
        fix = "return terminated if the task ends, by success or failure; truncated is for time limits"
        yield Finding("episodes end", f"{shown}, not at the time limit of {limit or 'no'} steps", WARNING, fix)
    else:
        truncated = len(ended) - terminated
        yield Finding("episodes end", f"{found}, after {length} steps: {terminated} terminated, {truncated} truncated")
    if not (is_ours or facts.ended_apart):
        found = "all robots ended together, so a Step.final with a row for each of the N robots would not show"
        yield Finding("Step.final", found, NOTE, "check that it has a row for each robot in Step.ended only")


def _ranges(facts: Facts) -> Iterator[Finding]:
    fine = True
    for name, low in facts.low.items():
        high = facts.high[name]
        largest = float(torch.maximum(low.abs(), high.abs()).max()) if low.is_floating_point() else 0.0
        if name not in TEXTS and torch.equal(low, high) and name.partition("/")[0] not in PICTURES:
            fine = False
            fix = "return the observation of the current state, or leave it out"
            yield Finding("observations", f"observation/{name} never changes", WARNING, fix)
        elif largest > _HUGE and name.partition("/")[0] not in PICTURES:
            fine = False
            entry = int(torch.maximum(low.abs(), high.abs()).argmax())
            fix = "scale it in the env; policy.normalize_observations=true does so for the state only"
            yield Finding("observations", f"entry {entry} of observation/{name} reaches {largest:,.3g}", WARNING, fix)
    if fine and "state" in facts.low:
        least, most = float(facts.low["state"].min()), float(facts.high["state"].max())
        yield Finding("observations", f"finite; entries of the state are {least:.3g} to {most:.3g}")


def _reward(facts: Facts) -> Iterator[Finding]:
    low, high = (number + 0.0 for number in facts.reward)  # -0 -> 0
    returns = [episode.reward for episode in facts.ended]
    sums = f", {min(returns):.4g} to {max(returns):.4g} an episode" if returns else ""
    if low == high and len({round(value, 6) for value in returns}) <= 1:
        fix = "correct the reward; if only a success changes it, learn from demonstrations or add a dense reward"
        yield Finding("reward", f"always {low:g}, so there is nothing to learn from random actions", WARNING, fix)
    elif max(-low, high) > _HUGE_REWARD:
        fix = f"divide it by about {max(-low, high):.0e}: rewards of about 1 suit the critic's learning rate"
        yield Finding("reward", f"{low:.4g} to {high:.4g} a step{sums}", WARNING, fix)
    else:
        yield Finding("reward", f"{low:.4g} to {high:.4g} a step{sums}")


def _success(facts: Facts, env: Env, config: Config, opened: list[Closable], has_expert: bool) -> Iterator[Finding]:
    if not env.spec.reports_success:
        fix = 'return info["success"], or set env.success_return; not needed if a task has no success'
        yield Finding("success", "the env reports none, so evaluations show only rewards", NOTE, fix)
        return
    expert = None
    if has_expert:
        with OwnStage("simulate", 0, _SECONDS + config.rollout.watchdog_s):
            expert = _expert_successes(config, opened)
    random = sum(episode.success for episode in facts.ended)
    found = f"in {random} of {len(facts.ended)} episodes with random actions" if facts.ended else "no episode ended"
    # a failure takes until the time limit
    could_fail = 0 < env.spec.max_episode_steps <= facts.decisions * config.rollout.action_steps
    if random == len(facts.ended) >= 4 and (facts.succeeds_at_once or could_fail):
        fix = "make success false at the start, and true only when the task is solved"
        yield Finding("success", f"{found}: every episode is a success", WARNING, fix)
    elif expert is not None and not expert[0]:
        fix = "compare the condition of success with what the expert reaches"
        yield Finding("success", f"{found}, and in none of {expert[1]} with the expert", WARNING, fix)
    elif expert is None and not random and facts.ended:
        fix = "check by hand that it becomes true; with a method expert_action() in the env, this check does so"
        yield Finding("success", f"{found}, which may be right", NOTE, fix)
    else:
        yield Finding("success", found + (f", in {expert[0]} of {expert[1]} with the expert" if expert else ""))


def _expert_successes(config: Config, opened: list[Closable]) -> tuple[int, int] | None:
    """Successes and episodes of the scripted expert, one for each robot; None: there is no expert."""
    section, robots = config.env, ROBOTS
    if isinstance(section, TabletopConfig):
        if any(TASKS[name].expert is None for name in section.task):
            return None
        section, robots = (
            section.model_copy(update={"cameras": (), "depth": False, "segmentation": False, "points": 0}),
            max(ROBOTS, len(section.task)),
        )
        robots -= robots % len(section.task)
    try:
        env = make_expert_env(section, robots, config.rollout.max_episode_steps, 0.0, 0)
    except UserError:
        return None
    opened.append(env)
    deadline, successes = time.monotonic() + _SECONDS, dict[int, bool]()
    env.reset(EpisodeSeeds(config.seed, total_envs=robots))
    while len(successes) < robots and time.monotonic() < deadline:
        step = env.step(env.expert())
        successes |= {int(robot): bool(step.success[robot]) for robot in step.ended if robot not in successes}
    return (sum(successes.values()), len(successes)) if successes else None


def _last_observation(facts: Facts) -> Iterator[Finding]:
    ends = len(facts.ended)
    for name, low in facts.low.items():
        if name in TEXTS or ends < 4 or torch.equal(low, facts.high[name]):
            continue
        changes = facts.changed[name] > 0.9 * facts.inner
        symptoms = {
            "that of the next episode": facts.varied_starts[name] and facts.of_next[name] == ends,
            "the one before the last step": facts.of_before[name] == ends,
            # a terminated state may be zero, e.g. the offset to the goal
            "all zeros": facts.zero[name] == ends and not all(episode.terminated for episode in facts.ended),
        }
        if shown := [symptom for symptom, shows in symptoms.items() if shows and changes]:
            fix = "read the last observation after the last step and before the reset (Backend: Step.final)"
            lost = f"the last observation/{name} of all {ends} episodes is {shown[0]}"
            yield Finding("last observation", lost, ERROR, fix)
            return
    if facts.states and ends >= 4:
        before, after, ended = (torch.cat(parts) for parts in zip(*facts.states, strict=True))
        spread = (facts.high["state"] - facts.low["state"]).flatten().clamp_min(1e-6)
        jump = ((after - before) / spread).norm(dim=1)
        inner, last = jump[~ended], jump[ended]
        if len(inner) >= 20 and float(last.min()) > _JUMP * float(inner.max()):
            found = (
                f"the last step of every episode changes the state {float(last.min() / inner.max()):.1f} times as much"
            )
            fix = "if step() resets the env itself, have it return the observation before that reset"
            yield Finding("last observation", f"{found} as any other, like a reset", WARNING, fix)
            return
    if ends:
        yield Finding("last observation", f"{ends} episodes end with their own")


def _bounds(player: Player, digests: list[dict[str, bytes]], seed: int, clips: bool) -> Iterator[Finding]:
    """Play actions at their bounds from the same start as the random ones."""
    env = player.env
    try:
        player.reset(seed)
        deadline, found = time.monotonic() + _SECONDS / 4, []
        for action in islice(player.bound_actions(), min(50, len(digests) - 1)):
            found.append(player.digests(player.step(action)))
            if time.monotonic() > deadline:
                break
        same = found == digests[1 : len(found) + 1]
        if not clips and not env.spec.discrete_actions:
            shape, outside = (env.num_envs, player.chunk, env.spec.action_dim), []
            for size in (1.0, 3.0):
                player.reset(seed)
                outside.append(_without_pictures(player.digests(player.step(np.full(shape, size, np.float32)))))
            if outside[0] != outside[1]:
                fix = "clip actions to [-1, 1] in step(): a policy samples from a normal distribution"
                yield Finding("bounds of actions", "an action of 3 acts differently from one of 1", ERROR, fix)
    except (Exception, SystemExit) as error:  # as above
        yield Finding.of_error("bounds of actions", error, "accept all actions from -1 to 1")
        return
    if same and len(found) >= _FEWEST:
        fix = "apply the action in step()"
        yield Finding("bounds of actions", "actions change neither observations nor rewards", WARNING, fix)


def _replay(
    player: Player, digests: list[dict[str, bytes]], seed: int, facts: Facts, records: bool = False
) -> tuple[tuple[str, float] | None, str, list[np.ndarray]]:
    """Returns the first thing that differs from `digests`, if any, with the difference of the state relative to its
    range (inf: unknown); pictures that differ as little as a renderer may, while nothing else does; and frames.
    `records`: only the first robot's first episode, with its frames."""
    env, frames, actions = player.env, list[np.ndarray](), player.random_actions()
    env.backend.record([0] if records else [])  # as in training and evaluations, to detect errors of render()
    deadline, differs, noise = time.monotonic() + 1.5 * _SECONDS, None, ""
    for number, expected in enumerate(digests):
        found = player.digests(player.step(next(actions)) if number else player.reset(seed))
        different = [name for name in expected if found[name] != expected[name]]
        where = f"{different[0].removeprefix('next/') if different else ''} "
        where += f"in decision {number}" if number else "after reset"
        of_pictures = different and not _without_pictures(dict.fromkeys(different))
        if of_pictures and facts.pictures_differ(number, player.td) < _EXACT:
            noise = noise or where
        elif different:
            differs = where, facts.state_differs(number, player.td) if number else np.inf
            break
        if number and records:
            assert env.last is not None
            frames += map(drawn, env.last.frames.get(0, []))
            if 0 in env.last.ended or len(frames) >= 300:
                break
        if time.monotonic() > deadline:
            break
    env.backend.record([])
    return differs, noise, frames


def _without_pictures(named: dict[str, Any]) -> dict[str, Any]:
    """Entries of a transition, by name, that no renderer draws."""
    kinds = {name: name.removeprefix("next/").removeprefix("observation/").partition("/")[0] for name in named}
    return {name: value for name, value in named.items() if kinds[name] not in PICTURES}


def _determinism(differs: tuple[str, float] | None, varied: bool, facts: Facts) -> Iterator[Finding]:
    if differs is not None and 0 < differs[1] < _ROUNDING:
        fix = "restore everything in reset(), also what a simulator keeps, e.g. MuJoCo's warm start (mj_resetData)"
        found = f"after other episodes, the same seed and actions give {differs[0]} that differs by {differs[1]:.1g}"
        yield Finding("determinism", f"{found} of its range", WARNING, fix)
    elif differs is not None:
        fix = "draw all randomness from the seed given to reset() (self.np_random), and restore everything in reset()"
        yield Finding("determinism", f"the same seed and actions gave another {differs[0]}", ERROR, fix)
    elif not varied:
        starts = facts.spec.max_episode_steps and len(facts.ended)
        fix = "draw the start from the seed that reset() is given; right only if the task has a single start"
        found = f"all episodes{f' ({starts})' if starts else ''} start alike, with other seeds too"
        yield Finding("determinism", found, WARNING, fix)
    else:
        yield Finding("determinism", "the same seed and actions give the same trajectories, other seeds other starts")


def _state(player: Player, other: Player, exact: bool) -> Iterator[Finding]:
    """Save the state in the middle of an episode, continue, and continue from it in the other env. `exact`: compare
    pictures too."""
    saved = player.env.state()
    if saved is None:
        yield Finding("saved state", "none; a resume starts new episodes")
        return
    actions = list(islice(player.random_actions(), 60))
    deadline, expected = time.monotonic() + _SECONDS / 4, []
    for action in actions:
        expected.append(player.digests(player.step(action)))
        if time.monotonic() > deadline:
            break
    fix = "save everything that step() reads and changes, as copies, also the random generator; or offer no state"
    try:
        other.env.set_state(saved)
        other.td = player.td  # the observation before is not part of the state
        for number, (action, digests) in enumerate(zip(actions, expected, strict=False), 1):
            found = other.digests(other.step(action))
            compared = digests if exact else _without_pictures(digests)
            if wrong := [name for name in compared if digests[name] != found[name]]:
                shown = f"after set_state, {wrong[0].removeprefix('next/')} differs in decision {number}"
                yield Finding("saved state", shown, ERROR, fix)
                return
    except (Exception, SystemExit) as error:  # as above
        yield Finding.of_error("saved state", error, fix)
        return
    yield Finding("saved state", "can be restored; runs resume exactly")


def _speed(player: Player) -> Finding:
    rate = player.env_steps / max(player.step_s, 1e-9)
    found = (
        f"{rate:,.0f} env steps/s with {player.env.num_envs} robots, a reset of all in {1000 * player.reset_s:.3g} ms"
    )
    if rate >= _SLOW:
        return Finding("speed", found)
    fix = "use worker processes (env.vectorize=process), smaller images, or fewer simulator steps per env step"
    return Finding("speed", f"{found}: 100,000 steps take {1e5 / rate / 3600:.1f} hours", NOTE, fix)
