"""H.264 videos with random access: written per episode, joined without re-encoding, read by time and frame count.

Every second frame is a key frame and no frame refers to a later one, so that seeking to any frame is cheap and clips
can be joined at any frame. A single encoder thread makes the bytes deterministic.
"""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import UserError

CODEC = "h264"
_QUALITY = "12"
# timeout of ffmpeg per file
_TIMEOUT_S = 1800.0
# flags for an exact colour conversion; ffmpeg's default is fast but inexact
_EXACT = "accurate_rnd+full_chroma_int+full_chroma_inp"


def find_ffmpeg() -> str:
    """The path of ffmpeg, which imageio-ffmpeg installs."""
    import imageio_ffmpeg

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise UserError(f"ffmpeg is missing: {error} (pip install --force-reinstall imageio-ffmpeg)") from None


def encode(path: Path, frames: np.ndarray, fps: int, pixel_format: str) -> None:
    """Write frames `[T, H, W, 3]` uint8 with even height and width."""
    height, width = frames.shape[1:3]
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
    coding = ["-c:v", "libx264", "-crf", _QUALITY, "-g", "2", "-bf", "0", "-threads", "1", "-pix_fmt", pixel_format]
    filters = ["-vf", f"scale=flags={_EXACT}+area"]
    _run([*given, *filters, *coding, "-fflags", "+bitexact", str(path)], path, np.ascontiguousarray(frames).tobytes())


def join(path: Path, clips: list[Path], folder: Path) -> None:
    """Concatenate clips with equal encoding into one file; all clips are in `folder`."""
    # names relative to the list need no quoting
    names = folder / f"{path.stem}.txt"
    names.write_text("".join(f"file {clip.relative_to(folder).as_posix()}\n" for clip in clips))
    given = ["-f", "concat", "-safe", "0", "-i", str(names)]
    _run([*given, "-c", "copy", "-fflags", "+bitexact", "-movflags", "+faststart", str(path)], path)


def count(path: Path) -> int:
    """The number of frames up to the first damaged one; by default ffmpeg would skip damaged frames."""
    strict = ["-xerror", "-err_detect", "explode", "-i", str(path)]
    # one line per frame, after comments that begin with #
    lines = _ffmpeg([*strict, "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "framecrc", "-"]).stdout
    return sum(not line.startswith(b"#") for line in lines.splitlines())


def decode(path: Path, start: float, count: int, fps: float, height: int, width: int) -> np.ndarray:
    """`[count, height, width, 3]` uint8: the frame shown at `start` seconds and those after it."""
    # half a frame early: ffmpeg begins with the first frame at or after this time
    seek = start - 0.5 / fps
    given = (["-ss", f"{seek:.6f}"] if seek > 0 else []) + ["-i", str(path)]
    scale = f"scale={width}:{height}:flags={_EXACT}+bicubic"
    wanted = ["-frames:v", str(count), "-fps_mode", "passthrough", "-vf", scale]
    raw = _run([*given, "-map", "0:v:0", *wanted, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], path)
    frames = np.frombuffer(raw, np.uint8)
    if len(frames) != count * height * width * 3:
        found = len(frames) // (height * width * 3)
        advice = "it is incomplete or of another dataset: copy it again"
        raise UserError(f"'{path}' has only {found} of the {count} frames from {start:.2f} s on; {advice}")
    return frames.reshape(count, height, width, 3)


def _run(arguments: list[str], path: Path, given: bytes | None = None) -> bytes:
    result = _ffmpeg(arguments, given)
    if result.returncode:
        reason = result.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"'{path}': ffmpeg failed ({reason[-1] if reason else f'exit code {result.returncode}'})")
    return result.stdout


def _ffmpeg(arguments: list[str], given: bytes | None = None) -> subprocess.CompletedProcess:
    command = [find_ffmpeg(), "-y", "-v", "error", *arguments]
    # empty input, so that ffmpeg does not read from the terminal; its own session, so that Ctrl-C does not interrupt it
    options: dict[str, Any] = {"input": given or b"", "capture_output": True, "start_new_session": True}
    try:
        return subprocess.run(command, timeout=_TIMEOUT_S, **options)
    except subprocess.TimeoutExpired:
        raise UserError(f"ffmpeg has not finished within {_TIMEOUT_S:g} seconds: {' '.join(arguments)}") from None
