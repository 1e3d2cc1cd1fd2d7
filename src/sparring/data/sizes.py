"""Sizes that a caller gives."""

from numbers import Integral


def check_whole(name: str, value: int, least: int = 1) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r}: expected a whole number of {least} or more")
