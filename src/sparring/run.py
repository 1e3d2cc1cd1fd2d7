"""Run: THE loop. It owns the run folder, the seeds and going on after a stop; it never knows what a phase does."""

import logging
import signal
import time
from collections import defaultdict
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import nn

from sparring.checkpoint import (
    CheckpointError,
    load_pretrained,
    load_training_state,
    load_weights,
    remove_old,
    save_checkpoint,
)
from sparring.collect.camera import Film
from sparring.distributed import Distributed
from sparring.errors import StageFailed
from sparring.evaluate import Evaluation, evaluate_config
from sparring.folder import alone_in, choose_checkpoint, make_room, open_folder, way_on
from sparring.measures.evaluation import WorldModelEvaluation, evaluate_world_model
from sparring.measures.exploration import ExplorationEvaluation, evaluate_exploration
from sparring.phases import PHASES
from sparring.phases.phase import Filmed, Phase, ShowsPictures, Timed
from sparring.random_state import random_state, seed_everything, set_random_state
from sparring.record.console import Console
from sparring.record.log import LOGGER, set_up_logging
from sparring.record.pictures import NoVideoEncoder
from sparring.record.recorder import Recorder
from sparring.resolve import resolve
from sparring.tree import Config
from sparring.world_models.world_model import WorldModel

log = logging.getLogger(LOGGER)


