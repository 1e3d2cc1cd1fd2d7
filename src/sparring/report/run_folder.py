"""What the report reads of a run folder."""

import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparring.config.schema import load_config
from sparring.config.text import Setting, flatten, read_settings, value_text
from sparring.errors import UserError
from sparring.report import media
from sparring.report.curves import Curves, Table, Timeline
from sparring.runs.listing import lives, read_json, run_folders, seconds_of

# ---- How a run stands: what it wrote about itself last, and whether it still lives.


def read_status(folder: Path) -> dict:
    """`status.json`, with the state `killed` where a run had no time to write how it ended."""
    status = read_json(folder / "status.json")
    if not status:
        started = any((folder / name).exists() for name in ("config.yaml", "episode_metrics.jsonl"))
        why = "this run kept no status.json" if started else "nothing has been written here yet"
        return {"state": "unknown" if started else "waiting", "why": why}
    if status.get("state") == "running" and lives(folder, status) is False:
        return status | {"state": "killed", "why": "its process is gone and did not say why"}
    return status


# ---- Which settings make runs differ, from each other or from the defaults.


# these say where and how loudly, not what is trained
IDLE = ("output", "resume", "logging.")
# with more than so many, a name says more
_IN_A_LABEL = 3
# what the defaults of the others depend on
_CHOICES = ("phase", "algorithm", "env.name", "policy.name", "world_model.name", "rewards.name")


def read_config(folder: Path) -> dict[str, Any]:
    """Dotted keys and values of a run; none where there is no config, or none that can be read."""
    try:
        return {setting.key: setting.value for setting in read_settings(folder / "config.yaml")}
    except UserError:
        return {}


