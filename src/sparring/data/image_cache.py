"""Decoded images of a dataset in memory-mapped files next to it: training reads steps at random.

<dataset>.cache/<camera>-<height>x<width>-<hash of the sources>.npy: an array in numpy's format, then a CRC-32 of each
episode. Letters: T steps of an episode, F steps of all episodes."""

import hashlib
import logging
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from sparring.data.dataset import Dataset, DatasetError
from sparring.errors import UserError
from sparring.processes.child import usable_cores

log = logging.getLogger(__name__)


def decoded(dataset: Dataset, key: str, camera: str, episode: int, height: int, width: int) -> np.ndarray:
    """`[T, 3, H, W]` uint8. `key`: of the images in the dataset; `camera`: its name, for messages and files."""
    try:
        frames = dataset.cameras[key].read(episode, height, width)
    except UserError as error:
        raise DatasetError(f"{error} (episode {episode}, camera {camera})") from None
    if (found := len(frames)) != (expected := dataset.lengths[episode]):
        raise DatasetError(f"'{dataset.path}': {key} has {found} images in episode {episode}, expected {expected}")
    # [T, H, W, 3] -> [T, 3, H, W]
    return np.ascontiguousarray(frames.transpose(0, 3, 1, 2))


def open_cache(dataset: Dataset, key: str, camera: str, height: int, width: int) -> np.ndarray:
    """`[F, 3, H, W]` uint8 of all steps, decoded if the cache is missing, damaged or of other files."""
    sources = dataset.cameras[key].stamp()
    mark = hashlib.sha256(repr((sources, dataset.lengths.tolist())).encode()).hexdigest()[:12]
    folder = dataset.path.resolve().with_name(f"{dataset.path.resolve().name}.cache")
    file = folder / f"{camera}-{height}x{width}-{mark}.npy"
    shape = (dataset.steps, 3, height, width)
    if (cache := _open_intact(file, dataset, shape)) is None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f"{file.stem}.{os.getpid()}.partial"
            _write(partial, dataset, key, camera, shape, _first_sum(file))
            os.replace(partial, file)
        except OSError as error:
            why = error.strerror or error
            raise DatasetError(f"'{file}': cannot store decoded images ({why}); make room") from None
        cache = np.load(file, mmap_mode="r")
    return cache


def _write(file: Path, dataset: Dataset, key: str, camera: str, shape: tuple[int, ...], first_sum: int) -> None:
    sums = []
    # not through a memory map: on a full disk that would kill the process
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for episode in range(len(dataset.lengths)):
            frames = decoded(dataset, key, camera, episode, *shape[2:])
            sums.append(zlib.crc32(frames.data, first_sum))
            opened.write(frames.data)
        opened.write(np.array(sums, np.uint32).tobytes())


def _open_intact(file: Path, dataset: Dataset, shape: tuple[int, ...]) -> np.ndarray | None:
    """The cache, or None if it is missing or damaged; reads all of it to compare checksums."""
    if not os.path.lexists(file):
        return None
    episodes = len(dataset.lengths)
    try:
        if not file.is_file():
            raise ValueError("not a regular file")
        cache = np.load(file, mmap_mode="r")
        with file.open("rb") as opened:
            opened.seek(-4 * episodes, os.SEEK_END)
            written = np.frombuffer(opened.read(), np.uint32)
        size = cache.offset + cache.nbytes + 4 * episodes
        is_complete = cache.shape == shape and cache.dtype == np.uint8 and file.stat().st_size == size
    except (OSError, ValueError, EOFError, AttributeError):
        is_complete = False
    if is_complete:
        starts, first_sum = dataset.starts, _first_sum(file)
        parts = (cache[starts[i] : starts[i + 1]] for i in range(episodes))
        with ThreadPoolExecutor(usable_cores()) as pool:
            found = pool.map(lambda frames: zlib.crc32(np.ascontiguousarray(frames).data, first_sum), parts)
            if np.array_equal(list(found), written):
                return cache
    log.warning("'%s' is damaged or from an earlier version; its frames are decoded again", file)
    return None


def _first_sum(file: Path) -> int:
    """The initial checksum: with it, the file of another camera under this name does not verify."""
    return zlib.crc32(file.name.encode())
