"""H.264 that can be read frame by frame: written per episode, joined without encoding again, read by time and count.

Every second frame is a key frame and no frame refers to a later one, so that a reader lands on any frame at little
cost, and clips can be joined at any frame. One encoder thread: the same pictures give the same bytes.
"""

import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from sparring.errors import UserError

CODEC = "h264"
_QUALITY = "12"
# seconds that ffmpeg may take for one file
_LONGEST_S = 1800.0
# of ffmpeg's colour conversion, which by default is fast rather than right
_EXACT = "accurate_rnd+full_chroma_int+full_chroma_inp"


def find_ffmpeg() -> str:
    """The path of ffmpeg; imageio-ffmpeg brings one."""
    import imageio_ffmpeg

    try:
        return imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError as error:
        raise UserError(f"no videos: {error} (pip install --force-reinstall imageio-ffmpeg)") from None


def encode(path: Path, frames: np.ndarray, fps: int, pixel_format: str) -> None:
    """`[T, H, W, 3]` uint8, with even sides."""
    height, width = frames.shape[1:3]
    given = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
    coding = ["-c:v", "libx264", "-crf", _QUALITY, "-g", "2", "-bf", "0", "-threads", "1", "-pix_fmt", pixel_format]
    filters = ["-vf", f"scale=flags={_EXACT}+area"]
    _run([*given, *filters, *coding, "-fflags", "+bitexact", str(path)], path, np.ascontiguousarray(frames).tobytes())


def join(path: Path, clips: list[Path], folder: Path) -> None:
    """One file out of clips that were encoded alike; all of them lie below `folder`."""
    # names relative to the list need no quoting
    names = folder / f"{path.stem}.txt"
    names.write_text("".join(f"file {clip.relative_to(folder).as_posix()}\n" for clip in clips))
    given = ["-f", "concat", "-safe", "0", "-i", str(names)]
    _run([*given, "-c", "copy", "-fflags", "+bitexact", "-movflags", "+faststart", str(path)], path)


def count(path: Path) -> int:
    """Frames that can be decoded, up to the first that cannot; ffmpeg itself passes over what is damaged."""
    strict = ["-xerror", "-err_detect", "explode", "-i", str(path)]
    # a line for each frame, after some that begin with #
    lines = _ffmpeg([*strict, "-map", "0:v:0", "-fps_mode", "passthrough", "-f", "framecrc", "-"]).stdout
    return sum(not line.startswith(b"#") for line in lines.splitlines())


def decode(path: Path, start: float, count: int, fps: float, height: int, width: int) -> np.ndarray:
    """`[count, height, width, 3]` uint8: the frame shown at `start` seconds and those after it."""
    # half a frame early: what ffmpeg shows first is the first frame that is not before this moment
    moment = start - 0.5 / fps
    given = (["-ss", f"{moment:.6f}"] if moment > 0 else []) + ["-i", str(path)]
    scale = f"scale={width}:{height}:flags={_EXACT}+bicubic"
    wanted = ["-frames:v", str(count), "-fps_mode", "passthrough", "-vf", scale]
    raw = _run([*given, "-map", "0:v:0", *wanted, "-f", "rawvideo", "-pix_fmt", "rgb24", "-"], path)
    frames = np.frombuffer(raw, np.uint8)
    if len(frames) != count * height * width * 3:
        seen = len(frames) // (height * width * 3)
        advice = "it is cut off or of another dataset: copy it again"
        raise UserError(f"'{path}' has only {seen} of the {count} frames from {start:.2f} s on; {advice}")
    return frames.reshape(count, height, width, 3)


def _run(arguments: list[str], path: Path, given: bytes | None = None) -> bytes:
    result = _ffmpeg(arguments, given)
    if result.returncode:
        reason = result.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"'{path}': ffmpeg failed ({reason[-1] if reason else f'exit code {result.returncode}'})")
    return result.stdout


def _ffmpeg(arguments: list[str], given: bytes | None = None) -> subprocess.CompletedProcess:
    command = [find_ffmpeg(), "-y", "-v", "error", *arguments]
    # without input ffmpeg must not read the terminal's; its own session, as Ctrl-C must not cut a clip short
    kept: dict[str, Any] = {"input": given or b"", "capture_output": True, "start_new_session": True}
    try:
        return subprocess.run(command, timeout=_LONGEST_S, **kept)
    except subprocess.TimeoutExpired:
        raise UserError(f"ffmpeg was not done after {_LONGEST_S:g} seconds: {' '.join(arguments)}") from None