def differences(configs: list[dict[str, Any]]) -> list[dict]:
    """Keys whose values differ, each with the values of every config in words, None where a config lacks it."""
    keys = sorted({key for config in configs for key in config if not key.startswith(IDLE)})
    rows = [{"key": key, "values": [_words(config, key) for config in configs]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def defaults(config: dict[str, Any]) -> dict[str, Any] | None:
    """What a run of the same phase, env, policy, ... has where nothing else is said; None where that is not known."""
    chosen = [Setting(key, config[key], "the run") for key in _CHOICES if config.get(key) is not None]
    try:
        return flatten(load_config(None, chosen, inherit=False, to_run=False).dump())
    except UserError:  # of another version, or with classes that are not here
        return None


def labels(configs: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What to call runs beside each other: what differs, if that is little and tells them apart; else their names."""
    differ = differences(configs)
    if not 0 < len(differ) <= _IN_A_LABEL or not all(configs):
        return names
    told = [
        ", ".join(f"{row['key'].rpartition('.')[2]} {row['values'][i]}" for row in differ) for i in range(len(configs))
    ]
    return told if len(set(told)) == len(told) else names


def short_names(folders: list[Path]) -> list[str]:
    """The last parts of paths, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _words(config: dict[str, Any], key: str) -> str | None:
    return value_text(config[key]) if key in config else None


# ---- Everything there is to show of one run folder, in parts that are made again only when they changed.


class RunFolder:
    """`parts` is what a page draws; `changed` tells at which version each part was made."""

    def __init__(self, path: Path, source: Callable[[Path, media.Picture], str], budget: int | None = None):
        self.path = path
        # where a page finds a picture: an address, or the picture itself
        self.source = source
        # bytes of pictures that the page may hold; None: it holds none
        self.budget = budget
        self.metrics = Table(path / "episode_metrics.jsonl")
        self.evaluations = Table(path / "evaluations.jsonl")
        self.timeline = Timeline(path / "timeline.jsonl")
        self.config: dict = {}
        self.parts: dict[str, dict | None] = {}
        self.changed: dict[str, int] = {}
        self._stamps: dict[str, object] = {}

    def refresh(self, version: int) -> None:
        """Read what is new; parts that differ from what they were get this version."""
        for reader in (self.metrics, self.evaluations, self.timeline):
            reader.refresh()
        if self._differs("config", _written(self.path / "config.yaml")):
            self.config = read_config(self.path)
        videos, strips = media.videos(self.path), media.strips(self.path)
        last = self._last_evaluation()
        self._update("media", [videos, strips], version, lambda: self._media(videos, strips))
        # of both, so that they are drawn over the same time
        began = min(
            filter(None, (part.curves.first("timestamp") for part in (self.metrics, self.evaluations))), default=None
        )
        self._update("metrics", [self.metrics.stamp, began], version, lambda: self._metrics(began))
        evaluations = self._evaluations(last)
        self._update("evaluations", [self.evaluations.stamp, last, began], version, lambda: evaluations.points(began))
        self._update("timeline", self.timeline.stamp, version, self.timeline.lanes)
        about = self._about(last)
        self._update("about", about, version, lambda: about)

    def _update(self, name: str, stamp: object, version: int, make: Callable[[], dict | None]) -> None:
        if self._differs(name, stamp):
            self.parts[name] = make()
            self.changed[name] = version

    def _differs(self, name: str, stamp: object) -> bool:
        if name in self._stamps and self._stamps[name] == stamp:
            return False
        self._stamps[name] = stamp
        return True

    def _metrics(self, began: float | None) -> dict:
        curves = self.metrics.curves
        names = {name: re.fullmatch(r"(?:perf/)?behind_(\d+)", name) for name in curves.names}
        behind = {int(match[1]): curves.mean(name) for name, match in names.items() if match and name in curves}
        return curves.points(began) | {"behind": [[k, behind[k]] for k in sorted(behind)]}

    def _media(self, videos: list[media.Picture], strips: list[media.Picture]) -> dict:
        chosen, shown = media.spread(strips), videos[: media.VIDEOS]
        if self.budget is not None:
            chosen = media.within(chosen, self.budget // 4)
            shown = media.within(shown, self.budget - sum(strip.bytes for strip in chosen))
        return {
            "videos": [asdict(video) | {"src": self.source(self.path, video)} for video in shown],
            "strips": [asdict(strip) | {"src": self.source(self.path, strip)} for strip in chosen],
            "videos_found": len(videos),
            "strips_found": len(strips),
            "budget": self.budget,
        }

    def _last_evaluation(self) -> dict:
        """Of runs that kept only their last one, and of those before the first line."""
        return {} if self.evaluations.curves.rows else read_json(self.path / "evaluation.json")

    def _evaluations(self, last: dict) -> Curves:
        if not last:
            return self.evaluations.curves
        curves = Curves()
        now = {name: self.metrics.curves.last(name) for name in ("update", "total_steps", "episode", "timestamp")}
        curves.add([now | as_row(last)])
        return curves

    def _about(self, last: dict) -> dict:
        status, metrics = read_status(self.path), self.metrics.curves
        progress = status.get("progress") or {
            "updates": metrics.last("update"),
            "env_steps": metrics.last("total_steps"),
            "episodes": metrics.last("episode"),
        }
        first, last_time = metrics.ends("timestamp") or (None, None)
        evaluations = self._evaluations(last)
        return {
            "path": str(self.path),
            "phase": status.get("phase") or self.config.get("phase"),
            "task": status.get("task") or self.config.get("env.task") or self.config.get("env.name"),
            "state": status["state"],
            "why": status.get("why"),
            "progress": progress,
            "seconds": seconds_of(status) if status.get("started") else first and last_time - first,
            "last": status.get("last") or success(evaluations, best=False),
            "best": status.get("best") or success(evaluations, best=True),
            "system": status.get("system"),
            "unreadable": {
                reader.path.name: reader.unreadable
                for reader in (self.metrics, self.evaluations, self.timeline)
                if reader.unreadable
            },
        }


def success(evaluations: Curves, best: bool) -> dict | None:
    """The last or best success of evaluations, with its interval."""
    points = evaluations.points()
    curves = {name.removeprefix("eval/"): points["curves"][name]["mean"] for name in points["curves"]}
    rates = curves.get("success_rate")
    known = [i for i, rate in enumerate(rates) if rate == rate] if rates is not None else []
    if not known:
        return None
    at = max(known, key=lambda i: rates[i]) if best else known[-1]
    names = {"success_rate": "success_rate", "low": "success_low", "high": "success_high", "episodes": "episodes"}
    found = {name: float(curves[column][at]) for name, column in names.items() if column in curves}
    return found | {"update": float(points["axes"]["update"][at]) if "update" in points["axes"] else None}


def as_row(evaluation: dict) -> dict:
    """An evaluation.json of a policy as a line of evaluations.jsonl."""
    row = {}
    for who, before in (("policy", ""), ("random", "random_")):
        tasks = (evaluation.get("scores") or {}).get(who) or {}
        for task, score in tasks.items():
            name = "" if len(tasks) == 1 or task == "all" else f"{task}/"
            rate = score.get("success") or {}
            row[f"eval/{name}{before}success_rate"] = rate.get("rate")
            row[f"eval/{name}{before}success_low"] = rate.get("low")
            row[f"eval/{name}{before}success_high"] = rate.get("high")
            row[f"eval/{name}{before}reward"] = score.get("reward")
    return row | ({"eval/episodes": evaluation.get("episodes")} if row else {})


def _written(file: Path) -> int | None:
    """When; None where it is not there."""
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def runs_in(path: Path) -> list[Path]:
    """The path itself if it is a run folder, and those below it."""
    if re.fullmatch(r"checkpoint-\d+", path.name):
        raise UserError(f"'{path}' is a checkpoint; give its run folder: {path.parent}")
    return sorted(run_folders(path), key=_by_number)


def _by_number(folder: Path) -> list:
    """seed2 before seed10."""
    return [[int(word) if word.isdigit() else word for word in re.split(r"(\d+)", part)] for part in folder.parts]
