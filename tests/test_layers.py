"""A lower layer never imports a higher one, inside functions neither. New modules are listed here, on purpose."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparring"
LAYERS = [
    {
        "child_signals",
        "child_words",
        "contract",
        "config",
        "config_text",
        "cores",
        "errors",
        "resolve",
        "distributed",
        "normalize",
        "noise",
        "disk",
        "lora_configs",
        "out_of_memory",
        "random_state",
        "signs",
    },
    {"envs", "policies", "data"},
    {"world_models"},
    {"rewards"},
    {"collect", "algorithms", "checkpoint", "runs"},
    {"phases"},
    {"record"},
    {
        "run",
        "evaluate",
        "evaluate_run",
        "evaluation_files",
        "folder",
        "tree",
        "originals",
        "reading",
        "config_import",
        "mistakes",
        "api",
        "dry_run",
        "check",
        "compare",
        "completion",
        "gallery",
        "measures",
        "demos",
        "inherit",
        "interrupt",
        "prune",
        "report",
        "summary",
    },
    {"cli", "commands", "launch", "chain", "__main__"},
]
LAYER_OF = {part: number for number, parts in enumerate(LAYERS) for part in parts}


def modules():
    return sorted(path.relative_to(SOURCE).with_suffix("") for path in SOURCE.rglob("*.py"))


def imported(tree: ast.AST, package: str) -> list[tuple[int, str]]:
    """(line, dotted module below sparring) of every import of ours, wherever it stands."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{package} line {node.lineno}: write the import in full"
            # `from sparring import envs` imports sparring.envs
            names = [f"sparring.{a.name}" for a in node.names] if node.module == "sparring" else [node.module]
            found += [(node.lineno, name) for name in names]
    return [(line, name.removeprefix("sparring.")) for line, name in found if name.startswith("sparring.")]


def violations(part: str, name: str, tree: ast.AST) -> list[str]:
    found = []
    for line, target in imported(tree, name):
        other = target.partition(".")[0]
        if other == "__version__":
            continue
        if other not in LAYER_OF:
            found.append(f"line {line} imports '{other}', which is in no layer; add it to LAYERS in test_layers.py")
        elif LAYER_OF[other] > LAYER_OF[part]:
            found.append(
                f"line {line} imports '{target}' of layer {LAYER_OF[other]}, but is in layer {LAYER_OF[part]}; "
                "pass in what it needs, or move the code up"
            )
        elif name.endswith("configs") and LAYER_OF[other] > 0 and other != part:
            found.append(f"line {line} imports '{target}'; a configs.py may import layer 0 and its own package only")
    return found


@pytest.mark.parametrize("module", modules(), ids=str)
def test_imports_go_down(module):
    part = module.parts[0]
    if part == "__init__":
        return  # its names are loaded when first used
    assert part in LAYER_OF, f"'{part}' is in no layer; add it to LAYERS in test_layers.py, as low as it can be"
    tree = ast.parse((SOURCE / module).with_suffix(".py").read_text())
    assert violations(part, module.name, tree) == []


def test_the_package_itself_imports_nothing_of_ours():
    tree = ast.parse((SOURCE / "__init__.py").read_text())
    assert imported(tree, "sparring") == []


@pytest.mark.parametrize(
    ("part", "name", "code", "said"),
    [
        ("envs", "env", "from sparring.runs.run import Run", "line 1 imports 'run' of layer 7, but is in layer 1; "),
        ("data", "x", "def f():\n  import sparring.cli.main", "line 2 imports 'cli' of layer 8, but is in layer 1; "),
        ("policies", "x", "from sparring import phases", "line 1 imports 'phases' of layer 5, but is in layer 1; "),
        ("envs", "env", "from sparring.new_thing import X", "line 1 imports 'new_thing', which is in no layer; "),
        ("collect", "configs", "from sparring.envs.configs import X", "line 1 imports 'envs.configs'; a configs.py "),
    ],
)
def test_a_violation_is_found(part, name, code, said):
    (found,) = violations(part, name, ast.parse(code))
    assert found.startswith(said)


def test_heavy_libraries_are_imported_in_one_place_each():
    """accelerate only in distributed.py; simulators nowhere at the top of a module that the parent imports."""
    users = {str(m) for m in modules() if "accelerate" in top_level_names((SOURCE / m).with_suffix(".py"), deep=True)}
    assert users == {"distributed"}


TORCH_FREE = {"configs", "__init__", "tree", "originals", "reading", "config_import", "mistakes", "config"}
TORCH_FREE |= {"config_text", "errors", "resolve", "cli", "runs"}


def test_configs_import_no_heavy_library():
    for module in modules():
        if module.name in TORCH_FREE or module.parts[0] == "commands":
            heavy = top_level_names((SOURCE / module).with_suffix(".py")) & {"torch", "numpy", "mujoco", "gymnasium"}
            assert heavy == set(), f"{module} imports {heavy} at its top"


def top_level_names(file: Path, deep: bool = False) -> set[str]:
    """Packages that a file imports, at its top or (deep) anywhere."""
    tree = ast.parse(file.read_text())
    nodes = ast.walk(tree) if deep else tree.body
    names = [a.name for n in nodes if isinstance(n, ast.Import) for a in n.names]
    nodes = ast.walk(tree) if deep else tree.body
    names += [n.module for n in nodes if isinstance(n, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
