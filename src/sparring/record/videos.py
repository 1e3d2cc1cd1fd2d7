"""Videos of episodes and predictions; a separate thread draws, encodes and lists them during training."""

import io
import itertools
import json
import logging
import math
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from sparring.collect.camera import EpisodeVideo
from sparring.contract import EnvSpec
from sparring.data.video import find_ffmpeg
from sparring.envs.backend import SEAM
from sparring.errors import UserError
from sparring.phases.phase import Progress
from sparring.phases.replay import Prediction
from sparring.processes.files import partial_of, refuse_special
from sparring.record.log import LOGGER
from sparring.record.overlay import Scene, filmstrip, write_png

log = logging.getLogger(LOGGER)
WAITING = 32  # maximum number of jobs in the queue; a run records a few episodes at a time
ENCODER_TIMEOUT_S = 120.0  # timeout of the encoder at the end of a run
LONGEST_S = 300.0  # timeout of one video
FIRST_GUESS_S = 1.5  # estimated seconds per video before the first one is complete
# a fast preset with small files; browsers need yuv420p and an index at the start; one thread leaves cores for training
_CODING = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-threads", "1"]
_PLAYABLE = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
_NICE = 10
_JPEG_QUALITY = 85


class VideoWriter:
    """Writes `videos/*.mp4`, `videos/index.jsonl`, `samples/*.png` and, with `rerun`, `recording.rrd` in a folder.
    `on_video(file, line of the index)` is called in the encoder's thread; `finish` waits for it."""

    def __init__(
        self,
        folder: Path,
        rerun: bool = False,
        on_video: Callable[[Path, dict], None] | None = None,
        share: float = 1.0,
    ):
        """`share`: maximum share of the time from now on that videos may take; evaluations are exempt."""
        self.folder, self.on_video = folder, on_video
        self.share, self.began = share, time.monotonic()
        self.encoder = _Encoder()
        self.rerun = _RerunFile(folder) if rerun else None

    def affords(self, videos: int = 1) -> bool:
        """Whether the time is enough for so many more videos, at the average time of the earlier ones."""
        encoder = self.encoder
        each = encoder.seconds / encoder.done if encoder.done else FIRST_GUESS_S
        return self.share == 1 or encoder.seconds + videos * each <= self.share * (time.monotonic() - self.began)

    def rollouts(self, videos: list[EpisodeVideo], progress: Progress, spec: EnvSpec) -> None:
        for video in videos:
            self.record_video(f"rollout_{progress.updates:06d}_{video.episode.env}", "rollout", video, progress, spec)

    def evaluation(self, videos: list[EpisodeVideo], progress: Progress, spec: EnvSpec) -> None:
        # the update makes names unique: a policy may be evaluated twice without a new episode in between
        update = f"_{progress.updates:06d}" if progress.episodes else ""
        for number, video in enumerate(videos):
            self.record_video(f"episode_{_number(progress):06d}{update}_{number}", "evaluation", video, progress, spec)

    def record_video(
        self, name: str, kind: str, video: EpisodeVideo, progress: Progress, spec: EnvSpec, settings: str = ""
    ) -> Path:
        """Submit an episode as a video and a filmstrip; returns the path of the video."""
        path, episode = self.folder / "videos" / f"{name}.mp4", video.episode
        success = episode.success if spec.reports_success else None
        line = _index_line(name, kind, progress, spec.task_names[episode.task], episode.steps, episode.reward)
        line |= {"success": success, "cameras": list(spec.video_cameras), "settings": settings}
        self.encoder.submit(partial(self._make_episode_video, line, video, spec))
        return path

    def prediction(self, prediction: Prediction, progress: Progress, spec: EnvSpec, anyway: bool = False) -> None:
        """Submit an episode with its prediction as an image of its middle, and as a video if `anyway` or affordable."""
        number, rewards, task = _number(progress), prediction.rewards, spec.task_names[prediction.task]
        line = _index_line(f"episode_{number:06d}", "prediction", progress, task, len(rewards), float(rewards.sum()))
        line |= {"cameras": list(prediction.true), "strip": f"samples/episode_{number:04d}_pred_vs_gt.png"}
        self.encoder.submit(partial(self._make_prediction, line, prediction, spec, anyway))

    def finish(self, timeout_s: float = ENCODER_TIMEOUT_S) -> None:
        self.encoder.finish(timeout_s)
        if self.rerun is not None:
            self.rerun.flush()

    def _make_episode_video(self, line: dict, video: EpisodeVideo, spec: EnvSpec) -> None:
        video = video.rendered()
        frames = cast(list[np.ndarray], video.frames)
        write_png(self.folder / line["strip"], filmstrip(frames))
        views = _by_camera(frames, spec.video_cameras)
        self._make_video(line, _episode_scene(video, views, spec))
        if self.rerun is not None:
            self.rerun.record_video(Path(line["file"]).stem, video, views)

    def _make_prediction(self, line: dict, prediction: Prediction, spec: EnvSpec, anyway: bool) -> None:
        write_png(self.folder / line["strip"], prediction.frame(line["steps"] // 2))
        if not (anyway or self.affords()):
            return
        self._make_video(line, _prediction_scene(prediction, spec))
        if self.rerun is not None:
            self.rerun.prediction(Path(line["file"]).stem, prediction)

    def _make_video(self, line: dict, scene: Scene) -> None:
        file = _write_video(self.folder / line["file"], scene.frames(), scene.fps)
        index_file = self.folder / "videos" / "index.jsonl"
        refuse_special(index_file)
        with index_file.open("a") as index:
            index.write(json.dumps(line) + "\n")
        if self.on_video is not None:
            self.on_video(file, line)
        log.info("new video: %s", file)


class _Encoder:
    """Runs jobs in order, in a thread that ends if the queue is empty; skips a new job if `waiting` jobs are queued.
    After an error in a job its video is missing; each type of error is logged once as a warning."""

    def __init__(self, waiting: int = WAITING):
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # makes adding a job and ending the thread at an empty queue exclusive
        self._warned: set[type[Exception]] = set()
        self.left_out = 0
        self.done, self.seconds = 0, 0.0  # number and total time of finished jobs

    def submit(self, job: Callable[[], None]) -> bool:
        """Add a job without waiting; False if the queue was full."""
        with self._lock:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                self.left_out += 1
                return False
            if self._thread is None:
                # a daemon thread does not delay the end of the process
                self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
                self._thread.start()
        return True

    def finish(self, timeout_s: float = ENCODER_TIMEOUT_S) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                log.warning("%s videos or images are not ready after %.0f s", self._jobs.qsize() + 1, timeout_s)
        if self.left_out:
            advice = "set rollout.render_episodes lower, or training.save_every and training.log_every higher"
            left_out, self.left_out = self.left_out, 0
            log.warning("%s videos or images were left out, as %s waited; %s", left_out, self._jobs.maxsize, advice)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began = time.monotonic()
            try:
                job()
            except Exception as error:  # drawing, disks and ffmpeg fail in many ways; training continues
                level = logging.DEBUG if type(error) in self._warned else logging.WARNING
                self._warned.add(type(error))
                reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                log.log(level, "an image or video is missing: %s", reason)
            self.done, self.seconds = self.done + 1, self.seconds + time.monotonic() - began

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                self._thread = None
                return None


def _write_video(path: Path, frames: Iterable[np.ndarray], fps: float) -> Path:
    """Encode `[H, W, 3]` uint8 frames of one size as H.264 for browsers, in a process of low priority."""
    frames = iter(frames)
    first = next(frames)
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{first.shape[1]}x{first.shape[0]}", "-r", str(fps)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    command = [find_ffmpeg(), "-y", "-v", "error", *given, "-i", "-", *_CODING, *_PLAYABLE, str(partial)]
    with tempfile.TemporaryFile() as output:
        # in its own session, so that Ctrl-C does not cut a video short
        ffmpeg = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=output, start_new_session=True)
        # kill it at the timeout: `write` and `wait` below return then
        limit = threading.Timer(LONGEST_S, ffmpeg.kill)
        limit.daemon = True
        limit.start()
        try:
            try:
                # at least the niceness of this process: an unprivileged process may not lower it
                os.setpriority(os.PRIO_PROCESS, ffmpeg.pid, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE))
            except OSError:
                pass  # ffmpeg has ended, or its priority may not be changed
            for frame in itertools.chain([first], frames):
                ffmpeg.stdin.write(np.ascontiguousarray(frame).data)
            ffmpeg.stdin.close()
        except BrokenPipeError:
            pass  # ffmpeg has ended; its exit code and output are read below
        except BaseException:
            ffmpeg.kill()
            raise
        finally:
            code, late = ffmpeg.wait(), limit.finished.is_set()
            limit.cancel()
        if code:
            output.seek(0)
            reason = output.read().decode(errors="replace").strip().splitlines()
            reason += [f"no result after {LONGEST_S:g} seconds"] if late else []
            partial.unlink(missing_ok=True)
            raise UserError(f"'{path}': ffmpeg failed ({reason[-1] if reason else f'exit code {code}'})")
    partial.replace(path)
    return path


