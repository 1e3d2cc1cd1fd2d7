"""The summary that a finished run prints: results, where the files are, and the next commands."""

import re
import shlex
from itertools import count
from pathlib import Path

from sparring.config.schema import Config
from sparring.config.text import value_text
from sparring.envs.configs import DatasetConfig
from sparring.evaluation.action_error import ActionError
from sparring.evaluation.exploration import ExplorationEvaluation
from sparring.evaluation.play import Evaluation
from sparring.evaluation.world_model import WorldModelEvaluation
from sparring.phases.phase import Progress
from sparring.runs.checkpoint import checkpoints

AnyEvaluation = Evaluation | WorldModelEvaluation | ExplorationEvaluation | ActionError


def summary(config: Config, progress: Progress, evaluation: AnyEvaluation) -> str:
    """The whole text that `sparring train` prints at the end."""
    folder = config.run_folder
    counted = {"env steps": progress.env_steps, "episodes": progress.episodes, "updates": progress.updates}
    made = ", ".join(f"{count:,} {what}" for what, count in counted.items() if count)
    lines = ["", f"{config.phase} is done: {made}", *(f"  {line}" for line in _reached(evaluation))]
    lines += [f"  saved: {checkpoints(folder)[-1]}; metrics, videos and logs are in {folder}", "next:"]
    commands = _next_commands(config)
    width = max(map(len, commands))
    return "\n".join([*lines, *(f"  {command:<{width}}  # {why}" for command, why in commands.items())])


def _reached(evaluation: AnyEvaluation) -> list[str]:
    """The results in one line; for a world model, one line per camera."""
    if isinstance(evaluation, WorldModelEvaluation):
        cameras = {name: found for name, found in evaluation.figures["cameras"].items() if found["changed_mse_ratio"]}
        lines = []
        # compared with copying the last frame, on the pixels that change (a few) and on the whole frame
        for camera, found in cameras.items():
            ratio, levels = found["changed_mse_ratio"], [found["psnr"][who] for who in ("prediction", "copy")]
            psnr = "" if None in levels else f"; PSNR {levels[0]:.1f} dB, copying {levels[1]:.1f} dB"
            lines.append(f"{camera}: squared error on changed pixels {ratio:.3f} (copying the last frame: 1){psnr}")
        return lines
    if isinstance(evaluation, ExplorationEvaluation):
        own = evaluation.found["policy"]
        noise = max(found.contact for who, found in evaluation.found.items() if who != "policy")
        return [f"touches an object in {own.contact:.1%} of its decisions; random actions in at most {noise:.1%}"]
    if isinstance(evaluation, ActionError):
        ratio = "unknown: its actions do not vary" if evaluation.ratio is None else f"{evaluation.ratio:.3f}"
        return [f"squared action error on held-out episodes: {ratio} (predicting the mean action: 1)"]
    whole = {who: scores.get("all", next(iter(scores.values()))) for who, scores in evaluation.scores.items()}
    policy, random = whole["policy"], whole.get("random")
    if evaluation.spec.reports_success:
        rate, baseline = policy.success, f"; random actions {random.success.rate:.1%}" if random else ""
        return [f"success {rate.rate:.1%} (95 % {rate.low:.1%} to {rate.high:.1%}){baseline}"]
    return [f"reward {policy.reward:.2f}" + (f"; random actions {random.reward:.2f}" if random else "")]


def _next_commands(config: Config) -> dict[str, str]:
    """The three most useful commands after this phase: command -> purpose."""
    run = shlex.quote(str(config.run_folder))
    # the value of a setting: without ./ the folder name 2024 would be read as a number
    has_parent = config.run_folder.is_absolute() or config.run_folder.parent.name
    given = run if has_parent else shlex.quote(f"./{config.run_folder}")
    report = {f"sparring report {run}": "curves, images and settings on one page"}
    video = {f"sparring eval {run} --videos 4": "evaluate on held-out episodes, with videos"}
    predict = {f"sparring eval {run} --world-model": "compare its predictions with held-out episodes"}
    explore = {f"sparring eval {run} --exploration": "what it touches and which states it reaches"}
    match config.phase:
        case "finetune":
            return report | video | _train(config, "finetune", f"pretrained={given}", "continue from these weights")
        case "imitate" if isinstance(config.env, DatasetConfig):
            measure = {f"sparring eval {run}": "measure the action error again, of each entry"}
            return (
                report
                | measure
                | _train(config, "finetune", f"pretrained={given} env.name=ENV", "improve it by RL in an env")
            )
        case "imitate":
            return _train(config, "finetune", f"pretrained={given}", "improve it by RL") | video | report
        case "teacher":
            return _train(config, "student", f"--teacher_path {given}", "train an explorer") | predict | report
        case "student":
            both = f"--teacher_path {shlex.quote(str(config.student.teacher))} --student_checkpoint {given}"
            return _train(config, "adversarial", both, "train both in turns") | explore | report
        case _:  # adversarial
            return report | explore | predict


def _train(config: Config, phase: str, given: str, why: str) -> dict[str, str]:
    """A training command with a new folder and the settings that are not inherited: tasks, step limit, own rewards."""
    output = shlex.quote(str(_new_folder(config.run_folder, config.phase, phase)))
    arguments = ["sparring train", phase, given, "--output", output]
    tasks, rollout = getattr(config.env, "task", ()), config.rollout
    if len(tasks) > 1 and not isinstance(tasks, str):
        arguments += ["--envs", str(-(-rollout.n_envs // len(tasks)) * len(tasks))]  # a multiple of the tasks
    if rollout.max_episode_steps:
        arguments.append(f"rollout.max_episode_steps={rollout.max_episode_steps}")
    if config.phase == phase == "finetune" and config.rewards.terms:
        weights = dict(config.rewards.terms)
        if config.rewards.task_reward != 1:  # 1 is the default with terms
            weights["task_reward"] = config.rewards.task_reward
        arguments += [shlex.quote(f"rewards.{name}={value_text(weight)}") for name, weight in weights.items()]
    return {" ".join(arguments): why}


def _new_folder(folder: Path, phase: str, following: str) -> Path:
    """A new folder next to `folder`: its name with the next number for the same phase, else `<phase>_rl`."""
    folder = folder if folder.name.strip(".") else folder.resolve()  # '.' and '..' contain no name
    stem, number = f"{following}_rl", 1
    if following == phase:
        numbered = re.fullmatch(r"(.+)-(\d+)", folder.name)
        stem, number = (numbered[1], int(numbered[2]) + 1) if numbered else (folder.name, 2)
    paths = (folder.with_name(f"{stem}-{n}" if n > 1 else stem) for n in count(number))
    return next(path for path in paths if not path.exists())
