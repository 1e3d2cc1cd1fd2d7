"""From the `algorithm` of a config to an Algorithm."""

from sparring.algorithms import ALGORITHMS
from sparring.resolve import resolve


def make_algorithm(name: str, config, policy, distributed, seed: int):
    return resolve(name, ALGORITHMS, "algorithm")(config, policy, distributed, seed)
