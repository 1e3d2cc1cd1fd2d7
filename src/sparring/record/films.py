"""Videos of episodes: drawn, encoded, written."""

import json
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from sparring.collect.camera import Film
from sparring.contract import EnvSpec
from sparring.envs.backend import SEAM
from sparring.errors import UserError
from sparring.phases.phase import Progress
from sparring.phases.replay import Foretold
from sparring.record.log import LOGGER
from sparring.record.overlay import Scene, filmstrip, frames, write_png, write_video
from sparring.record.rerun import RerunFile

# ---- One thread that draws and encodes what training has filmed, so that training does not wait for it.


log = logging.getLogger(LOGGER)
# videos that wait for their turn; a run films a few at a time
WAITING = 32
# what is left when a run ends gets so long, seconds
PATIENCE_S = 120.0


class Encoder:
    """Does jobs in the order they came, in a thread that is there only while there is something to do.

    When `waiting` jobs wait, a further one is left out, and how many were is told: a video less is better than training
    that stands still, or a queue that grows until memory is full. What goes wrong in a job is told once, as a warning,
    and costs no more than its picture.
    """

    def __init__(self, waiting: int = WAITING):
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue(waiting)
        self._thread: threading.Thread | None = None
        # held while a job is put in and while the thread finds that there is none
        self._lock = threading.Lock()
        self._told: set[type[Exception]] = set()
        self.left_out = 0
        # jobs that are done, and how long they took
        self.done, self.seconds = 0, 0.0

    def submit(self, job: Callable[[], None]) -> bool:
        """At once. False: it was left out."""
        with self._lock:
            try:
                self._jobs.put_nowait(job)
            except queue.Full:
                self.left_out += 1
                return False
            if self._thread is None:
                # a daemon: a process that is told to end at once does
                self._thread = threading.Thread(target=self._work, name="encoder", daemon=True)
                self._thread.start()
        return True

    def finish(self, patience_s: float = PATIENCE_S) -> None:
        """Wait until all is done, though not for ever."""
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)
            if thread.is_alive():
                log.warning("%s videos or pictures are not ready after %.0f s", self._jobs.qsize() + 1, patience_s)
        if self.left_out:
            advice = "set rollout.render_episodes lower, or training.save_every and training.log_every higher"
            log.warning(
                "%s videos or pictures were left out, as %s waited; %s", self.left_out, self._jobs.maxsize, advice
            )
            self.left_out = 0

    def _work(self) -> None:
        while (job := self._next()) is not None:
            began = time.monotonic()
            try:
                job()
            except Exception as error:  # drawing, disks and ffmpeg fail in many ways; training goes on in each
                self._tell(error)
            self.done, self.seconds = self.done + 1, self.seconds + time.monotonic() - began

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            try:
                return self._jobs.get_nowait()
            except queue.Empty:
                self._thread = None
                return None

    def _tell(self, error: Exception) -> None:
        """As a warning once of each kind: its words name the file, and so are never the same."""
        what = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        level = logging.DEBUG if type(error) in self._told else logging.WARNING
        self._told.add(type(error))
        log.log(level, "a picture or video is missing: %s", what)


# ---- What robots did and what world models foretold, as videos, strips of pictures and a Rerun recording.


# seconds that a video takes, as long as none was made
FIRST_GUESS_S = 1.5


@dataclass(frozen=True)
class Video:
    """What `videos/index.jsonl` tells of one beside its files."""

    name: str
    # rollout, evaluation, prediction, or eval: of `sparring eval`
    kind: str
    progress: Progress
    task: str
    cameras: tuple[str, ...]
    steps: int
    reward: float
    success: bool | None
    # those of an `eval` that make other episodes than the run's own, in words
    settings: str = ""

    def line(self, file: Path, strip: Path) -> dict:
        return {
            "file": file.as_posix(),
            "kind": self.kind,
            "settings": self.settings,
            "update": self.progress.updates,
            "episode": self.progress.episodes,
            "task": self.task,
            "success": self.success,
            # what is no number is not JSON either
            "reward": self.reward if math.isfinite(self.reward) else None,
            "steps": self.steps,
            "cameras": list(self.cameras),
            "strip": strip.as_posix(),
        }


