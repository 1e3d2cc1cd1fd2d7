"""The documentation site: `sphinx-build -W --keep-going -b html docs build/site` (extra `docs`).

The pages below docs/_generated are written at each build from the code: commands and flags from the argument parser,
settings from the config schema.
"""

import argparse
import re
from pathlib import Path

import sparring
from sparring.cli.main import build_parser
from sparring.config.schema import CLASSES, SCHEMA, Config
from sparring.config.section import accepted
from sparring.envs.configs import GymConfig

ROOT = Path(__file__).parent.parent
GENERATED = Path(__file__).parent / "_generated"
# files of the repository that are pages of the site, too
OUTSIDE = {"benchmarks/README.md": "benchmarks", "CONTRIBUTING.md": "contributing", "CHANGELOG.md": "changelog"}

project, author = "Sparring", "The Sparring authors"
copyright = "2026, The Sparring authors"
version = release = sparring.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["images"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# docstrings name code in single backticks, as Markdown does
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
add_module_names = False

html_theme = "furo"
html_title = f"Sparring {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["_static"]
html_css_files = ["tables.css"]
copybutton_prompt_text = "$ "


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def settings_page() -> str:
    """Each section of the config, and each class that a `name` may choose: key, default, accepted values, meaning."""
    kinds = {"env": {**CLASSES["env"], "gym:<id>": GymConfig}}
    kinds |= {name: known for name, known in CLASSES.items() if name != "env"}
    text = ["# Settings", ""]
    text += ["All keys of the config, generated from the schema. Give them as `section.key=value` on the command line,"]
    text += ["or in a YAML file (`--config FILE`). `sparring config PHASE` prints the resolved values of a phase.", ""]
    text += ["## Top level", "", settings_of("", Config, skip=SCHEMA.is_section), ""]
    for name, info in Config.model_fields.items():
        if name in kinds:
            text += [f"## `{name}`", ""]
            for kind, cls in kinds[name].items():
                text += [f"### `{name}.name={kind}`", "", first_line(cls), "", settings_of(f"{name}.", cls), ""]
        elif SCHEMA.is_section(name) and name != "algorithm_config":
            cls = info.annotation
            text += [f"## `{name}`", "", first_line(cls), "", settings_of(f"{name}.", cls), ""]
    return "\n".join(text)


def first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().partition("\n")[0]


def settings_of(prefix: str, cls: type, skip=lambda name: False) -> str:
    rows = []
    for name, info in cls.model_fields.items():
        if not skip(name):
            value = "required" if info.is_required() else f"`{plain(info.get_default(call_default_factory=True))}`"
            # <camera> is text, not an HTML element
            meaning = (info.description or "").replace("<", "&lt;")
            rows.append((f"`{prefix}{name}`", value, meaning, accepted(info).replace("<", "&lt;")))
    return table(("key", "default", "meaning", "accepted"), rows)


def plain(value: object) -> str:
    """A default as YAML shows it."""
    known = {None: "null", True: "true", False: "false"}
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(plain, value))}]"
    return known.get(value, str(value)) if isinstance(value, bool | None) else str(value)


def commands_page() -> str:
    """The flags of each command, as `--help` shows them."""
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    text = ["# Flags", "", "The output of `sparring COMMAND --help`. [Commands](../commands.md) explains them.", ""]
    for name, command in commands.choices.items():
        command.prog = f"sparring {name}"
        command.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100)
        text += [f"## `sparring {name}`", "", "```text", command.format_help().rstrip(), "```", ""]
    return "\n".join(text)


def outside_page(file: str) -> str:
    """A file of the repository outside docs as a page, with its links seen from here."""
    path = ROOT / file
    text = re.sub(r"\]\((\.\./)?docs/([^)]*)\)", r"](../\2)", path.read_text())
    folder = Path("../..") / path.parent.relative_to(ROOT)
    return re.sub(r"\]\((?!\.\./|https?:|#)([^)]*)\)", rf"]({folder}/\1)", text)


def generate(app) -> None:
    GENERATED.mkdir(exist_ok=True)
    pages = {"settings": settings_page(), "flags": commands_page()}
    pages |= {name: outside_page(file) for file, name in OUTSIDE.items()}
    for name, text in pages.items():
        file = GENERATED / f"{name}.md"
        # an unchanged page is not built again
        if not file.is_file() or file.read_text() != text:
            file.write_text(text)


def link_outside(app, page: str, source: list[str]) -> None:
    """Links to these files become links to their pages; the sources link the files, which works in the repository."""
    for file, name in OUTSIDE.items():
        to = "../" * page.count("/") + f"_generated/{name}.md"
        source[0] = re.sub(rf"\]\((\.\./)+{re.escape(file)}", f"]({to}", source[0])


def keep_layout(app, what: str, name: str, obj, options, lines: list[str]) -> None:
    """A module's docstring is shown as it is written, with its tables and code."""
    if what == "module":
        lines[:] = [lines[0], "", "::", "", *(f"    {line}" for line in lines[1:])]


def setup(app) -> None:
    app.connect("builder-inited", generate)
    app.connect("source-read", link_outside)
    app.connect("autodoc-process-docstring", keep_layout)
