"""The config: sections, the tree they form, and how it is read."""

from sparring.config.section import Section

__all__ = ["Section"]
