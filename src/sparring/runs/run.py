"""Run: THE loop. It owns the run folder, the seeds and going on after a stop; it never knows what a phase does."""

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from sparring.config.resolve import resolve
from sparring.config.schema import Config
from sparring.errors import LeftAlone
from sparring.evaluation.exploration import ExplorationEvaluation
from sparring.evaluation.files import EvaluationResult
from sparring.evaluation.play import Evaluation
from sparring.evaluation.world_model import WorldModelEvaluation
from sparring.noise import random_state, seed_everything, set_random_state
from sparring.phases import PHASES
from sparring.phases.phase import Collects, Filmed, Phase, ShowsPictures, Timed
from sparring.processes.child import Interrupt, usable_cores
from sparring.processes.distributed import Distributed
from sparring.record.console import Console
from sparring.record.log import LOGGER, RunLog
from sparring.record.recorder import Recorder
from sparring.record.sinks import make_sinks
from sparring.runs.checkpoint import (
    CheckpointError,
    load_pretrained,
    load_training_state,
    load_weights,
    remove_old,
    save_checkpoint,
)
from sparring.runs.folder import alone_in, choose_checkpoint, make_room, open_folder, way_on
from sparring.runs.status import Ended, status_of, why
from sparring.world_models.world_model import WorldModel

log = logging.getLogger(LOGGER)


