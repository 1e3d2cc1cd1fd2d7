"""Statistics of the features of a dataset, as LeRobot's stats.json has them. Letters: F frames, D entries, P points."""

import numpy as np

_QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def number_statistics(values: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of rows `[F, D]`, each `[D]`, or of numbers `[F]`, each `[1]`; `count` is `[1]`."""
    values = values.reshape(len(values), -1).astype(np.float64)
    quantiles = np.quantile(values, list(_QUANTILES.values()), axis=0)
    found = {name: getattr(values, name)(axis=0) for name in ("min", "max", "mean", "std")}
    return found | {"count": np.array([len(values)])} | dict(zip(_QUANTILES, quantiles, strict=True))


def point_statistics(clouds: np.ndarray) -> dict[str, np.ndarray]:
    """Statistics of clouds `[F, P, D]` over points and frames, each `[D]`, independent of the size of a cloud.

    All except min, max and count use at most 1000 evenly spread frames: a dataset has hundreds of millions of points.
    """
    few = clouds[:: max(len(clouds) // 1000, 1)]
    found = number_statistics(few.reshape(-1, clouds.shape[-1]))
    exact = {"min": clouds.min(axis=(0, 1)), "max": clouds.max(axis=(0, 1)), "count": np.array([len(clouds)])}
    return found | {name: value.astype(found[name].dtype) for name, value in exact.items()}


def pixel_counts(frames: np.ndarray) -> np.ndarray:
    """`[3, 256]`: the number of pixels with each value in each channel of `[T, H, W, 3]` uint8."""
    return np.stack([np.bincount(frames[..., channel].ravel(), minlength=256) for channel in range(3)])


def image_statistics(counts: np.ndarray, frames: int) -> dict[str, np.ndarray]:
    """Statistics of pixels in 0..1, each `[3, 1, 1]`, from the `pixel_counts` of this number of frames."""
    levels = np.arange(256) / 255
    below = np.cumsum(counts, axis=1)
    total = below[:, -1:]
    mean = counts @ levels / total[:, 0]
    square = counts @ levels**2 / total[:, 0]
    least, most = levels[np.argmax(counts > 0, axis=1)], levels[255 - np.argmax(counts[:, ::-1] > 0, axis=1)]
    values = {"min": least, "max": most, "mean": mean, "std": np.sqrt(np.maximum(square - mean**2, 0))}
    values |= {name: levels[np.argmax(below >= part * total, axis=1)] for name, part in _QUANTILES.items()}
    return {"count": np.array([frames])} | {name: value.reshape(3, 1, 1) for name, value in values.items()}
