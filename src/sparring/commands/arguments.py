"""What commands' arguments have in common."""

import argparse

OPTIONS = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}


def positive(text: str) -> int:
    return count(text, least=1)


def count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number >= {least}, got '{text}'")
    return int(text)


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None
