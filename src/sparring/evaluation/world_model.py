"""World-model evaluation on held-out episodes: one decision ahead, open loop, shuffled actions, an explorer's cameras.

`prediction`: by the model; `copy`: the last frame; `ceiling`: the true next frame, reconstructed by the tokenizer."""

import math
import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce

import torch
from tensordict import TensorDict

from sparring.config.schema import Config
from sparring.envs.env import make_env
from sparring.evaluation.files import EvaluationResult, text_table
from sparring.evaluation.images import ObjectMasks, changed, ssim
from sparring.evaluation.play import Device, held_out_episodes
from sparring.policies.random import ColouredNoise
from sparring.world_models.world_model import WorldModel

HORIZONS = (1, 5, 10, 20)  # decisions ahead in open loop
OBSERVED = 5  # decisions that the model observes before the open loop, which fill its memory
ROWS = 32  # episodes per batch
# kinds of pixels of the next frame, see ObjectMasks
OBJECTS = ("object", "covered_object", "hidden_object", "returning_object")
_TOKENS = {"accuracy": "all", "accuracy_changed": "changed", "accuracy_copy": "copying the last frame"}
_PAIR = ("prediction", "copy")


def _squared_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[N, H, W]`: squared error of each pixel, the mean over colours."""
    return ((a.float() - b.float()) / 255).square().mean(1)


class _Tally:
    """Sums and counts of named measures."""

    def __init__(self):
        self.sums: dict[str, float] = defaultdict(float)
        self.counts: dict[str, int] = defaultdict(int)

    def add(self, name: str, values: torch.Tensor, where: torch.Tensor | None = None) -> None:
        values = values if where is None else values[where]
        self.sums[name] += float(values.double().sum())
        self.counts[name] += values.numel()

    def mean(self, name: str) -> float | None:
        return self.sums[name] / self.counts[name] if self.counts[name] else None

    def ratio(self, camera: str, name: str, who: str = "prediction") -> float | None:
        """The mean relative to that of copying; None if either is missing, or that of copying is 0."""
        mean, copy = self.mean(f"{camera}/{who}/{name}"), self.mean(f"{camera}/copy/{name}")
        return mean / copy if copy and mean is not None else None

    def psnr(self, name: str) -> float | None:
        """PSNR in dB of the mean squared error over all images; None if that is 0, because JSON has no infinity."""
        mse = self.mean(name)
        return -10 * math.log10(mse) if mse else None

    def pixels(self, camera: str, name: str) -> dict:
        means = {who: self.mean(f"{camera}/{who}/{name}") for who in _PAIR}
        return means | {"pixels": self.counts[f"{camera}/prediction/{name}"]}


@torch.no_grad()
def _measure(model: WorldModel, episodes: TensorDict) -> dict:
    """Measure `episodes [E, T]` (with `mask`). Returns a nested dict for JSON, with None for missing values."""
    model.eval()
    tally = _Tally()
    for rows in episodes.split(ROWS):
        rows = rows.to(next(model.parameters()).device)
        _one_ahead(model, rows, tally)
        _open_loop(model, rows, tally)
        _half_blind(model, rows, tally)
    open_loop = {}
    for k in HORIZONS:
        psnr = {c: {who: tally.psnr(f"{c}/{who}/open_{k}") for who in _PAIR} for c in model.cameras}
        open_loop[str(k)] = {c: {"psnr": psnr[c], "mse_ratio": tally.ratio(c, f"open_{k}")} for c in model.cameras}
    ratios = {c: [tally.ratio(c, "changed_mse", who) for who in ("shuffled", "prediction")] for c in model.cameras}
    figures: dict = {"transitions": int(episodes["mask"].sum())}
    figures["tokens"] = {name: tally.mean(name) for name in (*_TOKENS, "cross_entropy")}
    figures["cameras"] = {camera: _camera_figures(tally, camera) for camera in model.cameras}
    # increase of the error with another robot's action
    gap = _gap(tally.mean("shuffled/cross_entropy"), tally.mean("cross_entropy"))
    gaps = {"cross_entropy_gap": gap, "changed_mse_ratio_gap": {c: _gap(*pair) for c, pair in ratios.items()}}
    hidden = {camera: tally.pixels(camera, "half_blind") for camera in _kept_cameras(model)}
    half_blind = {"without": list(model.dispensable), "cameras": hidden}
    return figures | {"open_loop": open_loop, "shuffled_actions": gaps, "half_blind": half_blind}


def _predictions(
    model: WorldModel, rows: TensorDict, without: tuple[str, ...] = ()
) -> Iterator[tuple[torch.Tensor, TensorDict, TensorDict]]:
    """Yield, per decision of `rows [E, T]`: running episodes `[E]` bool, their transitions and predictions `[n]`."""
    memory = model.empty_memory(len(rows))
    for t in range(rows.shape[1]):
        here = rows["mask"][:, t]
        td = rows[:, t][here].set(("memory", "world_model"), memory[here])
        predicted = model.predict(td, without=without)
        memory[here] = predicted["memory"]
        yield here, td, predicted


def _one_ahead(model: WorldModel, rows: TensorDict, tally: _Tally) -> None:
    memory, segmentation = model.empty_memory(len(rows)), rows.get(("observation", "segmentation"), None)
    masks = None if segmentation is None else ObjectMasks(segmentation)
    for t in range(rows.shape[1]):
        here = rows["mask"][:, t]
        td = rows[:, t][here].set(("memory", "world_model"), memory[here])
        scored, predicted = model.score(td), model.predict(td)
        memory[here] = scored["memory"]
        tally.add("cross_entropy", scored["error"])
        tokens = model.correct_tokens(td)
        tally.add("accuracy", tokens["right"].float())
        tally.add("accuracy_changed", tokens["right"].float(), ~tokens["copied"])
        tally.add("accuracy_copy", tokens["copied"].float())
        ceiling, now, following = model.reconstruct(td), td["observation"], td["next", "observation"]
        objects = {} if masks is None else masks.update(now["segmentation"], following["segmentation"], here)
        for camera, image in predicted["image"].items():
            before, after = now["image", camera], following["image", camera]
            moved = changed(before, after)
            tally.add(f"{camera}/changed", moved.float())
            frames = {"prediction": image, "copy": before, "ceiling": ceiling["image", camera]}
            for who, frame in frames.items():
                error = _squared_error(frame, after)
                tally.add(f"{camera}/{who}/mse", error)
                tally.add(f"{camera}/{who}/changed_mse", error, moved)
                tally.add(f"{camera}/{who}/ssim", ssim(frame, after))
                for kind in objects if who in _PAIR else ():
                    tally.add(f"{camera}/{who}/{kind}_mse", error, objects[kind][camera])
        if here.sum() > 1:
            # another robot's action of the same step, with the memory of the true episode
            shuffled = td.clone(False).set("action", td["action"].roll(1, 0))
            tally.add("shuffled/cross_entropy", model.score(shuffled)["error"])
            for camera, image in model.predict(shuffled)["image"].items():
                before, after = now["image", camera], following["image", camera]
                tally.add(f"{camera}/shuffled/changed_mse", _squared_error(image, after), changed(before, after))


def _open_loop(model: WorldModel, rows: TensorDict, tally: _Tally) -> None:
    if rows.shape[1] <= OBSERVED:
        return
    rows = rows[rows["mask"][:, OBSERVED]]
    if not len(rows):
        return
    memory = model.empty_memory(len(rows))
    for t in range(OBSERVED):
        memory = model.observe(rows[:, t].set(("memory", "world_model"), memory))
    start = rows[:, OBSERVED]["observation"]
    observation = start.clone(False)
    for k in range(1, min(max(HORIZONS), rows.shape[1] - OBSERVED) + 1):
        step = rows[:, OBSERVED + k - 1]
        td = {"observation": observation, "action": step["action"], "memory": {"world_model": memory}}
        predicted = model.predict(TensorDict(td, [len(rows)]))
        memory = predicted["memory"]
        observation = observation.clone(False).update(predicted.select("image", "state", strict=False))
        if k in HORIZONS:
            for camera, image in predicted["image"].items():
                after = step["next", "observation", "image", camera]
                for who, frame in (("prediction", image), ("copy", start["image", camera])):
                    tally.add(f"{camera}/{who}/open_{k}", _squared_error(frame, after), step["mask"])


def _half_blind(model: WorldModel, rows: TensorDict, tally: _Tally) -> None:
    """Measure predictions from an explorer's cameras, on pixels of objects that these showed earlier but not now."""
    kept, segmentation = _kept_cameras(model), rows.get(("observation", "segmentation"), None)
    if not kept or segmentation is None:
        return
    masks = ObjectMasks(segmentation.select(*kept))
    for here, td, predicted in _predictions(model, rows, without=model.dispensable):
        now, after = td["observation"], td["next", "observation"]
        hidden = masks.hidden(now["segmentation"], after["segmentation"], here)
        for camera in kept:
            for who, frames in (("prediction", predicted), ("copy", now)):
                error = _squared_error(frames["image", camera], after["image", camera])
                tally.add(f"{camera}/{who}/half_blind", error, hidden[camera])


def _kept_cameras(model: WorldModel) -> list[str]:
    """The cameras of the half-blind measure: an explorer's; none if the model needs all cameras."""
    return [camera for camera in model.cameras if model.dispensable and camera not in model.dispensable]


def _camera_figures(tally: _Tally, camera: str) -> dict:
    psnr = {who: tally.psnr(f"{camera}/{who}/mse") for who in (*_PAIR, "ceiling")}
    figures: dict = {"changed_share": tally.mean(f"{camera}/changed")}
    figures["changed_mse_ratio"] = tally.ratio(camera, "changed_mse")
    figures["changed_mse_ratio_ceiling"] = tally.ratio(camera, "changed_mse", "ceiling")
    figures |= {"psnr": psnr, "ssim": {who: tally.mean(f"{camera}/{who}/ssim") for who in psnr}}
    figures["skill"] = _skill(**psnr)
    return figures | {f"{kind}_mse": tally.pixels(camera, f"{kind}_mse") for kind in OBJECTS}


def _skill(prediction: float | None, copy: float | None, ceiling: float | None) -> float | None:
    """(prediction - copy) / (ceiling - copy) in PSNR; None if the ceiling is not above copying."""
    if prediction is None or copy is None or ceiling is None or ceiling <= copy:
        return None
    return (prediction - copy) / (ceiling - copy)


def _gap(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _compare(model: dict, other: dict) -> dict:
    def gap(*path: str) -> float | None:
        return _gap(*(reduce(operator.getitem, path, figures) for figures in (other, model)))  # type: ignore[arg-type]

    cameras = {
        camera: {"changed_mse_ratio": gap("cameras", camera, "changed_mse_ratio")}
        | {f"{kind}_mse": gap("cameras", camera, f"{kind}_mse", "prediction") for kind in OBJECTS}
        for camera in model["cameras"]
    }
    blind = {camera: gap("half_blind", "cameras", camera, "prediction") for camera in model["half_blind"]["cameras"]}
    half_blind = {"cameras": {camera: {"hidden_object_mse": worse} for camera, worse in blind.items()}}
    return {"cross_entropy": gap("tokens", "cross_entropy"), "cameras": cameras, "half_blind": half_blind}


@dataclass
class WorldModelEvaluation(EvaluationResult):
    figures: dict

    @classmethod
    def run(
        cls, config: Config, model: WorldModel, device: Device, against: WorldModel | None = None
    ) -> "WorldModelEvaluation":
        """Evaluate with the settings of a run. `against`: another world model on the same episodes."""
        episodes, fps = cls.random_episodes(config, device)
        figures = {"decision_seconds": config.rollout.action_steps / fps} | _measure(model, episodes)
        if against is not None:
            figures["against"] = _compare(figures, _measure(against, episodes))
        return cls(config.evaluation.episodes, config.seed, figures)

    @staticmethod
    def random_episodes(config: Config, device: Device) -> tuple[TensorDict, float]:
        """Run held-out episodes with a teacher's random actions; returns them `[E, T]`, and the control frequency."""
        rollout, teacher = config.rollout, config.teacher
        env = make_env(config.env, rollout.n_envs, rollout.max_episode_steps, device)
        try:
            coloured = ColouredNoise.share_of(env.num_envs, teacher.coloured, tasks=len(set(env.spec.task_names)))
            policy = ColouredNoise(env.spec, rollout.action_steps, coloured * teacher.correlation).to(env.device)
            episodes = held_out_episodes(env, policy, config.evaluation.episodes, config.seed, rollout.action_steps)
        finally:
            env.close()
        return episodes, env.spec.control_hz

    @staticmethod
    @torch.no_grad()
    def ratio_by_episode(model: WorldModel, episodes: TensorDict) -> torch.Tensor:
        """`[E]`: `changed_mse_ratio` of each episode, over all cameras; nan if no pixel changed."""
        model.eval()
        sums = torch.zeros(2, len(episodes), dtype=torch.float64)  # [prediction | copy, E]
        for rows, own in zip(episodes.split(ROWS), sums.split(ROWS, 1), strict=True):
            for here, td, predicted in _predictions(model, rows.to(next(model.parameters()).device)):
                for camera, image in predicted["image"].items():
                    before, after = td["observation", "image", camera], td["next", "observation", "image", camera]
                    moved = changed(before, after)
                    for row, frame in enumerate((image, before)):
                        own[row, here.cpu()] += (_squared_error(frame, after) * moved).flatten(1).sum(1).cpu()
        return sums[0] / sums[1]

    def numbers(self) -> dict[str, float | None]:
        numbers = {"episodes": self.episodes} | self.figures["tokens"]
        for camera, found in self.figures["cameras"].items():
            numbers |= {f"{camera}/psnr": found["psnr"]["prediction"], f"{camera}/psnr_copy": found["psnr"]["copy"]}
            numbers |= {f"{camera}/ssim": found["ssim"]["prediction"], f"{camera}/skill": found["skill"]}
            numbers[f"{camera}/changed_mse_ratio"] = found["changed_mse_ratio"]
        return numbers

    def content(self) -> dict:
        return self.figures

    def table(self, width: int | None = None) -> str:
        rows: list[tuple[str, ...]] = [("camera", "", "prediction", "copy last", "ceiling")]
        for camera, found in self.figures["cameras"].items():
            rows.append((camera, "PSNR, dB", *(_text(value, ".2f") for value in found["psnr"].values())))
            rows.append((camera, "SSIM", *(_text(value, ".3f") for value in found["ssim"].values())))
            ratios = [found["changed_mse_ratio"], 1.0, found["changed_mse_ratio_ceiling"]]
            rows.append((camera, "changed pixels, MSE ratio", *(_text(ratio, ".3f") for ratio in ratios)))
            for kind in OBJECTS:
                errors = [found[f"{kind}_mse"][who] for who in _PAIR]
                if None not in errors:
                    name = f"{kind.replace('_', ' ')} pixels, MSE"
                    rows.append((camera, name, *(_text(error, ".5f") for error in errors), ""))
            rows.append((camera, "skill", _text(found["skill"], ".2f"), "0", "1"))
        ahead: list[tuple[str, ...]] = [("decisions ahead", "camera", "PSNR, dB", "copy last", "MSE ratio")]
        for k, cameras in self.figures["open_loop"].items():
            for camera, found in cameras.items():
                psnr = [_text(found["psnr"][who], ".2f") for who in _PAIR]
                ahead.append((k, camera, *psnr, _text(found["mse_ratio"], ".3f")))
        return "\n".join([text_table(rows, width=width), "", text_table(ahead, width=width), "", *self._sentences()])

    def _sentences(self) -> list[str]:
        tokens, shuffled, blind = (self.figures[part] for part in ("tokens", "shuffled_actions", "half_blind"))
        shares = ", ".join(f"{label} {_text(tokens[name], '.3f')}" for name, label in _TOKENS.items())
        gaps = ", ".join(f"{camera} {_text(gap, '+.3f')}" for camera, gap in shuffled["changed_mse_ratio_gap"].items())
        lines = [
            f"token accuracy: {shares}; cross-entropy {_text(tokens['cross_entropy'], '.3f')} nats per token",
            f"with another robot's actions: cross-entropy {_text(shuffled['cross_entropy_gap'], '+.3f')}, "
            f"MSE ratio of changed pixels {gaps}",
        ]
        for camera, found in blind["cameras"].items():
            error, copy = (_text(found[who], ".5f") for who in _PAIR)
            lines.append(
                f"without {', '.join(blind['without'])}: MSE of {found['pixels']} pixels of hidden objects, {camera} "
                f"{error} (copying the last frame {copy})"
            )
        against = self.figures.get("against", {"cameras": {}})
        for camera, found in against["cameras"].items():
            differences = [f"{kind.replace('_', ' ')} pixels {_text(found[f'{kind}_mse'], '+.5f')}" for kind in OBJECTS]
            if hidden := against["half_blind"]["cameras"].get(camera):
                error = _text(hidden["hidden_object_mse"], "+.5f")
                differences.append(f"hidden object pixels without the other cameras {error}")
            ratio = _text(found["changed_mse_ratio"], "+.3f")
            lines.append(f"other model minus this one, {camera}: MSE ratio {ratio}; MSE of {', '.join(differences)}")
        return lines


def _text(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
