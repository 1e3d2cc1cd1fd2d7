"""The config: its sections, its schema, and reading it from files and the command line."""

from typing import TYPE_CHECKING

from sparring import lazy_names

if TYPE_CHECKING:
    from sparring.config.section import Section

__all__ = ["Section"]
# folders appended to sys.path to find your.module:Class; the command line sets it to the working directory
IMPORTED_FROM: list[str] = []
__getattr__, __dir__ = lazy_names("sparring.config", {"Section": "section"})