class Run:
    """One training run. `phase` is built from the config unless it is given; `folder=False` writes no files."""

    def __init__(self, config: Config, phase: Phase | None = None, folder: bool = True, quiet: bool = False):
        self.config = config
        self.distributed = phase.distributed if phase else Distributed(config.device)
        main = self.distributed.is_main
        self.folder = config.run_folder if folder and main else None
        quiet = quiet or not main
        set_up_logging(config.logging, None, quiet)
        checkpoint = choose_checkpoint(config) if self.folder else None
        # the main process decides where to go on from; the others are told
        checkpoint = self.distributed.gather_objects([checkpoint])[0]
        # one thread while networks are made: their first weights must not depend on how many cores there are
        threads = torch.get_num_threads()
        torch.set_num_threads(config.threads or 1)
        seed_everything(config.seed + self.distributed.rank)
        self.phase = phase or resolve(config.phase, PHASES, "phase").from_config(config, self.distributed)
        if not config.threads and not _is_small(self.phase):
            torch.set_num_threads(threads)
        pretrained = config.pretrained if checkpoint is None else None
        loaded = load_pretrained(self.phase.model, pretrained, self.phase.env) if pretrained else None
        self.console = Console(quiet=quiet or config.logging.console_level not in ("DEBUG", "INFO"))
        self.pending: dict[str, list[float]] = defaultdict(list)
        self.saved_at = -1
        # only now, when all that was given has been found to fit, is anything written
        if self.folder:
            make_room(config)
        # the others keep episodes in the folder too: not in the one that is being moved aside
        self.distributed.barrier()
        with self._alone():
            if self.folder:
                open_folder(config)
            set_up_logging(config.logging, self.folder, quiet)
            self.recorder = Recorder(self.folder)
            if checkpoint is not None:
                self._go_on_from(checkpoint)
            elif pretrained:
                log.info("starts from the weights of %s: %s", pretrained, loaded)

    def extend(self, config: Config) -> None:
        """Go on in the same process and folder, further than was first asked."""
        self.config = config
        if self.folder is not None:
            (self.folder / "config.yaml").write_text(config.to_yaml())

    @property
    def fraction(self) -> float:
        """How much of the run is done: 1 when the first limit is reached."""
        training, progress = self.config.training, self.phase.progress
        made = {
            "total_timesteps": (progress.env_steps, training.total_timesteps),
            "num_episodes": (progress.episodes, training.num_episodes),
            "iterations": (progress.updates, training.iterations),
        }
        shares = [done / limit for done, limit in made.values() if limit]
        if not shares:
            name, limit = self.phase.default_limit
            shares = [made[name][0] / limit]
        return min(1.0, max(shares))

    def announce(self) -> None:
        """What is about to happen, before it does."""
        phase, config = self.phase, self.config
        log.info(
            "%s in %s on %s: learns from %s; seed %s",
            config.phase,
            config.env.name,
            self.distributed.device,
            phase.learns_from,
            config.seed,
        )
        log.info("run folder: %s (external loggers: %s)", self.folder, config.logging.mode)
        if self.fraction >= 1:
            log.info("already trained to the end (%s)", self._made())

    def run(self) -> bool:
        """Train to the end. False when it was interrupted (a checkpoint is then saved, and how to go on is said)."""
        with self._alone():
            return self._train()

    def evaluate(self) -> Evaluation | WorldModelEvaluation | ExplorationEvaluation | None:
        """Held-out episodes by the main process, with videos; the others wait."""
        with self._alone():
            return self._evaluate()

    def save(self) -> None:
        """Every process brings its own state, the main one writes."""
        own = self.phase.process_state() | {"random": random_state(self.distributed.device)}
        processes = self.distributed.gather_objects([own])
        if self.folder is not None:
            state = {"phase": self.phase.state_dict(), "processes": processes, "pending": dict(self.pending)}
            state["recorder"] = self.recorder.state_dict()
            config_yaml = self.config.to_yaml()
            save_checkpoint(
                self.folder, self.phase.progress.updates, self.phase.model, state, config_yaml, self.phase.env.spec
            )
            remove_old(self.folder, self.config.training.keep_checkpoints)
        self.saved_at = self.phase.progress.updates
        # nobody leaves while the main process is still writing
        self.distributed.barrier()

    def _alone(self) -> AbstractContextManager:
        """While something is written; nobody else may train in the same folder then."""
        return nullcontext() if self.folder is None else alone_in(self.folder)

    def _train(self) -> bool:
        training, progress = self.config.training, self.phase.progress
        self._film_what_comes()
        with _Interrupt() as interrupt:
            while self.fraction < 1:
                started, steps_before = time.perf_counter(), progress.env_steps
                metrics = self._step()
                speed = (progress.env_steps - steps_before) / (time.perf_counter() - started)
                for name, value in (metrics | {"steps_per_second": speed}).items():
                    self.pending[name].append(value)
                # where no robot acts, updates are all there is to count
                made = (progress.env_steps, "steps") if progress.env_steps else (progress.updates, "updates")
                self.console.progress(self.fraction, made[0], _in_words(metrics), made[1])
                self._write_films()
                if isinstance(self.phase, Timed):
                    self.recorder.timeline(self.phase.drain_spans())
                if progress.updates % training.log_every == 0 or self.fraction >= 1:
                    self._write_line()
                    self._write_pictures()
                # pictures take the main process its time
                self.distributed.barrier()
                self.distributed.update_done()
                if progress.updates % training.save_every == 0:
                    self.save()
                    self._film_what_comes()
                if self.config.evaluation.every and progress.updates % self.config.evaluation.every == 0:
                    self._evaluate()
                # all processes must leave together
                if self.distributed.max(float(interrupt.asked)):
                    self._stop_early()
                    return False
        self.console.end()
        if self.saved_at != progress.updates:
            self.save()
        return True

    def _step(self) -> dict[str, float]:
        try:
            return self.phase.step(self.fraction)
        except StageFailed:
            self._stop_early()
            raise

    def _evaluate(self) -> Evaluation | WorldModelEvaluation | ExplorationEvaluation | None:
        evaluation = None
        if self.distributed.is_main:
            self.console.end()
            evaluation = self._evaluate_here()
            log.info(
                "after %s, %s held-out episodes:\n%s",
                self._made(),
                evaluation.episodes,
                evaluation.table(),
            )
        self.distributed.barrier()
        return evaluation

    def _made(self) -> str:
        progress = self.phase.progress
        return f"{progress.env_steps:,} env steps" if progress.env_steps else f"{progress.updates:,} updates"

    def _write_line(self) -> None:
        """Means over the updates since the last line."""
        progress = self.phase.progress
        means = {name: sum(values) / len(values) for name, values in self.pending.items()}
        self.pending.clear()
        line = {
            "episode": progress.episodes,
            "avg_loss": means.pop("loss", None),
            "episode_reward": means.pop("episode_reward", None),
            "success_rate": means.pop("success_rate", None),
            "total_steps": progress.env_steps,
            "update": progress.updates,
        }
        self.recorder.write(line | means)

    def _write_pictures(self) -> None:
        """What the phase has to show, by the main process."""
        if self.folder is None or not isinstance(self.phase, ShowsPictures):
            return
        number = self.phase.progress.episodes or self.phase.progress.updates
        pictures = self.phase.pictures()
        for name, picture in pictures.images.items():
            self.recorder.image(f"episode_{number:04d}_{name}", picture)
        for name, frames in pictures.videos.items():
            self._write_video(f"episode_{number:06d}{name and '_'}{name}", frames, pictures.fps)

    def _write_video(self, name: str, frames: list[np.ndarray], fps: float) -> None:
        try:
            self.recorder.video(name, frames, fps)
        except NoVideoEncoder as error:  # the training was not for the video's sake
            log.warning("%s", error)

    def _evaluate_here(self) -> Evaluation | WorldModelEvaluation | ExplorationEvaluation:
        config, device = self.config, self.distributed.device
        model = self.phase.model
        # of several, it is the world model whose figures tell more; `sparring eval` evaluates the policy
        model = model["world_model"] if isinstance(model, nn.ModuleDict) else model
        if isinstance(model, WorldModel):
            evaluation = evaluate_world_model(config, model, device)
        elif self.phase.explores:
            evaluation = evaluate_exploration(config, model, device)
        else:
            evaluation = evaluate_config(config, model, device, films=config.rollout.render_episodes)
        if self.folder is not None:
            evaluation.write(self.folder / "evaluation.json")
        progress = self.phase.progress
        for number, film in enumerate(evaluation.films):
            self._write_film(f"episode_{progress.episodes or progress.updates:06d}_{number}", film)
        return evaluation

    def _film_what_comes(self) -> None:
        """When a run begins or goes on, and after every checkpoint."""
        if self.folder is not None and isinstance(self.phase, Filmed):
            self.phase.film(self.config.rollout.render_episodes)

    def _write_films(self) -> None:
        for film in self.phase.drain_films() if isinstance(self.phase, Filmed) else ():
            self.console.end()
            self._write_film(f"rollout_{self.phase.progress.updates:06d}_{film.episode.env}", film)

    def _write_film(self, name: str, film: Film) -> None:
        try:
            log.info("to look at: %s", self.recorder.film(name, film.frames, self.phase.env.spec.control_hz))
        except NoVideoEncoder as error:  # the training was not for the video's sake
            log.warning("%s", error)

    def _stop_early(self) -> None:
        self.console.end()
        if self.saved_at != self.phase.progress.updates:
            self.save()
        if self.folder is not None:
            how = "The same command" + (" with --resume auto" if self.config.resume != "auto" else "")
            log.warning("stopped after %s updates; saved. %s goes on from here.", self.phase.progress.updates, how)

    def _go_on_from(self, checkpoint) -> None:
        try:
            load_weights(self.phase.model, checkpoint)
            state = load_training_state(checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{error}\nto go on all the same: {way_on(checkpoint, self.config)}") from None
        processes = len(state["processes"])
        if processes != self.distributed.world_size:
            raise CheckpointError(
                f"'{checkpoint}' was written by {processes} process(es) and {self.distributed.world_size} run now; "
                f"use --gpus {processes}, or start a new run with --output DIR pretrained={checkpoint}"
            )
        own = state["processes"][self.distributed.rank]
        lost = self.phase.load_state_dict(state["phase"], own)
        set_random_state(own["random"], self.distributed.device)
        self.recorder.load_state_dict(state["recorder"])
        self.pending.update(state["pending"])
        self.saved_at = self.phase.progress.updates
        log.info("goes on from %s (%s)", checkpoint, self._made())
        for words in lost:
            log.warning("%s", words)


def _is_small(phase: Phase) -> bool:
    """Without images, networks are so small that more threads mostly wait for each other and for the simulator's."""
    return phase.env.device.type == "cpu" and not any(name.startswith("image/") for name in phase.env.spec.observation)


def _in_words(metrics: dict[str, float]) -> str:
    shown = {"episode_reward": "reward {:.2f}", "success_rate": "success {:.0%}"}
    # of demonstrations nothing else is known
    shown = shown if "collect_seconds" in metrics else {"loss": "loss {:.4f}"}
    # of a world model, what it foretells of what it has not seen yet
    shown = {"loss": "loss {:.3f}", "fresh_acc": "accuracy {:.0%}"} if "fresh_acc" in metrics else shown
    return "  ".join(text.format(metrics[name]) for name, text in shown.items() if name in metrics)


class _Interrupt:
    """The first Ctrl-C (or SIGTERM) asks the loop to stop after this update; the second stops at once."""

    def __init__(self):
        self.asked = False
        self.before: dict = {}

    def __enter__(self):
        try:
            self.before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:  # not the main thread: whoever runs us there handles its own signals
            self.before = {}
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        log.warning("\nstopping after this update, then saving; once more gives up without saving")
