"""World-model evaluation on held-out episodes."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict

from sparring.config.schema import Config
from sparring.envs.env import make_env
from sparring.evaluation.files import lined_up
from sparring.evaluation.images import Covered, Seen, changed, objects, psnr, squared_error, ssim
from sparring.evaluation.play import Tally, held_out_episodes
from sparring.policies.random import ColouredNoise, share_of
from sparring.world_models.world_model import WorldModel

# ---- How well a world model predicts episodes that it was not trained on, beside copying the last frame.
#
# Figures of pictures are per camera. `prediction` is the world model, one decision ahead with the memory it has by
# then;
# `copy` the last frame shown again; `ceiling` the true next frame through the tokenizer, the best it could predict.


# decisions ahead, in open loop
HORIZONS = (1, 5, 10, 20)
# decisions that an open loop looks on before it closes its eyes, so that there is something to remember
LOOKS_ON = 5
# episodes at a time
ROWS = 32
# pixels of the next frame: of any object; of one that this camera saw at that very place, and that the robot stands in
# front of now; of one that no camera shows now, but one did before; of one that this camera does not show now, but did
OBJECTS = ("object", "covered_object", "hidden_object", "returning_object")
TOKENS = ("accuracy", "accuracy_changed", "accuracy_copy")


@torch.no_grad()
def measure(model: WorldModel, episodes: TensorDict) -> dict:
    """Figures of `episodes [E, T]` (with `mask`), nested, for JSON; None where there was nothing to measure."""
    model.eval()
    tally = Tally()
    for rows in episodes.split(ROWS):
        rows = rows.to(next(model.parameters()).device)
        _one_ahead(model, rows, tally)
        _open_loop(model, rows, tally)
        _half_blind(model, rows, tally)
    return {
        "transitions": int(episodes["mask"].sum()),
        "tokens": {name: tally.mean(name) for name in (*TOKENS, "cross_entropy")},
        "cameras": {camera: _camera_figures(tally, camera) for camera in model.cameras},
        "open_loop": {str(k): {c: _open_figures(tally, c, k) for c in model.cameras} for k in HORIZONS},
        "shuffled_actions": _shuffled_figures(tally, model.cameras),
        "half_blind": _half_blind_figures(tally, model),
    }


def compare(model: dict, other: dict) -> dict:
    """`measure` of a world model and of another on the same episodes: by how much the other is worse."""

    def gap(*path: str) -> float | None:
        mine, theirs = (_looked_up(figures, path) for figures in (model, other))
        return None if mine is None or theirs is None else theirs - mine

    cameras = {
        camera: {"changed_mse_ratio": gap("cameras", camera, "changed_mse_ratio")}
        | {f"{kind}_mse": gap("cameras", camera, f"{kind}_mse", "prediction") for kind in OBJECTS}
        for camera in model["cameras"]
    }
    blind = {camera: gap("half_blind", "cameras", camera, "prediction") for camera in model["half_blind"]["cameras"]}
    half_blind = {"cameras": {camera: {"hidden_object_mse": worse} for camera, worse in blind.items()}}
    return {"cross_entropy": gap("tokens", "cross_entropy"), "cameras": cameras, "half_blind": half_blind}


@torch.no_grad()
def ratio_by_episode(model: WorldModel, episodes: TensorDict) -> torch.Tensor:
    """`[E]`: `changed_mse_ratio` of each, over all cameras; nan where nothing changed."""
    model.eval()
    # [prediction | copy, E]
    sums = torch.zeros(2, len(episodes), dtype=torch.float64)
    for rows, own in zip(episodes.split(ROWS), sums.split(ROWS, 1), strict=True):
        rows = rows.to(next(model.parameters()).device)
        memory = model.empty_memory(len(rows))
        for t in range(rows.shape[1]):
            here = rows["mask"][:, t]
            td = rows[:, t][here].set(("memory", "world_model"), memory[here])
            predicted = model.predict(td)
            memory[here] = predicted["memory"]
            for camera, picture in predicted["image"].items():
                before, after = td["observation", "image", camera], td["next", "observation", "image", camera]
                moved = changed(before, after)
                for who, guess in enumerate((picture, before)):
                    own[who, here.cpu()] += (squared_error(guess, after) * moved).flatten(1).sum(1).cpu()
    return sums[0] / sums[1]


def _tokens(model: WorldModel, td: TensorDict, tally: Tally) -> None:
    told = model.correct_tokens(td)
    right, copied = told["right"].float(), told["copied"]
    tally.add("accuracy", right)
    tally.add("accuracy_changed", right, ~copied)
    tally.add("accuracy_copy", copied.float())


def _one_ahead(model: WorldModel, rows: TensorDict, tally: Tally) -> None:
    memory, shown = model.empty_memory(len(rows)), rows.get(("observation", "segmentation"), None)
    seen = None if shown is None else _Sight(shown)
    for t in range(rows.shape[1]):
        here = rows["mask"][:, t]
        td = rows[:, t][here].set(("memory", "world_model"), memory[here])
        scored, predicted = model.score(td), model.predict(td)
        memory[here] = scored["memory"]
        tally.add("cross_entropy", scored["error"])
        _tokens(model, td, tally)
        _compare_pictures(td, predicted, model.reconstruct(td), tally)
        if seen is not None:
            _compare_objects(td, predicted, seen, here, tally)
        if here.sum() > 1:
            # what another robot did at that time, with the memory of what truly happened
            other = td.clone(False).set("action", td["action"].roll(1, 0))
            tally.add("shuffled/cross_entropy", model.score(other)["error"])
            _compare_shuffled(td, model.predict(other), tally)


def _compare_pictures(td: TensorDict, predicted: TensorDict, ceiling: TensorDict, tally: Tally) -> None:
    for camera, picture in predicted["image"].items():
        before, after = td["observation", "image", camera], td["next", "observation", "image", camera]
        moved = changed(before, after)
        tally.add(f"{camera}/changed", moved.float())
        shown = {"prediction": picture, "copy": before, "ceiling": ceiling["image", camera]}
        for who, guess in shown.items():
            error = squared_error(guess, after)
            tally.add(f"{camera}/{who}/mse", error)
            tally.add(f"{camera}/{who}/changed_mse", error, moved)
            tally.add(f"{camera}/{who}/ssim", ssim(guess, after))


class _Sight:
    """What has been seen so far: by any camera, by each for itself, and where."""

    def __init__(self, shown: TensorDict):
        # of each camera [E, T, 1, H, W]
        shapes, device = {camera: numbers.shape for camera, numbers in shown.items()}, shown.device
        self.by_any = Seen(len(shown), device)
        self.by_each = {camera: Seen(len(shown), device) for camera in shapes}
        self.places = {camera: Covered(len(shown), *shape[-2:], device) for camera, shape in shapes.items()}

    def masks(self, now: TensorDict, after: TensorDict, here: torch.Tensor) -> dict[str, dict[str, torch.Tensor]]:
        """Kind of pixels -> camera -> `[n, H, W]` bool of the next frame."""
        return {
            "object": {c: objects(after[c]) for c in self.by_each},
            "covered_object": {c: places.pixels(now[c], after[c], here) for c, places in self.places.items()},
            "hidden_object": self.by_any.hidden(dict(now.items()), dict(after.items()), here),
            "returning_object": {c: s.hidden({c: now[c]}, {c: after[c]}, here)[c] for c, s in self.by_each.items()},
        }


def _compare_objects(td: TensorDict, predicted: TensorDict, seen: _Sight, here: torch.Tensor, tally: Tally) -> None:
    """Where the env tells what each pixel belongs to."""
    masks = seen.masks(td["observation", "segmentation"], td["next", "observation", "segmentation"], here)
    for camera, picture in predicted["image"].items():
        truth = td["next", "observation", "image", camera]
        for who, guess in (("prediction", picture), ("copy", td["observation", "image", camera])):
            error = squared_error(guess, truth)
            for kind in OBJECTS:
                tally.add(f"{camera}/{who}/{kind}_mse", error, masks[kind][camera])


def _compare_shuffled(td: TensorDict, predicted: TensorDict, tally: Tally) -> None:
    for camera, picture in predicted["image"].items():
        before, after = td["observation", "image", camera], td["next", "observation", "image", camera]
        error = squared_error(picture, after)
        tally.add(f"{camera}/shuffled/changed_mse", error, changed(before, after))


def _open_loop(model: WorldModel, rows: TensorDict, tally: Tally) -> None:
    """The world model is told the actions, and sees only what it predicted itself."""
    if rows.shape[1] <= LOOKS_ON:
        return
    rows = rows[rows["mask"][:, LOOKS_ON]]
    if not len(rows):
        return
    memory = model.empty_memory(len(rows))
    for t in range(LOOKS_ON):
        memory = model.observe(rows[:, t].set(("memory", "world_model"), memory))
    start = rows[:, LOOKS_ON]["observation"]
    observation = start.clone(False)
    for k in range(1, min(max(HORIZONS), rows.shape[1] - LOOKS_ON) + 1):
        step = rows[:, LOOKS_ON + k - 1]
        td = {"observation": observation, "action": step["action"], "memory": {"world_model": memory}}
        predicted = model.predict(TensorDict(td, [len(rows)]))
        memory = predicted["memory"]
        observation = _imagined(observation, predicted)
        if k in HORIZONS:
            for camera, picture in predicted["image"].items():
                after = step["next", "observation", "image", camera]
                for who, shown in (("prediction", picture), ("copy", start["image", camera])):
                    tally.add(f"{camera}/{who}/open_{k}", squared_error(shown, after), step["mask"])


def _half_blind(model: WorldModel, rows: TensorDict, tally: Tally) -> None:
    """With an explorer's cameras alone: pixels of objects that none of them shows now, but one did before.

    There are many of these, since an arm's own camera sees little at a time; where they are, only a memory can know.
    """
    left = tuple(camera for camera in model.cameras if camera not in model.dispensable)
    if not model.dispensable or not left or ("observation", "segmentation") not in rows.keys(True):
        return
    memory, seen = model.empty_memory(len(rows)), Seen(len(rows), rows["mask"].device)
    for t in range(rows.shape[1]):
        here = rows["mask"][:, t]
        td = rows[:, t][here].set(("memory", "world_model"), memory[here])
        predicted = model.predict(td, without=model.dispensable)
        memory[here] = predicted["memory"]
        now, after = td["observation"], td["next", "observation"]
        hidden = seen.hidden(*({c: one["segmentation", c] for c in left} for one in (now, after)), here)
        for camera in left:
            for who, guess in (("prediction", predicted), ("copy", now)):
                error = squared_error(guess["image", camera], after["image", camera])
                tally.add(f"{camera}/{who}/half_blind", error, hidden[camera])


def _imagined(observation: TensorDict, predicted: TensorDict) -> TensorDict:
    return observation.clone(False).update(predicted.select("image", "state", strict=False))


def _camera_figures(tally: Tally, camera: str) -> dict:
    prefix = f"{camera}/prediction"
    levels = {who: _psnr(tally, f"{camera}/{who}/mse") for who in ("prediction", "copy", "ceiling")}
    return {
        "changed_share": tally.mean(f"{camera}/changed"),
        "changed_mse_ratio": tally.ratio(f"{prefix}/changed_mse", f"{camera}/copy/changed_mse"),
        "changed_mse_ratio_ceiling": tally.ratio(f"{camera}/ceiling/changed_mse", f"{camera}/copy/changed_mse"),
        "psnr": levels,
        "ssim": {who: tally.mean(f"{camera}/{who}/ssim") for who in levels},
        "skill": skill(**levels),
    } | {f"{kind}_mse": _object_figures(tally, camera, f"{kind}_mse") for kind in OBJECTS}


def _object_figures(tally: Tally, camera: str, name: str) -> dict:
    means = {who: tally.mean(f"{camera}/{who}/{name}") for who in ("prediction", "copy")}
    return means | {"pixels": tally.counts[f"{camera}/prediction/{name}"]}


def _half_blind_figures(tally: Tally, model: WorldModel) -> dict:
    left = [camera for camera in model.cameras if camera not in model.dispensable]
    cameras = {camera: _object_figures(tally, camera, "half_blind") for camera in left} if model.dispensable else {}
    return {"without": list(model.dispensable), "cameras": cameras}


def skill(prediction: float | None, copy: float | None, ceiling: float | None) -> float | None:
    """How much of the way from copying to the ceiling (PSNR); None where the ceiling lies below copying."""
    if None in (prediction, copy, ceiling) or ceiling <= copy:
        return None
    return (prediction - copy) / (ceiling - copy)


def _open_figures(tally: Tally, camera: str, k: int) -> dict:
    names = {who: f"{camera}/{who}/open_{k}" for who in ("prediction", "copy")}
    levels = {who: _psnr(tally, name) for who, name in names.items()}
    return {"psnr": levels, "mse_ratio": tally.ratio(names["prediction"], names["copy"])}


def _shuffled_figures(tally: Tally, cameras: tuple[str, ...]) -> dict:
    """By how much a prediction is worse when the world model is told another robot's action."""
    shuffled, true = tally.mean("shuffled/cross_entropy"), tally.mean("cross_entropy")
    figures: dict = {"cross_entropy_gap": None if shuffled is None else shuffled - true, "changed_mse_ratio_gap": {}}
    for camera in cameras:
        below = f"{camera}/copy/changed_mse"
        ratios = [tally.ratio(f"{camera}/{who}/changed_mse", below) for who in ("shuffled", "prediction")]
        figures["changed_mse_ratio_gap"][camera] = None if None in ratios else ratios[0] - ratios[1]
    return figures


def _psnr(tally: Tally, name: str) -> float | None:
    mse = tally.mean(name)
    # JSON has no infinity: where nothing moves at all, there is nothing to tell
    return psnr(mse) if mse else None


def _looked_up(figures: dict, path: tuple[str, ...]) -> float | None:
    for key in path:
        figures = figures[key]
    return figures


# ---- A world model on held-out episodes: figures, a table, a file.


@dataclass
class WorldModelEvaluation:
    """What `measure` found, on so many episodes of the eval split."""

    episodes: int
    seed: int
    figures: dict

    def table(self) -> str:
        return "\n".join([*_cameras(self.figures), "", *_open_loop_figures(self.figures), "", *_in_words(self.figures)])

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


def _open_loop_figures(figures: dict) -> list[str]:
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
