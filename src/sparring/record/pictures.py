"""PNG and MP4 (H.264) writers. Heavy libraries are imported where used. A file that is there is whole."""

import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sparring.data.video import find_ffmpeg
from sparring.errors import UserError

# between the frames of a film strip, pixels
_GAP, _PAPER = 8, 250
# small files soon; yuv420p and the index in front are what browsers want; one thread, as others train meanwhile
_CODING = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-threads", "1"]
_PLAYABLE = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p", "-movflags", "+faststart", "-f", "mp4"]
_NICE = 10


def write_png(path: Path, picture: np.ndarray) -> Path:
    """`[H, W, 3]` uint8."""
    from PIL import Image

    if path.suffix.lower() != ".png":
        raise UserError(f"'{path}' does not end in .png; pictures are written as PNG")
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(picture)).save(partial, "PNG", compress_level=3)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"cannot write '{path}': {error.strerror or error}") from None
    return path


def write_video(path: Path, frames: Iterable[np.ndarray], fps: float) -> Path:
    """`[H, W, 3]` uint8 frames of one size, as H.264 that browsers play, by a process that gives way to others."""
    frames = iter(frames)
    first = next(frames)
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{first.shape[1]}x{first.shape[0]}", "-r", str(fps)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    command = [find_ffmpeg(), "-y", "-v", "error", *given, "-i", "-", *_CODING, *_PLAYABLE, str(partial)]
    with tempfile.TemporaryFile() as words:
        # of its own session: Ctrl-C is ours to answer, and must not cut a video short
        ffmpeg = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=words, start_new_session=True)
        try:
            _give_way(ffmpeg.pid)
            for frame in itertools.chain([first], frames):
                ffmpeg.stdin.write(np.ascontiguousarray(frame).data)
            ffmpeg.stdin.close()
        except BrokenPipeError:
            pass  # it has ended, and says why
        except BaseException:
            ffmpeg.kill()
            raise
        finally:
            code = ffmpeg.wait()
        if code:
            words.seek(0)
            reason = words.read().decode(errors="replace").strip().splitlines()
            partial.unlink(missing_ok=True)
            raise UserError(f"'{path}': ffmpeg failed ({reason[-1] if reason else f'exit code {code}'})")
    partial.replace(path)
    return path


def _give_way(pid: int) -> None:
    """To others; a process that has ended, or that may not be told, is as it is."""
    try:
        # never less than we do: whoever is nice himself may not take that back
        os.setpriority(os.PRIO_PROCESS, pid, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE))
    except OSError:
        pass


def filmstrip(frames: list[np.ndarray], columns: int = 3, rows: int = 2) -> np.ndarray:
    """Frames spread evenly over an episode, first to last, in reading order, with a gap between them."""
    picks = np.linspace(0, len(frames) - 1, columns * rows).round().astype(int)
    height, width, _ = frames[0].shape
    strip = np.full((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, 3), _PAPER, np.uint8)
    for place, frame in enumerate(picks):
        top, left = place // columns * (height + _GAP), place % columns * (width + _GAP)
        strip[top : top + height, left : left + width] = frames[frame]
    return strip
