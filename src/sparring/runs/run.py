"""Run: the training loop. It owns the run folder, the seeds and resuming; the phase implements the training."""

import logging
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch

from sparring.config.inherit import LIMITS
from sparring.config.resolve import resolve
from sparring.config.schema import Config
from sparring.config.text import saved_settings
from sparring.errors import Diverged, OtherFailed, PeerGone, StageFailed
from sparring.evaluation.action_error import ActionError
from sparring.evaluation.exploration import ExplorationEvaluation
from sparring.evaluation.files import EvaluationResult
from sparring.evaluation.play import Evaluation
from sparring.evaluation.world_model import WorldModelEvaluation
from sparring.phases import PHASES
from sparring.phases.phase import Phase, Progress
from sparring.processes.child import Interrupt, usable_cores
from sparring.processes.distributed import Distributed, random_state, seed_everything, set_random_state
from sparring.processes.heartbeat import OwnStages
from sparring.record.log import LOGGER, Console, RunLog
from sparring.record.recorder import Recorder, check_installed, make_sinks
from sparring.runs.checkpoint import CheckpointError, not_finite, remove_old, save_checkpoint
from sparring.runs.fits import diverged, load_pretrained, load_weights, misfits, read_state, schedules_of
from sparring.runs.folder import RunFolder, Status, folder_lock

log = logging.getLogger(LOGGER)

_NOT_SAVED = "this update is not saved; another process of this run logs the reason"
# after a stop signal, the time for the current update to end: schedulers kill after 30 s or more
_GRACE_S = 20.0