class Films:
    """Writes `videos/*.mp4`, `videos/index.jsonl`, `samples/*.png` and, with `rerun`, `recording.rrd` under a folder.

    All of it by an encoder, while training goes on; `finish` waits for it. Whoever sends videos elsewhere is told of
    each in the encoder's thread: `on_video(file, line of the index)`.
    """

    def __init__(
        self,
        folder: Path,
        rerun: bool = False,
        on_video: Callable[[Path, dict], None] | None = None,
        share: float = 1.0,
    ):
        """`share`: of the time since then, what videos other than of evaluations may take."""
        self.folder, self.on_video = folder, on_video
        self.share, self.began = share, time.monotonic()
        self.encoder = Encoder()
        self.rerun = RerunFile(folder) if rerun else None

    def affords(self, videos: int = 1) -> bool:
        """Whether there is time for so many more; what one takes is learned from those before."""
        encoder = self.encoder
        each = encoder.seconds / encoder.done if encoder.done else FIRST_GUESS_S
        return self.share == 1 or encoder.seconds + videos * each <= self.share * (time.monotonic() - self.began)

    def rollouts(self, films: list[Film], progress: Progress, spec: EnvSpec) -> None:
        """Training episodes that ended in this update."""
        for film in films:
            self.film(f"rollout_{progress.updates:06d}_{film.episode.env}", "rollout", film, progress, spec)

    def evaluation(self, films: list[Film], progress: Progress, spec: EnvSpec) -> None:
        for number, film in enumerate(films):
            self.film(f"episode_{_when(progress)}_{number}", "evaluation", film, progress, spec)

    def film(self, name: str, kind: str, film: Film, progress: Progress, spec: EnvSpec, settings: str = "") -> Path:
        """An episode as a video and as six of its moments; where the video will be."""
        path = self.folder / "videos" / f"{name}.mp4"
        episode = film.episode
        video = Video(
            name,
            kind,
            replace(progress),
            spec.task_names[episode.task],
            spec.film_cameras,
            episode.steps,
            episode.reward,
            episode.success if spec.reports_success else None,
            settings,
        )
        if self.encoder.submit(partial(self._make_film, video, film, spec)):
            log.info("to look at: %s", path)
        return path

    def prediction(self, foretold: Foretold, progress: Progress, spec: EnvSpec, anyway: bool = False) -> None:
        """An episode beside what a world model foretold: its middle as a picture and, where there is time or `anyway`,
        all of it as a video.
        """
        number = _number(progress)
        video = Video(
            f"episode_{number:06d}",
            "prediction",
            replace(progress),
            spec.task_names[foretold.task],
            tuple(foretold.true),
            len(foretold.rewards),
            float(foretold.rewards.sum()),
            None,
        )
        picture = f"episode_{number:04d}_pred_vs_gt"
        self.encoder.submit(partial(self._make_prediction, video, picture, foretold, spec, anyway))

    def finish(self, patience_s: float = PATIENCE_S) -> None:
        """Wait for all that was filmed."""
        self.encoder.finish(patience_s)
        if self.rerun is not None:
            self.rerun.flush()

    def _make_film(self, video: Video, film: Film, spec: EnvSpec) -> None:
        film = film.developed()
        strip = Path("samples", f"{video.name}.png")
        write_png(self.folder / strip, filmstrip(film.frames))
        views = by_camera(film.frames, spec.film_cameras)
        self._make(video, strip, film_scene(film, views, spec))
        if self.rerun is not None:
            self.rerun.film(video.name, film, views)

    def _make_prediction(self, video: Video, picture: str, foretold: Foretold, spec: EnvSpec, anyway: bool) -> None:
        strip = Path("samples", f"{picture}.png")
        write_png(self.folder / strip, foretold.moment(video.steps // 2))
        if not (anyway or self.affords()):
            return
        self._make(video, strip, prediction_scene(foretold, spec))
        if self.rerun is not None:
            self.rerun.prediction(video.name, foretold)

    def _make(self, video: Video, strip: Path, scene: Scene) -> None:
        file = Path("videos", f"{video.name}.mp4")
        write_video(self.folder / file, frames(scene), scene.fps)
        line = video.line(file, strip)
        with (self.folder / "videos" / "index.jsonl").open("a") as index:
            index.write(json.dumps(line) + "\n")
        if self.on_video is not None:
            self.on_video(self.folder / file, line)


def film_scene(film: Film, views: dict[str, list[np.ndarray]], spec: EnvSpec) -> Scene:
    """Each picture with the reward of the step that led to it and the value of the newest decision."""
    steps, valued = len(film.rewards), np.isfinite(film.values).any()
    # [T + 1]: nothing is paid before the first step, and nothing decided after the last
    rewards, values = np.concatenate([[0.0], film.rewards]), np.concatenate([film.values, film.values[-1:]])
    captions = []
    for moment, (reward, total, value) in enumerate(zip(rewards, rewards.cumsum(), values, strict=True)):
        words = (f"step {moment}/{steps}", f"reward {_figure(reward)}", f"sum {_figure(total)}")
        captions.append((*words, f"value {_figure(value)}") if valued else words)
    # a simulator may have stopped drawing on the way
    captions = captions[: len(film.frames)]
    success = film.episode.success if spec.reports_success else None
    return Scene([list(views.items())], _title(spec, film.episode.task), captions, success, spec.control_hz)


def prediction_scene(foretold: Foretold, spec: EnvSpec) -> Scene:
    rows = [
        [(f"{camera}, predicted", list(foretold.predicted[camera])), (f"{camera}, true", list(true))]
        for camera, true in foretold.true.items()
    ]
    decisions, total = len(foretold.rewards), foretold.rewards.cumsum()
    off = np.mean(
        [
            np.abs(foretold.predicted[camera].astype(np.int16) - true).mean((1, 2, 3))
            for camera, true in foretold.true.items()
        ],
        axis=0,
    )
    captions = [
        (
            f"decision {t + 1}/{decisions}",
            f"reward {_figure(foretold.rewards[t])}",
            f"sum {_figure(total[t])}",
            f"off by {off[t]:.1f} of 255",
        )
        for t in range(decisions)
    ]
    return Scene(rows, _title(spec, foretold.task), captions, None, foretold.rate)


def by_camera(pictures: list[np.ndarray], cameras: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    """`[H, M W, 3]` each -> `[H, W, 3]` of each of the M cameras, less their edges."""
    if len(cameras) < 2:
        return {cameras[0] if cameras else "": pictures}
    width = pictures[0].shape[1] // len(cameras)
    inside = [slice(place * width + SEAM, (place + 1) * width - SEAM) for place in range(len(cameras))]
    return {
        camera: [picture[SEAM:-SEAM, columns] for picture in pictures]
        for camera, columns in zip(cameras, inside, strict=True)
    }


def _title(spec: EnvSpec, task: int) -> str:
    return ": ".join(filter(None, (spec.task_names[task], spec.instructions[task])))


def _number(progress: Progress) -> int:
    """Where no robot acts, updates are all there is to count."""
    return progress.episodes or progress.updates


def _when(progress: Progress) -> str:
    """As `_number`, with the update: a policy may be evaluated twice while no episode ends."""
    counted = f"{_number(progress):06d}"
    return f"{counted}_{progress.updates:06d}" if progress.episodes else counted


def _figure(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 100 else f"{value:,.0f}"
