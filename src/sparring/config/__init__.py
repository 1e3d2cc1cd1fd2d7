"""The config: sections, the tree they form, and how it is read."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparring.config.section import Section

__all__ = ["Section"]


def __getattr__(name: str) -> Any:
    if name != "Section":
        raise AttributeError(f"module 'sparring.config' has no attribute '{name}'; it offers Section")
    from sparring.config.section import Section

    return Section
