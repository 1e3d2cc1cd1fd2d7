"""The content of the report for one run folder, in parts that are rebuilt only if they changed."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparring.config.schema import load_config
from sparring.config.text import Setting, flatten, saved_settings, value_text
from sparring.config.trust import refuse_code
from sparring.errors import UserError
from sparring.processes.manifest import altered
from sparring.report import media
from sparring.report.curves import Curves, Follower, Timeline
from sparring.runs.listing import lives, read_status, run_folders

IDLE = ("output", "resume", "logging.")  # settings that do not affect training
_IN_A_LABEL = 3  # runs with more differing settings than this are labelled by their folder
# settings that the defaults of others depend on
_CHOICES = ("phase", "algorithm", "env.name", "policy.name", "world_model.name", "rewards.name")


class RunFolder:
    """`parts` is the content of a page; `changed` is the version at which each part was built."""

    def __init__(self, path: Path, source: Callable[[Path, media.Picture], str], budget: int | None = None):
        """`source`: address or content of a picture; `budget`: limit in bytes of the embedded pictures."""
        self.path, self.source, self.budget = path, source, budget
        self.metrics = _CurvesFile(path / "episode_metrics.jsonl")
        self.evaluations = _CurvesFile(path / "evaluations.jsonl")
        self.timeline = Timeline(path / "timeline.jsonl")
        self.config: dict[str, Any] = {}
        self.parts: dict[str, Any] = {}
        self.changed: dict[str, int] = {}
        self._stamps: dict[str, object] = {}

    @staticmethod
    def all_in(path: Path) -> list[Path]:
        if re.fullmatch(r"checkpoint-\d+", path.name):
            raise UserError(f"'{path}' is a checkpoint; give its run folder: {path.parent}")

        # natural order: run-10 comes after run-9
        names = {folder: [re.split(r"(\d+)", part) for part in folder.parts] for folder in run_folders(path)}
        return sorted(names, key=lambda run: [[int(w) if w.isdigit() else w for w in part] for part in names[run]])

    @staticmethod
    def side_by_side(runs: list["RunFolder"]) -> dict:
        """Names and labels of runs, and the settings that differ between them (one run: from the defaults)."""
        configs, names = [run.config for run in runs], _short_names([run.path for run in runs])
        settings, columns = _differences(configs), None
        if len(runs) == 1 and configs[0] and (usual := _defaults(configs[0], runs[0].path)) is not None:
            settings, columns = _differences([configs[0], usual]), ["this run", "default"]
        return {"labels": _labels(configs, names), "names": names, "settings": settings, "columns": columns}

    def refresh(self, version: int) -> None:
        """Read new lines and files; changed parts get this version."""
        # read before the rows that it counts, because more rows are being written
        status = _read_status(self.path)
        for reader in (self.metrics, self.evaluations, self.timeline):
            reader.refresh()
        file = self.path / "config.yaml"
        if self._differs("config", file.stat().st_mtime_ns if file.exists() else None):
            self.config = {}
            with suppress(UserError):  # it cannot be read
                self.config = saved_settings(self.path)
        videos, strips = media.Picture.videos(self.path), media.Picture.strips(self.path)
        self._update("media", [videos, strips], version, lambda: self._media(videos, strips))
        # the earlier start of both, so that they share a time axis
        firsts = (part.curves.first("timestamp") for part in (self.metrics, self.evaluations))
        began = min(filter(None, firsts), default=None)
        self._update("metrics", [self.metrics.stamp, began], version, lambda: self._metrics(began))
        evaluations = self.evaluations
        self._update("evaluations", [evaluations.stamp, began], version, lambda: evaluations.curves.points(began))
        self._update("timeline", self.timeline.stamp, version, self.timeline.lanes)
        about = self._about(status)
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
        names = {name: re.fullmatch(r"perf/behind_(\d+)", name) for name in curves.names}
        behind = {int(match[1]): curves.mean(name) for name, match in names.items() if match and name in curves}
        return curves.points(began) | {"behind": [[k, behind[k]] for k in sorted(behind)]}

    def _media(self, videos: list[media.Picture], strips: list[media.Picture]) -> dict:
        chosen = media.Picture.choose(videos, strips, self.budget)
        shown = [[asdict(one) | {"src": self.source(self.path, one)} for one in part] for part in chosen]
        found = {"videos_found": len(videos), "strips_found": len(strips), "budget": self.budget}
        return {"videos": shown[0], "strips": shown[1]} | found

    def _about(self, status: dict[str, Any]) -> dict:
        task = status.get("task") or self.config.get("env.task") or self.config.get("env.name")
        about = {"path": str(self.path), "phase": status.get("phase") or self.config.get("phase"), "task": task}
        about |= {"state": status.get("state", "unknown"), "seconds": status.get("seconds")}
        about["kinds"] = _kinds(self.config)
        about["damage"] = self._damage(status)
        return about | {name: status.get(name) for name in ("why", "progress", "last", "best", "system")}

    def _damage(self, status: dict[str, Any]) -> list[str]:
        """The damage found in the folder, a clause each."""
        # while a run is training or rewinding, its status is behind its rows
        counts = status.get("rows", {}) if status.get("state") != "running" else {}
        found = [status["damaged"]] if "damaged" in status else []
        for reader in (self.metrics, self.evaluations, self.timeline):
            count = counts.get(reader.path.name)
            found += reader.tail.damage(count if isinstance(count, int) else 0)
        return found + altered(self.path, "config.yaml")


class _CurvesFile(Follower):
    def forget(self) -> None:
        self.curves = Curves()

    def add(self, rows: list[dict]) -> None:
        self.curves.add(rows)


def _kinds(config: dict[str, Any]) -> dict[str, str]:
    """The kinds of loss and reward of a run: runs with different kinds are not drawn on one axis."""
    if not config:
        return {}
    phase, env = config.get("phase"), config.get("env.name")
    # sparse and dense rewards of one env differ
    rewards = f"{config['env.reward']} rewards" if "env.reward" in config else f"rewards of {env}"
    intrinsic = {"teacher": "accuracy", "student": "intrinsic reward", "adversarial": "intrinsic reward"}
    losses = {"teacher": "world model", "imitate": "imitation"}
    loss = losses.get(str(phase), str(config.get("algorithm")))
    return {"loss": loss, "reward": intrinsic.get(str(phase), rewards), "evaluation": rewards}


def _read_status(folder: Path) -> dict:
    """`status.json`, with the state `killed` if the process ended without writing its state."""
    status = read_status(folder)
    if "damaged" in status:
        return status | {"state": "unknown", "why": status["damaged"]}
    if not status:
        started = any((folder / name).exists() for name in ("config.yaml", "episode_metrics.jsonl"))
        why = "this run has no status.json" if started else "nothing has been written here yet"
        return {"state": "unknown" if started else "waiting", "why": why}
    if status.get("state") == "running" and lives(folder, status) is False:
        return status | {"state": "killed", "why": "its process ended without a message"}
    return status


def _differences(configs: list[dict[str, Any]]) -> list[dict]:
    """Keys whose values differ, each with the values of every config as text, None where a config lacks it."""
    keys = sorted({key for config in configs for key in config if not key.startswith(IDLE)})
    rows = [{"key": k, "values": [value_text(c[k]) if k in c else None for c in configs]} for k in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def _defaults(config: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """The default config for the same phase, env, policy, ...; None if it cannot be determined."""
    chosen = [Setting(key, config[key], "the run") for key in _CHOICES if config.get(key) is not None]
    try:
        refuse_code(folder, "config.yaml", chosen)
        return flatten(load_config(None, chosen, inherit=False, to_run=False).dump())
    except UserError:  # its classes are not installed or not trusted
        return None


def _labels(configs: list[dict[str, Any]], names: list[str]) -> list[str]:
    """The differing settings, if they are few and unique for each run; else the names."""
    differ = _differences(configs)
    if not 0 < len(differ) <= _IN_A_LABEL or not all(configs):
        return names
    keys = [row["key"].rpartition(".")[2] for row in differ]
    values = zip(*(row["values"] for row in differ), strict=True)
    labels = [", ".join(f"{key} {value}" for key, value in zip(keys, own, strict=True)) for own in values]
    return labels if len(set(labels)) == len(labels) else names


def _short_names(folders: list[Path]) -> list[str]:
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