class Run:
    """One training run; `folder=False` writes no files. `phase` and `run_log` are given together, or built here."""

    def __init__(
        self, config: Config, phase: Phase | None = None, folder=True, quiet=False, run_log: RunLog | None = None
    ):
        self.config = config
        self.distributed = phase.distributed if phase else Distributed(config.device, config.rollout.watchdog_s)
        self.stages = OwnStages(config.rollout.groups, config.rollout.watchdog_s)
        self.stages.watch()
        # only the main process has a folder, because it writes nearly everything
        self.writes, self.folder = folder, config.run_folder if folder and self.distributed.is_main else None
        self.log = run_log or RunLog(config.logging, quiet, self.distributed.rank)
        if self.folder:
            check_installed(config.logging)
        run_folder = RunFolder(config)
        checkpoint = run_folder.choose_checkpoint() if self.folder else None
        # the main process chooses the checkpoint for all processes
        checkpoint = self.distributed.gather_objects([checkpoint])[0]
        # one thread while networks are built: initial weights must not depend on the number of cores
        threads = torch.get_num_threads()
        torch.set_num_threads(config.threads or 1)
        seed_everything(config.seed + self.distributed.rank)
        self.phase = phase or resolve(config.phase, PHASES, "phase").from_config(config, self.distributed)
        # networks without images are so small that more threads mostly wait for each other and for the simulator
        spec, acts_on = self.phase.env.spec, self.phase.env.device.type
        if not config.threads and (acts_on != "cpu" or any(name.startswith("image/") for name in spec.observation)):
            torch.set_num_threads(threads)
        pretrained = config.pretrained if checkpoint is None else None
        loaded = load_pretrained(self.phase.model, pretrained, self.phase.env) if pretrained else None
        quiet = quiet or not self.distributed.is_main or config.logging.console_level not in ("DEBUG", "INFO")
        self.console = _RunConsole(quiet=quiet, title=f"{config.phase}  {self.folder or ''}".rstrip())
        self.checkpoints, self.evaluator = _Checkpoints(), _Evaluator()
        # whether the run has already reached a changed limit
        self.limit_passed = False
        # nothing is written before all settings were checked
        if self.folder:
            run_folder.make_room()
        # other processes store episodes in the folder too, so they wait until the old folder is moved aside
        self.distributed.barrier()
        resumed = checkpoint is not None and run_folder.holds(checkpoint)
        self.status = Status.of(config, self.folder, self.phase, self.distributed.device, resumed)
        self.stages.on_end = weakref.WeakMethod(self._fail)
        with folder_lock(self.folder):
            if self.folder:
                run_folder.open()
            with self._status_on_error():
                self.log.open_files(self.folder)
                self._link_log()
                self.recorder = _RunRecorder(self.folder, None, config.logging.rerun, config.logging.video_share)
                if checkpoint is not None:
                    self._resume(checkpoint, run_folder)
                    if self.folder:
                        self._adopt_limits(checkpoint, run_folder)
                elif pretrained:
                    log.info("starts from the weights of %s: %s", pretrained, loaded)
                if self.folder:
                    self.recorder.sinks = make_sinks(config, self.folder, self.phase.progress.updates)
        # closes the recorder also when the run is garbage-collected or the interpreter ends
        weakref.finalize(self, self.recorder.close)

    def extend(self, config: Config) -> None:
        """Raise the limits of the run, to continue it in the same process and folder."""
        self.config = config
        if self.folder is not None:
            RunFolder(config).write_config(config)

    @property
    def fraction(self) -> float:
        """The completed share of the run: 1 when the first limit is reached."""
        return self._share_of(self._limits(dict(self.config.training)))

    def _limits(self, training: dict[str, Any]) -> dict[str, int]:
        """The fields of `training` that end a run."""
        limits = {name: training[name] for key in LIMITS if training.get(name := key.removeprefix("training."))}
        return limits or dict([self.phase.default_limit])

    def _share_of(self, limits: dict[str, int]) -> float:
        counts = self.phase.progress.by_limit
        return min(1.0, max(counts[name] / limit for name, limit in limits.items()))

    @property
    def progress_text(self) -> str:
        """The progress as text: env steps, or updates if no robot acts."""
        progress = self.phase.progress
        return f"{progress.env_steps:,} env steps" if progress.env_steps else f"{progress.updates:,} updates"

    def announce(self) -> None:
        """Log the system, the data, the folder, and warnings about the settings."""
        config, learns_from = self.config, self.phase.learns_from
        log.info("%s", self.status.describe_system())
        title = f"{config.phase} in {config.env.name} on {self.distributed.device}"
        log.info("%s: learns from %s; seed %s", title, learns_from, config.seed)
        log.info("run folder: %s (its config.yaml lists all settings)", self.folder)
        for key, threads in (("threads", config.threads), ("env.threads", getattr(config.env, "threads", 0))):
            if isinstance(threads, int) and threads > usable_cores():
                log.warning("%s=%s on %s cores: extra threads only wait; use fewer", key, threads, usable_cores())
        if self.distributed.lacks_gpus and self.distributed.is_main:
            log.warning("%s", self.distributed.lacks_gpus)
        if self.fraction >= 1 and not self.limit_passed:
            log.info("already trained to the end (%s)", self.progress_text)

    def run(self) -> bool:
        """Train to the end. False: interrupted; then a checkpoint is saved and a message explains how to resume."""
        with folder_lock(self.folder), self.recorder, self._status_open():
            return self._train()

    def evaluate(self) -> EvaluationResult | None:
        """Evaluate in the main process on held-out episodes, with videos; other processes wait."""
        with folder_lock(self.folder), self.recorder, self._status_open(trains=False):
            return self.evaluator.evaluate(self)

    def save(self) -> None:
        self.checkpoints.save(self)

    def _train(self) -> bool:
        progress = self.phase.progress
        self.recorder.record_next_video(self)
        grace_s = min(_GRACE_S, self.config.rollout.watchdog_s)
        with Interrupt(self.distributed.is_main, grace_s) as interrupt, self.console:
            while self.fraction < 1:
                updated, started, steps_before = False, time.perf_counter(), progress.env_steps
                try:
                    self.evaluator.catch_up(self)
                    metrics = self.phase.step(self.fraction)
                    rate = (progress.env_steps - steps_before) / (time.perf_counter() - started)
                    updated, metrics = True, metrics | {"steps_per_second": rate}
                    for part in (self.console, self.recorder, self.checkpoints, self.evaluator):
                        part.after_update(self, metrics)
                except Exception as error:
                    self._save_after_failure(error, updated, "stopped" if interrupt.requested else "failed")
                    # the stage may have failed because of the stop signal, and the update is saved: a normal stop
                    saved = self.checkpoints.saved_at == progress.updates
                    if isinstance(error, StageFailed) and interrupt.requested and saved:
                        return False
                    raise
                # all processes must leave the loop in the same iteration
                if self.distributed.max(float(interrupt.requested)):
                    self._stop_early()
                    return False
        self.checkpoints.save_last(self)
        return True

    def _save_after_failure(self, error: Exception, updated: bool, how: str) -> None:
        """Save the last complete update, or the batch of a diverged one. `updated`: it failed after the update."""
        if updated:
            # the evaluation failed; with several processes the others still wait for it, so none can save
            if isinstance(error, StageFailed) and self.distributed.world_size == 1:
                self._stop_early(how)
        elif isinstance(error, Diverged):
            # diverged weights are not saved; this error is raised in all processes
            if self.writes and error.batch is not None:
                self.console.end()
                RunFolder(self.config).keep_batch(error, self.distributed.rank, self.phase.progress.updates + 1)
        elif isinstance(error, PeerGone) or self.phase.learning:
            # saving needs all processes, and within an update weights and optimiser are inconsistent
            pass
        elif unfit := not_finite(self.phase.model, self.phase.model.state_dict(), self.phase.state_dict()):
            self.console.end()
            log.warning("the run failed and is not saved: NaN, infinite or impossible numbers in %s", unfit)
        # collecting failed after a complete update; a run that fails in its first update saves nothing
        elif self.phase.progress.updates:
            self._stop_early(how)

    def _stop_early(self, how: str = "stopped") -> None:
        self.console.end()
        self.checkpoints.save_last(self)
        # write the incomplete line for readers; the checkpoint keeps the pending metrics for the complete one
        if self.recorder.pending:
            self.recorder.write_line(self)
        if self.folder is not None:
            command = "The same command" + (" with --resume auto" if self.config.resume != "auto" else "")
            effect = "evaluates it" if self.fraction >= 1 else "resumes it"
            log.warning("%s after %s updates; saved. %s %s.", how, self.phase.progress.updates, command, effect)

    def _resume(self, checkpoint: Path, run_folder: RunFolder) -> None:
        try:
            load_weights(self.phase.model, checkpoint)
            state = read_state(checkpoint, self.distributed.world_size)
            own = state["processes"][self.distributed.rank]
            with misfits(checkpoint):
                lost = self.phase.load_state_dict(state["phase"], own)
                set_random_state(own["random"], self.distributed.device)
                lost += self.recorder.load_state_dict(state["recorder"], self.phase.progress.updates)
                self.recorder.pending.update(state["pending"])
        except CheckpointError as error:
            raise CheckpointError(f"{error}\nto continue anyway, {run_folder.advise(checkpoint)}") from None
        # a run that branches off has no checkpoint in its own folder yet
        if run_folder.holds(checkpoint):
            self.checkpoints.saved_at = self.phase.progress.updates
        log.info("resumes from %s (%s)", checkpoint, self.progress_text)
        for message in lost:
            log.warning("%s", message)

    def _adopt_limits(self, checkpoint: Path, run_folder: RunFolder) -> None:
        """Log a changed limit, and write the new one to config.yaml."""
        saved = {key.removeprefix("training."): value for key, value in saved_settings(checkpoint).items()}
        before = self._limits(saved)
        now = self._limits(dict(self.config.training))
        self.limit_passed = now != before and self.fraction >= 1
        if self.limit_passed:
            log.info("%s", self.phase.progress.passed(now))
        elif now != before:
            limit, schedules = Progress.describe(now), ", ".join(schedules_of(self.config))
            change = f"the limit is now {limit}, it was {Progress.describe(before)}"
            earlier, share = self._share_of(before), self._share_of(now)
            continued = f"continue from {share:.0%} (was {earlier:.0%})"
            stretch = f"schedules now run over {limit} and {continued}: {schedules}"
            log.info("%s; %s", change, stretch if schedules else f"{share:.0%} of that is done")
        if run_folder.holds(checkpoint):
            self.config = run_folder.keep_config(checkpoint, self.config, self.fraction < 1)

    @contextmanager
    def _status_open(self, trains: bool = True) -> Iterator[None]:
        """Write to status.json that the run is running, and at the end how it ended, before all videos are encoded."""
        self.log.activate()
        self.stages.watch()
        last = self.status.ended
        self.status.begin(self.phase.progress, self.fraction, self.recorder.evaluations(), trains)
        self._link_log()
        with self._status_on_error():
            yield
        ended = ("interrupted", "stopped by a signal; saved") if trains else last or ("finished", "not trained")
        ended = ("finished", None) if self.fraction >= 1 else ended
        self.status.end(self.phase.progress, self.fraction, *ended)

    @contextmanager
    def _status_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # the caller reports it on the console
            log.debug("ended by an exception", exc_info=True)
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.status.fail(self.phase.progress, self.fraction, error)

    def _link_log(self) -> None:
        """Link train.log to the log of the training session; a later evaluation must not replace it."""
        if not self.status.was_finished:
            self.log.link()


