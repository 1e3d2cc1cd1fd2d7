"""A and B on the same episodes: by how much A is ahead, and how sure that is. All of it is about differences in pairs.

Letters: n pairs; of these `both` succeed in both, `only_a`, `only_b`, and `neither`.
"""

import math
from dataclasses import dataclass

import numpy as np

from sparring.errors import UserError
from sparring.evaluate import wilson

# of signs; so many at a time, for the memory's sake
FLIPS, AT_A_TIME = 10_000, 500
# below this p, a difference is said to be shown
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Difference:
    """Mean of A minus mean of B, its 95 % interval, and how often chance alone would put them at least so far apart."""

    effect: float
    low: float
    high: float
    p: float

    @property
    def is_shown(self) -> bool:
        """By the test and by the interval."""
        return self.p < SIGNIFICANT and self._apart

    @property
    def is_on_the_edge(self) -> bool:
        """One of them says so, the other does not."""
        return (self.p < SIGNIFICANT) != self._apart

    @property
    def _apart(self) -> bool:
        return self.low > 0 or self.high < 0


def in_successes(a: np.ndarray, b: np.ndarray) -> Difference:
    """Of `[n]` bool: McNemar's mid-p test, and Newcombe's interval for paired proportions (1998, method 10)."""
    both, only_a, only_b, neither = (int(x.sum()) for x in (a & b, a & ~b, b & ~a, ~a & ~b))
    effect = (only_a - only_b) / len(a)
    of_a, of_b = wilson(both + only_a, len(a)), wilson(both + only_b, len(b))
    phi = _correlation(both, only_a, only_b, neither)
    low = effect - _margin(of_a.rate - of_a.low, of_b.high - of_b.rate, phi)
    high = effect + _margin(of_a.high - of_a.rate, of_b.rate - of_b.low, phi)
    return Difference(effect, low, high, mcnemar(only_a, only_b))


def in_means(a: np.ndarray, b: np.ndarray, seed: int = 0) -> Difference:
    """Of `[n]` numbers, n > 1: Student's interval of the mean gap, and a test that flips the gaps' signs.

    Were A no better than B, each gap could as well be the other way round.
    """
    with np.errstate(invalid="ignore"):  # of what is infinite in both
        gaps = np.asarray(a, float) - np.asarray(b, float)
    if not np.isfinite(gaps).all():
        lost = f"{(~np.isfinite(gaps)).sum()} of {len(gaps)} episodes have figures that are not finite"
        raise UserError(f"{lost}, so means cannot be compared; look for what diverged: sparring eval of each")
    n, effect, rng = len(gaps), float(gaps.mean()), np.random.default_rng(seed)
    # rounding must not make a flip that changes nothing look smaller than what was seen
    seen = abs(effect) - 1e-9 * np.abs(gaps).mean()
    as_far = 0
    for _ in range(FLIPS // AT_A_TIME):
        signs = rng.integers(0, 2, (AT_A_TIME, n)) * 2.0 - 1.0
        as_far += int((np.abs(signs @ gaps / n) >= seen).sum())
    margin = student(n - 1) * float(gaps.std(ddof=1)) / math.sqrt(n)
    return Difference(effect, effect - margin, effect + margin, (1 + as_far) / (1 + FLIPS))


def student(freedom: int) -> float:
    """The 97.5 % point of Student's distribution, by the expansion of Cornish and Fisher; exact enough from 5 on."""
    z = 1.959964
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided: were one of them not better, each unlike pair would be a fair coin.

    What was seen counts half (mid-p; Fagerland, Lydersen, Laake 2013): counted whole, the test is so careful that it
    often finds nothing where the interval does.
    """
    if only_a == only_b:
        return 1.0
    unlike, fewer = only_a + only_b, min(only_a, only_b)
    tail = sum(math.comb(unlike, k) for k in range(fewer + 1))
    return (2 * tail - math.comb(unlike, fewer)) / 2**unlike


def _correlation(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Between A's successes and B's, corrected towards 0 for small numbers where it is positive."""
    product = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if not product:
        return 0.0
    gap = both * neither - only_a * only_b
    gap = gap if gap < 0 else max(0.0, gap - (both + only_a + only_b + neither) / 2)
    return gap / math.sqrt(product)


def _margin(own: float, other: float, phi: float) -> float:
    return math.sqrt(max(0.0, own**2 - 2 * phi * own * other + other**2))
