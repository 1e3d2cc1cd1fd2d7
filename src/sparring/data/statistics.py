"""Normalisation statistics of a dataset, under the names that LeRobot gives them. Numpy only."""

import numpy as np

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def of_numbers(values: np.ndarray) -> dict[str, np.ndarray]:
    """Of rows `[F, D]` or numbers `[F]`: `[D]` each, or `[1]`; `count` is `[1]`."""
    values = values.reshape(len(values), -1).astype(np.float64)
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(values)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


def of_points(clouds: np.ndarray) -> dict[str, np.ndarray]:
    """Of clouds `[F, P, D]`: `[D]` each, over points and frames, which fit a cloud of any size.

    All but min and max are those of at most 1000 frames, evenly spread: a dataset has hundreds of millions of points.
    """
    few = clouds[:: max(len(clouds) // 1000, 1)]
    found = of_numbers(few.reshape(-1, clouds.shape[-1]))
    exact = {"min": clouds.min(axis=(0, 1)), "max": clouds.max(axis=(0, 1)), "count": np.array([len(clouds)])}
    return found | {name: value.astype(found[name].dtype) for name, value in exact.items()}


def pixel_counts(frames: np.ndarray) -> np.ndarray:
    """`[3, 256]`: how often each value occurs in each channel of `[T, H, W, 3]` uint8."""
    return np.stack([np.bincount(frames[..., channel].ravel(), minlength=256) for channel in range(3)])


def of_pictures(counts: np.ndarray, frames: int) -> dict[str, np.ndarray]:
    """Of `pixel_counts` of so many frames: `[3, 1, 1]` each, with pixels in 0..1."""
    levels = np.arange(256) / 255
    below = np.cumsum(counts, axis=1)
    total = below[:, -1:]
    mean = counts @ levels / total[:, 0]
    square = counts @ levels**2 / total[:, 0]
    values = {
        "min": levels[np.argmax(counts > 0, axis=1)],
        "max": levels[255 - np.argmax(counts[:, ::-1] > 0, axis=1)],
        "mean": mean,
        "std": np.sqrt(np.maximum(square - mean**2, 0)),
        **{name: levels[np.argmax(below >= part * total, axis=1)] for name, part in QUANTILES.items()},
    }
    return {"count": np.array([frames])} | {name: value.reshape(3, 1, 1) for name, value in values.items()}
