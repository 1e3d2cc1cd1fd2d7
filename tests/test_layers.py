"""A lower layer never imports a higher one, not even inside functions. New modules must be listed here."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparring"
# a part is a module, or a package with all its modules; the longest matching name decides
LAYERS = [
    {
        "contract",
        "errors",
        "noise",
        "normalize",
        "config.section",
        "config.text",
        "config.resolve",
        "config",
        "processes.files",
    },
    {"processes", "config.trust"},
    {"envs", "policies", "data"},
    {"world_models", "rewards"},
    {"collect", "algorithms", "runs.checkpoint", "runs.listing"},
    {
        "phases",
        "runs.fits",
        "config.legacy",
        "config.checks",
        "config.schema",
        "config.inherit",
        "config.convert",
    },
    {"record", "runs", "evaluation", "api"},
    {"report", "demos", "check", "cli", "__main__"},
]
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}


def part_of(module: str) -> str | None:
    """The longest listed name that is `module` or contains it."""
    names = module.split(".")
    return next((part for n in range(len(names), 0, -1) if (part := ".".join(names[:n])) in LAYER_OF), None)


def modules():
    return sorted(path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py"))


def imported(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """(line, dotted module below sparring) of every import of the package, except below `if TYPE_CHECKING:`."""
    found = []
    for node in executed(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package} line {node.lineno}: write the import in full"
            # `from sparring import envs` imports sparring.envs
            names = [f"sparring.{a.name}" for a in node.names] if node.module == "sparring" else [node.module]
            found += [(node.lineno, name) for name in names]
    return [(line, name.removeprefix("sparring.")) for line, name in found if name.startswith("sparring.")]


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes except those below `if TYPE_CHECKING:`: annotations may name higher layers."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from executed(node)


def _is_light(module: str, target: str) -> bool:
    """Whether `target` is a config or in the package of `module`."""
    return target.endswith(("configs", "config")) or target.partition(".")[0] == module.partition(".")[0]


def violations(module: str, tree: ast.AST) -> list[str]:
    found = []
    layer = LAYER_OF[part_of(module)]
    for line, target in imported(tree, module):
        part = part_of(target)
        if target in ("__version__", "lazy_names"):
            continue
        if part is None:
            found.append(f"line {line} imports '{target}', which is in no layer; add it to LAYERS in test_layers.py")
        elif LAYER_OF[part] > layer:
            found.append(
                f"line {line} imports '{target}' of layer {LAYER_OF[part]}, but is in layer {layer}; "
                "pass in what it needs, or move the code up"
            )
        elif module.endswith("configs") and LAYER_OF[part] > 0 and not _is_light(module, target):
            found.append(f"line {line} imports '{target}'; a configs.py may import layer 0 and configs only")
    return found


@pytest.mark.parametrize("module", modules(), ids=str)
def test_imports_go_to_lower_layers(module):
    name = ".".join(module.parts).removesuffix(".__init__")
    if name == "__init__":
        return  # its names are loaded on first use
    assert part_of(name), f"'{name}' is in no layer; add it to LAYERS in test_layers.py, as low as it can be"
    tree = ast.parse((SOURCE / module).with_suffix(".py").read_text())
    assert violations(name, tree) == []


def test_package_init_imports_no_module_of_the_package():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    assert imported(tree, "sparring") == []


@pytest.mark.parametrize(
    ("module", "code", "message"),
    [
        ("envs.env", "from sparring.runs.run import Run", "line 1 imports 'runs.run' of layer 6, but is in layer 2; "),
        ("data.x", "def f():\n  import sparring.cli.main", "line 2 imports 'cli.main' of layer 7, but is in layer 2; "),
        ("policies.x", "from sparring import phases", "line 1 imports 'phases' of layer 5, but is in layer 2; "),
        ("envs.env", "from sparring.new_thing import X", "line 1 imports 'new_thing', which is in no layer; "),
        ("collect.configs", "from sparring.envs.env import X", "line 1 imports 'envs.env'; a configs.py "),
    ],
)
def test_violation_is_found(module, code, message):
    (found,) = violations(module, ast.parse(code))
    assert found.startswith(message)


def test_imports_for_type_checking_may_go_up():
    code = "if TYPE_CHECKING:\n  from sparring.config.schema import Config\n"
    assert violations("envs.env", ast.parse(code)) == []
    assert violations("envs.env", ast.parse(code + "from sparring.config.schema import Config")) != []


def test_accelerate_is_imported_in_one_module():
    """Only distributed.py imports accelerate."""
    users = {str(m) for m in modules() if "accelerate" in top_level_names((SOURCE / m).with_suffix(".py"), deep=True)}
    assert users == {"processes/distributed"}


TORCH_FREE = {"configs", "config", "__init__", "contract", "errors", "listing"}


def test_configs_import_no_heavy_library():
    for module in modules():
        if module.name in TORCH_FREE or module.parts[0] in ("cli", "config"):
            heavy = top_level_names((SOURCE / module).with_suffix(".py")) & {"torch", "numpy", "mujoco", "gymnasium"}
            assert heavy == set(), f"{module} imports {heavy}"


def top_level_names(file: Path, deep: bool = False) -> set[str]:
    """Packages that a file imports, at its top or (deep) anywhere."""
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if deep else tree.body
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    nodes = ast.walk(tree) if deep else tree.body
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