class _RunConsole(Console):
    def after_update(self, run: Run, metrics: dict[str, float]) -> None:
        progress, preparing = run.phase.progress, run.phase.preparing
        run.log.update(progress.updates, metrics)
        count, unit = (progress.env_steps, "steps") if progress.env_steps else (progress.updates, "updates")
        shown = {"episode_reward": "reward {:.2f}", "success_rate": "success {:.0%}"}
        # imitation collects no episodes
        shown = shown if "collect_seconds" in metrics else {"loss": "loss {:.4f}"}
        # world models: accuracy on data that they have not learned from yet
        if run.phase.accuracy == "fresh_acc":
            shown = {"loss": "loss {:.3f}", "fresh_acc": "accuracy {:.0%}"}
        line = "  ".join(text.format(metrics[name]) for name, text in shown.items() if name in metrics)
        self.progress(run.fraction, count, line, unit, metrics, preparing)


class _RunRecorder(Recorder):
    """A Recorder that writes a line of mean metrics every `training.log_every` updates."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # metrics of the updates since the last line
        self.pending: dict[str, list[float]] = defaultdict(list)

    def after_update(self, run: Run, metrics: dict[str, float]) -> None:
        phase, progress = run.phase, run.phase.progress
        for name, value in metrics.items():
            self.pending[name].append(value)
        if self.videos is not None and (videos := phase.drain_videos()):
            self.videos.rollouts(videos, progress, phase.env.spec)
        self.timeline(phase.drain_spans())
        run.status.progress(progress, run.fraction)
        if progress.updates % run.config.training.log_every == 0 or run.fraction >= 1:
            self.write_line(run)
            if self.videos is not None and (prediction := phase.newest_prediction()):
                # the video of the last update is always written
                self.videos.prediction(prediction, progress, phase.env.spec, run.fraction >= 1)
        run.distributed.barrier()  # the main process needs longer, because it writes images
        run.distributed.update_done()

    def write_line(self, run: Run) -> None:
        """Write the means over the updates since the last line and over the processes."""
        progress = run.phase.progress
        means = {name: sum(values) / len(values) for name, values in self.pending.items()}
        self.pending.clear()
        self.write(progress, run.distributed.mean_of_all(means), run.phase.accuracy)
        run.log.normalizers(progress.updates, run.phase.model)

    def record_next_video(self, run: Run) -> None:
        """Record videos of the next episodes: at a start and after every checkpoint, if the time budget allows."""
        episodes = run.config.rollout.render_episodes
        if self.videos is not None and self.videos.affords(episodes):
            run.phase.record_video(episodes)


class _Checkpoints:
    """Saves a checkpoint every `training.save_every` updates and at the end of a run."""

    saved_at = -1  # number of updates of the last checkpoint

    def after_update(self, run: Run, metrics: dict[str, float]) -> None:
        if run.phase.progress.updates % run.config.training.save_every == 0:
            self.save(run)
            # if the run is killed at this point, status.json agrees with the checkpoint
            run.status.progress(run.phase.progress, run.fraction, at_once=True)
            run.recorder.record_next_video(run)

    def save_last(self, run: Run) -> None:
        if self.saved_at != run.phase.progress.updates:
            self.save(run)

    def save(self, run: Run) -> None:
        """Gather the state of every process; the main one writes it. Invalid numbers are never saved."""
        phase, distributed = run.phase, run.distributed
        own = phase.process_state() | {"random": random_state(distributed.device)}
        state: dict[str, Any] = {"phase": phase.state_dict(), "processes": distributed.gather_objects([own])}
        updates, weights = phase.progress.updates, phase.model.state_dict()
        # one process checks the weights while it writes them; several check first, because collectives have a timeout
        check_first = distributed.world_size > 1 or run.folder is None
        with ThreadPoolExecutor(max_workers=1) as thread:
            checked = thread.submit(not_finite, phase.model, weights, state["phase"])

            def approve() -> None:
                unfit = checked.result()
                if distributed.max(float(unfit is not None)):
                    raise diverged(run.config, updates, unfit) if unfit else OtherFailed(_NOT_SAVED)

            if check_first:
                approve()
            if run.folder is not None:
                state |= {"pending": dict(run.recorder.pending), "recorder": run.recorder.state_dict()}
                about = run.config.to_yaml(), phase.env.spec
                approval = (lambda: None) if check_first else approve
                saved = save_checkpoint(run.folder, updates, phase.model, state, *about, approval)
                remove_old(run.folder, run.config.training.keep_checkpoints, saved)
        self.saved_at = updates
        distributed.barrier()  # no process continues before the main process has written


class _Evaluator:
    """Evaluates every `evaluation.every` updates and on request."""

    newest: tuple[int, EvaluationResult | None] = (-1, None)  # number of updates at the last evaluation, and its result
    has_warned_no_video = False  # warned once per run

    def after_update(self, run: Run, metrics: dict[str, float]) -> None:
        if self._is_due(run):
            self.evaluate(run)

    def _is_due(self, run: Run) -> bool:
        every = run.config.evaluation.every
        return bool(every) and run.phase.progress.updates % every == 0

    def catch_up(self, run: Run) -> None:
        """Do an evaluation that is missing because the run was killed between saving and evaluating."""
        updates = run.phase.progress.updates
        if self._is_due(run) and run.checkpoints.saved_at == updates != self.newest[0]:
            is_missing = run.folder and updates not in {line["update"] for line in run.recorder.evaluations()}
            if run.distributed.max(float(bool(is_missing))):
                self.evaluate(run)

    def evaluate(self, run: Run) -> EvaluationResult | None:
        """Evaluate at most once per update; if the limit has already been reached, keep the recorded evaluation."""
        updates, evaluation = self.newest
        if updates == run.phase.progress.updates:
            return evaluation
        evaluation = None
        done = [line["update"] for line in run.recorder.evaluations()] if run.limit_passed else []
        if run.distributed.is_main and run.phase.progress.updates not in done:
            run.console.end()
            evaluation = self._evaluate_here(run)
            log.info("after %s, %s held-out episodes:\n%s", run.progress_text, evaluation.episodes, evaluation.table())
        run.distributed.barrier()
        self.newest = (run.phase.progress.updates, evaluation)
        return evaluation

    def _evaluate_here(self, run: Run) -> EvaluationResult:
        phase, config, recorder = run.phase, run.config, run.recorder
        model, device = cast(Any, phase.evaluated_model), run.distributed.device
        evaluation: EvaluationResult
        if self.newest[0] < 0 and phase.evaluation != "actions":
            log.info("evaluating on %s held-out episodes (evaluation.episodes)", config.evaluation.episodes)
        if phase.evaluation == "world_model":
            evaluation = WorldModelEvaluation.run(config, model, device)
        elif phase.evaluation == "exploration":
            evaluation = ExplorationEvaluation.run(config, model, device)
        elif phase.evaluation == "actions":
            held_out, training = (getattr(phase, name) for name in ("held_out", "chunks"))
            evaluation = ActionError.of(model, held_out, training, phase.env.spec, config, device)
        else:
            evaluation = Evaluation.run(config, model, device, videos=config.rollout.render_episodes)
        if run.folder is not None:
            evaluation.write(run.folder / "evaluation.json")
        recorder.evaluation(phase.progress, evaluation.numbers())
        run.status.evaluated(recorder.evaluations())
        if isinstance(evaluation, Evaluation) and evaluation.videos and recorder.videos is not None:
            recorder.videos.evaluation(evaluation.videos, phase.progress, evaluation.spec)
        if isinstance(evaluation, Evaluation) and evaluation.no_video_reason and not self.has_warned_no_video:
            log.warning("no video: %s", evaluation.no_video_reason)
            self.has_warned_no_video = True
        return evaluation
