"""A world model on held-out episodes: figures, a table, a file."""

import json
from dataclasses import dataclass
from pathlib import Path

from tensordict import TensorDict

from sparring.envs.make import make_env
from sparring.measures.held_out import held_out_episodes
from sparring.measures.table import lined_up
from sparring.measures.world_model import OBJECTS, compare, measure
from sparring.policies.random import ColouredNoise, share_of
from sparring.tree import Config
from sparring.world_models.world_model import WorldModel


@dataclass
class WorldModelEvaluation:
    """What `measure` found, on so many episodes of the eval split."""

    episodes: int
    seed: int
    figures: dict

    def table(self) -> str:
        return "\n".join([*_cameras(self.figures), "", *_open_loop(self.figures), "", *_in_words(self.figures)])

    def numbers(self) -> dict[str, float | None]:
        """For evaluations.jsonl: of all that was measured, what a curve is worth."""
        numbers = {"episodes": self.episodes} | self.figures["tokens"]
        for camera, found in self.figures["cameras"].items():
            told = {"psnr": found["psnr"]["prediction"], "psnr_copy": found["psnr"]["copy"]}
            told |= {"ssim": found["ssim"]["prediction"]}
            told |= {name: found[name] for name in ("skill", "changed_mse_ratio")}
            numbers |= {f"{camera}/{name}": value for name, value in told.items()}
        return numbers

    def write(self, path: Path, about: dict | None = None) -> Path:
        content = {"episodes": self.episodes, "seed": self.seed, "split": "eval"} | (about or {}) | self.figures
        path.write_text(json.dumps(content, indent=2) + "\n")
        return path


def evaluate_world_model(
    config: Config, model: WorldModel, device, against: WorldModel | None = None
) -> WorldModelEvaluation:
    """As a run's config asks for it, in an env of its own where robots act at random, as they do for a teacher.

    `against`: another world model, e.g. one without a memory, on the same episodes.
    """
    seen, fps = foretold_episodes(config, device)
    figures = {"decision_seconds": config.rollout.action_steps / fps} | measure(model, seen)
    if against is not None:
        figures["against"] = compare(figures, measure(against, seen))
    return WorldModelEvaluation(config.evaluation.episodes, config.seed, figures)


def foretold_episodes(config: Config, device) -> tuple[TensorDict, float]:
    """Held-out episodes `[E, T]` in which robots act at random, and how many frames a second has."""
    rollout, teacher = config.rollout, config.teacher
    env = make_env(config.env, rollout.n_envs, rollout.max_episode_steps, device)
    try:
        coloured = share_of(env.num_envs, teacher.coloured, tasks=len(set(env.spec.task_names)))
        correlation = coloured * teacher.correlation
        explorer = ColouredNoise(env.spec, rollout.action_steps, correlation).to(env.device)
        seen = held_out_episodes(env, explorer, config.evaluation.episodes, config.seed, rollout.action_steps)
    finally:
        env.close()
    return seen, env.spec.control_hz


def _cameras(figures: dict) -> list[str]:
    rows = [("camera", "", "prediction", "copy last", "ceiling")]
    for camera, found in figures["cameras"].items():
        rows.append(
            (camera, "PSNR, dB", *(_number(found["psnr"][who], 2) for who in ("prediction", "copy", "ceiling")))
        )
        rows.append((camera, "SSIM", *(_number(found["ssim"][who], 3) for who in ("prediction", "copy", "ceiling"))))
        ratios = [found["changed_mse_ratio"], 1.0, found["changed_mse_ratio_ceiling"]]
        rows.append((camera, "changed pixels, MSE ratio", *(_number(ratio, 3) for ratio in ratios)))
        for name in OBJECTS:
            values = [found[f"{name}_mse"][who] for who in ("prediction", "copy")]
            words = f"{name.replace('_', ' ')} pixels, MSE"
            rows += [] if None in values else [(camera, words, *(f"{value:.5f}" for value in values), "")]
        rows.append((camera, "skill", _number(found["skill"], 2), "0", "1"))
    return lined_up(rows)


def _open_loop(figures: dict) -> list[str]:
    rows = [("decisions ahead", "camera", "PSNR, dB", "copy last", "MSE ratio")]
    for k, cameras in figures["open_loop"].items():
        for camera, found in cameras.items():
            levels = [_number(found["psnr"][who], 2) for who in ("prediction", "copy")]
            rows.append((k, camera, *levels, _number(found["mse_ratio"], 3)))
    return lined_up(rows)


def _in_words(figures: dict) -> list[str]:
    tokens, shuffled = figures["tokens"], figures["shuffled_actions"]
    shares = {words: _number(tokens[name], 3) for name, words in _TOKENS.items()}
    gaps = [f"{camera} {_signed(gap, 3)}" for camera, gap in shuffled["changed_mse_ratio_gap"].items()]
    lines = [
        f"token accuracy: {', '.join(f'{words} {share}' for words, share in shares.items())}; "
        f"cross-entropy {_number(tokens['cross_entropy'], 3)} nats per token",
        f"told another robot's action: cross-entropy {_signed(shuffled['cross_entropy_gap'], 3)}, "
        f"MSE ratio of changed pixels {', '.join(gaps)}",
    ]
    blind = figures["half_blind"]
    for camera, found in blind["cameras"].items():
        errors = [_number(found[who], 5) for who in ("prediction", "copy")]
        lines.append(
            f"without {', '.join(blind['without'])}: MSE of {found['pixels']} pixels of hidden objects, {camera} "
            f"{errors[0]} (copying the last frame {errors[1]})"
        )
    return lines + _against(figures["against"]) if "against" in figures else lines


def _against(figures: dict) -> list[str]:
    lines = []
    for camera, found in figures["cameras"].items():
        gaps = [f"{name.replace('_', ' ')} pixels {_signed(found[f'{name}_mse'], 5)}" for name in OBJECTS]
        ratio = _signed(found["changed_mse_ratio"], 3)
        blind = figures["half_blind"]["cameras"].get(camera)
        if blind:
            gaps.append(f"hidden object pixels without the other cameras {_signed(blind['hidden_object_mse'], 5)}")
        lines.append(f"how much worse the other is, {camera}: MSE ratio {ratio}; MSE of {', '.join(gaps)}")
    return lines


_TOKENS = {"accuracy": "all", "accuracy_changed": "changed", "accuracy_copy": "copying the last frame"}


def _number(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None, digits: int) -> str:
    return "n/a" if value is None else f"{value:+.{digits}f}"