def _by_camera(frames: list[np.ndarray], cameras: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """Split frames `[H, M W, 3]` into frames `[H, W, 3]` of each of the M cameras, without their edges."""
    if len(cameras) < 2:
        return {cameras[0] if cameras else "": frames}
    width = frames[0].shape[1] // len(cameras)
    columns = {camera: slice(i * width + SEAM, (i + 1) * width - SEAM) for i, camera in enumerate(cameras)}
    return {camera: [frame[SEAM:-SEAM, inside] for frame in frames] for camera, inside in columns.items()}


def _episode_scene(video: EpisodeVideo, views: dict[str, list[np.ndarray]], spec: EnvSpec) -> Scene:
    """Each frame has the reward of the step before it and the value of the newest decision as captions."""
    # [T + 1]: no reward before the first step, no decision after the last
    rewards, values = np.append(0.0, video.rewards), np.append(video.values, video.values[-1:])
    captions: list[tuple[str, ...]] = [
        (f"step {step}/{len(video.rewards)}", f"reward {_figure(reward)}", f"sum {_figure(total)}")
        for step, (reward, total) in enumerate(zip(rewards, rewards.cumsum(), strict=True))
    ]
    if np.isfinite(video.values).any():
        captions = [(*texts, f"value {_figure(value)}") for texts, value in zip(captions, values, strict=True)]
    captions = captions[: len(video.frames)]  # frames can be fewer: rendering may have failed during the episode
    success = video.episode.success if spec.reports_success else None
    return Scene([list(views.items())], _title(spec, video.episode.task), captions, success, spec.control_hz)


def _prediction_scene(prediction: Prediction, spec: EnvSpec) -> Scene:
    rows, errors, rewards = [], [], prediction.rewards
    for camera, true in prediction.true.items():
        # [T, H, W, 3]
        predicted = prediction.predicted[camera]
        rows.append([(f"{camera}, predicted", list(predicted)), (f"{camera}, true", list(true))])
        errors.append(np.abs(predicted.astype(np.int16) - true).mean((1, 2, 3)))
    steps, numbers = len(rewards), zip(rewards, rewards.cumsum(), np.mean(errors, 0), strict=True)
    captions: list[tuple[str, ...]] = [
        (f"decision {t}/{steps}", f"reward {_figure(reward)}", f"sum {_figure(total)}", f"error {error:.1f} of 255")
        for t, (reward, total, error) in enumerate(numbers, 1)
    ]
    return Scene(rows, _title(spec, prediction.task), captions, None, prediction.rate)


def _index_line(name: str, kind: str, progress: Progress, task: str, steps: int, reward: float) -> dict:
    line: dict[str, Any] = {"file": f"videos/{name}.mp4", "kind": kind, "settings": "", "update": progress.updates}
    line |= {"episode": progress.episodes, "task": task, "success": None}
    # JSON has no NaN and no infinity
    line |= {"reward": reward if math.isfinite(reward) else None, "steps": steps}
    return line | {"cameras": [], "strip": f"samples/{name}.png"}


def _title(spec: EnvSpec, task: int) -> str:
    return ": ".join(filter(None, (spec.task_names[task], spec.instructions[task])))


def _number(progress: Progress) -> int:
    """The number of episodes, or of updates in a phase without robots."""
    return progress.episodes or progress.updates


def _figure(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"


class _RerunFile:
    """`recording.rrd` for the Rerun viewer (`recording-2.rrd`, ... after a resume): `<name>/camera/<camera>`, `state`,
    `action`, `reward`, `value` on the timeline `step`; predictions: `<name>/{true,predicted}/<camera>` on `decision`.
    """

    def __init__(self, folder: Path):
        # here, before training: the import takes half a second
        import rerun

        self._rerun, self.folder = rerun, folder
        self._stream: Any = None

    def record_video(self, name: str, video: EpisodeVideo, views: dict[str, list[np.ndarray]]) -> None:
        for camera, images in views.items():
            self._images("step", f"{name}/camera/{camera}", images)
        self._numbers("step", name, video)
        # the first frame has no reward, the last one no decision
        self._series("step", f"{name}/reward", video.rewards, first=1)
        if np.isfinite(video.values).any():
            self._series("step", f"{name}/value", video.values)

    def prediction(self, name: str, prediction: Prediction) -> None:
        for kind, cameras in (("true", prediction.true), ("predicted", prediction.predicted)):
            for camera, images in cameras.items():
                self._images("decision", f"{name}/{kind}/{camera}", list(images), first=1)
        self._numbers("decision", name, prediction)
        self._series("decision", f"{name}/reward", prediction.rewards, first=1)

    def flush(self) -> None:
        if self._stream is not None:
            self._stream.flush()

    def _numbers(self, timeline: str, name: str, episode: EpisodeVideo | Prediction) -> None:
        for part, rows in (("state", episode.states), ("action", episode.actions)):
            if rows.shape[1]:
                self._series(timeline, f"{name}/{part}", rows)

    def _series(self, timeline: str, entity: str, values: np.ndarray, first: int = 0) -> None:
        """`values`: `[T]` or `[T, K]`; the first is at time `first`."""
        columns = self._rerun.Scalars.columns(scalars=values.astype(np.float64).ravel())
        if values.ndim == 2:
            columns = columns.partition([values.shape[1]] * len(values))
        self._send(timeline, entity, len(values), first, columns)

    def _images(self, timeline: str, entity: str, images: list[np.ndarray], first: int = 0) -> None:
        from PIL import Image

        blobs = []
        for image in images:
            file = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(image)).save(file, "JPEG", quality=_JPEG_QUALITY)
            blobs.append(file.getvalue())
        columns = self._rerun.EncodedImage.columns(blob=blobs, media_type=["image/jpeg"] * len(blobs))
        self._send(timeline, entity, len(blobs), first, columns)

    def _send(self, timeline: str, entity: str, count: int, first: int, columns: Any) -> None:
        if self._stream is None:
            self._stream = self._rerun.RecordingStream("sparring", recording_id=str(self.folder.resolve()))
            path, number = self.folder / "recording.rrd", 2
            while path.exists():
                path, number = self.folder / f"recording-{number}.rrd", number + 1
            self._stream.save(path)
        times = self._rerun.TimeColumn(timeline, sequence=range(first, first + count))
        self._stream.send_columns(entity, [times], columns)
