"""The config: sections, the tree they form, and how it is read."""

from typing import TYPE_CHECKING

from sparring import lazy_names

if TYPE_CHECKING:
    from sparring.config.section import Section

__all__ = ["Section"]
# folders at the end of sys.path while your.module:Class is looked for; of the command line, the one that it is given in
IMPORTED_FROM: list[str] = []
__getattr__, __dir__ = lazy_names("sparring.config", {"Section": "section"})