class Run:
    """One training run. `phase` is built from the config unless it is given; `folder=False` writes no files."""

    def __init__(self, config: Config, phase: Phase | None = None, folder: bool = True, quiet: bool = False):
        self.config = config
        self.distributed = phase.distributed if phase else Distributed(config.device)
        self.folder = config.run_folder if folder and self.distributed.is_main else None
        self.log = RunLog(config.logging, quiet, self.distributed.rank)
        if self.folder:
            config.logging.check_installed()
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
        quiet = quiet or not self.distributed.is_main or config.logging.console_level not in ("DEBUG", "INFO")
        self.console = Console(quiet=quiet, title=f"{config.phase}  {self.folder or ''}".rstrip())
        self.pending: dict[str, list[float]] = defaultdict(list)
        self.saved_at = -1
        # after how many updates last, and what was found
        self.evaluated = (-1, None)
        # only now, when all that was given has been found to fit, is anything written
        if self.folder:
            make_room(config)
        # the others keep episodes in the folder too: not in the one that is being moved aside
        self.distributed.barrier()
        goes_on = checkpoint is not None and _is_in(checkpoint, config.run_folder)
        self.status = status_of(config, self.folder, self.phase, self.distributed.device, goes_on)
        with self._alone():
            if self.folder:
                open_folder(config)
            with self._told_if_it_fails():
                self.log.open_files(self.folder)
                self._link_log()
                self.recorder = Recorder(self.folder, None, config.logging.rerun, config.logging.video_share)
                if checkpoint is not None:
                    self._go_on_from(checkpoint)
                elif pretrained:
                    log.info("starts from the weights of %s: %s", pretrained, loaded)
                if self.folder:
                    self.recorder.sinks = make_sinks(config, self.folder, self.phase.progress.updates)
        # also when this is garbage, and when the interpreter ends
        weakref.finalize(self, self.recorder.close)

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
        log.info("%s", self.status.system_in_words())
        log.info(
            "%s in %s on %s: learns from %s; seed %s",
            config.phase,
            config.env.name,
            self.distributed.device,
            phase.learns_from,
            config.seed,
        )
        log.info("run folder: %s (its config.yaml says every setting)", self.folder)
        for key, threads in (("threads", config.threads), ("env.threads", getattr(config.env, "threads", 0))):
            if isinstance(threads, int) and threads > usable_cores():
                log.warning("%s=%s, on %s cores: more threads wait for each other", key, threads, usable_cores())
        if self.fraction >= 1:
            log.info("already trained to the end (%s)", self._made())

    def run(self) -> bool:
        """Train to the end. False when it was interrupted (a checkpoint is then saved, and how to go on is said)."""
        with self._alone(), self.recorder, self._told():
            return self._train()

    def evaluate(self) -> EvaluationResult | None:
        """Held-out episodes by the main process, with videos; the others wait."""
        with self._alone(), self.recorder, self._told(trains=False):
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

    @contextmanager
    def _told(self, trains: bool = True) -> Iterator[None]:
        """status.json says that it goes on, and then how it ended, also while videos are still being encoded."""
        self.log.activate()
        before = self.status.ended
        self.status.begin(self.phase.progress, self.fraction, self.recorder.evaluations(), trains)
        self._link_log()
        with self._told_if_it_fails():
            yield
        ended = Ended("interrupted", "asked to stop; saved") if trains else before or Ended("finished", "not trained")
        ended = Ended("finished") if self.fraction >= 1 else ended
        self.status.end(self.phase.progress, self.fraction, ended)

    def _link_log(self) -> None:
        """Of a finished run, train.log stays with what was said while it trained."""
        if not self.status.was_finished:
            self.log.link()

    @contextmanager
    def _told_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # the console is told by whoever catches it
            log.debug("ended by an exception", exc_info=True)
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "crashed"
            self.status.end(self.phase.progress, self.fraction, Ended(state, why(error)))
            raise

    def _train(self) -> bool:
        training, progress = self.config.training, self.phase.progress
        self._film_what_comes()
        with Interrupt(speaks=self.distributed.is_main) as interrupt, self.console:
            while self.fraction < 1:
                started, steps_before = time.perf_counter(), progress.env_steps
                metrics = self._step()
                speed = (progress.env_steps - steps_before) / (time.perf_counter() - started)
                metrics["steps_per_second"] = speed
                for name, value in metrics.items():
                    self.pending[name].append(value)
                self.log.update(progress.updates, metrics)
                # where no robot acts, updates are all there is to count
                made = (progress.env_steps, "steps") if progress.env_steps else (progress.updates, "updates")
                self.console.progress(self.fraction, made[0], _in_words(metrics), made[1], metrics)
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
        if self.saved_at != progress.updates:
            self.save()
        return True

    def _step(self) -> dict[str, float]:
        try:
            return self.phase.step(self.fraction)
        except LeftAlone:
            # the processes save together
            raise
        except Exception:
            # in the middle of an update weights and optimiser do not belong together
            if isinstance(self.phase, Collects) and not self.phase.learning:
                self._save_what_was_learned()
            raise

    def _save_what_was_learned(self) -> None:
        """Robots, or who decides for them, failed: all else is as the last update left it."""
        if not _is_finite(self.phase.model):
            self.console.end()
            log.warning("failed, and is not saved: its weights or normalisers are NaN or infinite by now")
        # a start that fails does not take the folder
        elif self.phase.progress.updates:
            self._stop_early("failed")

    def _evaluate(self) -> EvaluationResult | None:
        """Once after an update, however often it is asked for."""
        updates, evaluation = self.evaluated
        if updates == self.phase.progress.updates:
            return evaluation
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
        self.evaluated = (self.phase.progress.updates, evaluation)
        return evaluation

    def _made(self) -> str:
        progress = self.phase.progress
        return f"{progress.env_steps:,} env steps" if progress.env_steps else f"{progress.updates:,} updates"

    def _write_line(self) -> None:
        """Means over the updates since the last line, and over the processes."""
        progress = self.phase.progress
        means = {name: sum(values) / len(values) for name, values in self.pending.items()}
        self.pending.clear()
        self.recorder.write(progress, self.distributed.mean_of_all(means), self.phase.accuracy)
        self.status.progress(progress, self.fraction)
        self.log.normalizers(progress.updates, self.phase.model)

    def _write_pictures(self) -> None:
        """What the phase has to show, by the main process."""
        if self.folder is not None and isinstance(self.phase, ShowsPictures) and (shown := self.phase.pictures()):
            # the last one is what people look for
            self.recorder.videos.prediction(shown, self.phase.progress, self.phase.env.spec, self.fraction >= 1)

    def _evaluate_here(self) -> EvaluationResult:
        config, device = self.config, self.distributed.device
        model = self.phase.model
        # of several, it is the world model whose figures tell more; `sparring eval` evaluates the policy
        model = model["world_model"] if isinstance(model, nn.ModuleDict) else model
        if isinstance(model, WorldModel):
            evaluation = WorldModelEvaluation.run(config, model, device)
        elif self.phase.explores:
            evaluation = ExplorationEvaluation.run(config, model, device)
        else:
            evaluation = Evaluation.run(config, model, device, films=config.rollout.render_episodes)
        if self.folder is not None:
            evaluation.write(self.folder / "evaluation.json")
        self.recorder.evaluation(self.phase.progress, evaluation.numbers())
        self.status.evaluated(self.recorder.evaluations())
        if self.folder is not None and isinstance(evaluation, Evaluation):
            self.recorder.videos.evaluation(evaluation.films, self.phase.progress, evaluation.spec)
        return evaluation

    def _film_what_comes(self) -> None:
        """When a run begins or goes on, and after every checkpoint, where there is time for it."""
        episodes = self.config.rollout.render_episodes
        if self.folder is not None and isinstance(self.phase, Filmed) and self.recorder.videos.affords(episodes):
            self.phase.film(episodes)

    def _write_films(self) -> None:
        if self.folder is not None and isinstance(self.phase, Filmed) and (films := self.phase.drain_films()):
            self.recorder.videos.rollouts(films, self.phase.progress, self.phase.env.spec)

    def _stop_early(self, how: str = "stopped") -> None:
        self.console.end()
        if self.saved_at != self.phase.progress.updates:
            self.save()
        # to look at meanwhile; what goes on from here forgets it, and makes a whole one of what is pending
        if self.pending:
            self._write_line()
        if self.folder is not None:
            command = "The same command" + (" with --resume auto" if self.config.resume != "auto" else "")
            updates = self.phase.progress.updates
            then = "evaluates it" if self.fraction >= 1 else "goes on from here"
            log.warning("%s after %s updates; saved. %s %s.", how, updates, command, then)

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
        self.recorder.load_state_dict(state["recorder"], self.phase.progress.updates)
        self.pending.update(state["pending"])
        # a run that branches off has nothing in its own folder yet
        if _is_in(checkpoint, self.config.run_folder):
            self.saved_at = self.phase.progress.updates
        log.info("goes on from %s (%s)", checkpoint, self._made())
        for words in lost:
            log.warning("%s", words)


def _is_in(checkpoint: Path, folder: Path) -> bool:
    return checkpoint.parent.resolve() == folder.resolve()


def _is_small(phase: Phase) -> bool:
    """Without images, networks are so small that more threads mostly wait for each other and for the simulator's."""
    return phase.env.device.type == "cpu" and not any(name.startswith("image/") for name in phase.env.spec.observation)


def _is_finite(model: nn.Module) -> bool:
    """Weights, and what normalisers have seen."""
    return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values())


def _in_words(metrics: dict[str, float]) -> str:
    shown = {"episode_reward": "reward {:.2f}", "success_rate": "success {:.0%}"}
    # of demonstrations nothing else is known
    shown = shown if "collect_seconds" in metrics else {"loss": "loss {:.4f}"}
    # of a world model, what it foretells of what it has not seen yet
    shown = {"loss": "loss {:.3f}", "fresh_acc": "accuracy {:.0%}"} if "fresh_acc" in metrics else shown
    return "  ".join(text.format(metrics[name]) for name, text in shown.items() if name in metrics)
