"""What a finished run says at the end: what was reached, where things are, and what to do next."""

import re
import shlex
from itertools import count
from pathlib import Path

from sparring.config.schema import Config
from sparring.config.text import value_text
from sparring.evaluation.exploration import ExplorationEvaluation
from sparring.evaluation.play import Evaluation
from sparring.evaluation.world_model import WorldModelEvaluation
from sparring.phases.phase import Progress
from sparring.runs.checkpoint import checkpoints

AnyEvaluation = Evaluation | WorldModelEvaluation | ExplorationEvaluation


def summary(config: Config, progress: Progress, evaluation: AnyEvaluation) -> str:
    folder = config.run_folder
    counted = {"env steps": progress.env_steps, "episodes": progress.episodes, "updates": progress.updates}
    made = ", ".join(f"{count:,} {what}" for what, count in counted.items() if count)
    lines = ["", f"{config.phase} is done: {made}", *(f"  {line}" for line in _reached(evaluation))]
    lines += [f"  kept: {checkpoints(folder)[-1]}; all that was recorded is beside it", "next:"]
    commands = _next_commands(config)
    width = max(map(len, commands))
    return "\n".join([*lines, *(f"  {command:<{width}}  # {why}" for command, why in commands.items())])


def _reached(evaluation: AnyEvaluation) -> list[str]:
    """In a line, or one for each camera."""
    if isinstance(evaluation, WorldModelEvaluation):
        cameras = {name: found for name, found in evaluation.figures["cameras"].items() if found["changed_mse_ratio"]}
        lines = []
        # beside copying the last frame: both on what changes, which is little, and on all of the picture
        for camera, found in cameras.items():
            ratio, levels = found["changed_mse_ratio"], [found["psnr"][who] for who in ("prediction", "copy")]
            in_all = "" if None in levels else f"; PSNR {levels[0]:.1f} dB, copying {levels[1]:.1f} dB"
            what = f"squared error on pixels that change, {ratio:.3f} of that of copying the last frame{in_all}"
            lines.append(f"{camera}: {what}")
        return lines
    if isinstance(evaluation, ExplorationEvaluation):
        own = evaluation.found["policy"]
        noise = max(found.contact for who, found in evaluation.found.items() if who != "policy")
        return [f"in touch with an object in {own.contact:.1%} of its decisions; random actions {noise:.1%} at most"]
    whole = {who: scores.get("all", next(iter(scores.values()))) for who, scores in evaluation.scores.items()}
    policy, random = whole["policy"], whole.get("random")
    if evaluation.spec.reports_success:
        rate, beside = policy.success, f"; random actions {random.success.rate:.1%}" if random else ""
        return [f"success {rate.rate:.1%} (95 % {rate.low:.1%} to {rate.high:.1%}){beside}"]
    return [f"reward {policy.reward:.2f}" + (f"; random actions {random.reward:.2f}" if random else "")]


def _next_commands(config: Config) -> dict[str, str]:
    """The three most useful ones after this phase, and what each is for."""
    run = shlex.quote(str(config.run_folder))
    # as a setting a folder called 2024 would be a number
    told = config.run_folder.is_absolute() or config.run_folder.parent.name
    given = run if told else shlex.quote(f"./{config.run_folder}")
    report = {f"sparring report {run}": "curves, pictures and settings on one page"}
    video = {f"sparring eval {run} --videos 4": "held-out episodes, and films of some"}
    foretell = {f"sparring eval {run} --world-model": "what it foretells of held-out episodes"}
    explore = {f"sparring eval {run} --exploration": "what it touches and where it gets to"}
    match config.phase:
        case "finetune":
            return report | video | _train(config, "finetune", f"pretrained={given}", "go on from these weights")
        case "imitate":
            return _train(config, "finetune", f"pretrained={given}", "practise what it was shown") | video | report
        case "teacher":
            return _train(config, "student", f"--teacher_path {given}", "an explorer for it") | foretell | report
        case "student":
            both = f"--teacher_path {shlex.quote(str(config.student.teacher))} --student_checkpoint {given}"
            return _train(config, "adversarial", both, "let the two spar") | explore | report
        case _:  # adversarial
            return report | explore | foretell


def _train(config: Config, phase: str, given: str, why: str) -> dict[str, str]:
    """In a folder of its own, with what is not inherited: what the env may not do without, and rewards of one's own."""
    output = shlex.quote(str(_beside(config.run_folder, config.phase, phase)))
    words = ["sparring train", phase, given, "--output", output]
    tasks, rollout = getattr(config.env, "task", ()), config.rollout
    if len(tasks) > 1 and not isinstance(tasks, str):
        words += ["--envs", str(-(-rollout.n_envs // len(tasks)) * len(tasks))]  # tasks share robots evenly
    if rollout.max_episode_steps:
        words.append(f"rollout.max_episode_steps={rollout.max_episode_steps}")
    if config.phase == phase == "finetune" and config.rewards.terms:
        weights = dict(config.rewards.terms)
        if config.rewards.task_reward != 1:  # what it is beside terms
            weights["task_reward"] = config.rewards.task_reward
        words += [shlex.quote(f"rewards.{name}={value_text(weight)}") for name, weight in weights.items()]
    return {" ".join(words): why}


def _beside(folder: Path, phase: str, following: str) -> Path:
    """One that nobody has taken: of the same phase this one's name with the next number, else that of the phase."""
    folder = folder if folder.name.strip(".") else folder.resolve()  # '.' and '..' tell no name
    stem, number = f"{following}_rl", 1
    if following == phase:
        numbered = re.fullmatch(r"(.+)-(\d+)", folder.name)
        stem, number = (numbered[1], int(numbered[2]) + 1) if numbered else (folder.name, 2)
    paths = (folder.with_name(f"{stem}-{n}" if n > 1 else stem) for n in count(number))
    return next(path for path in paths if not path.exists())
