"""The package stays within its budgets: number of files, lines per file, public names; and parameters have types."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sparring"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
LINES = {path: len(path.read_text().splitlines()) for path in FILES}
# the limits of the restructuring, and what later features added: (lines, public names)
BUDGET = {"the restructured package": (28_000, 450), "verified files, trusted code, no hangs, a guard": (2_900, 45)}
BUDGET |= {"roles of observations, free text, restarted workers, Meta-World, experts of gymnasium envs": (900, 20)}
BUDGET |= {"six other simulators": (1_900, 20), "point clouds of other envs": (300, 5)}
BUDGET |= {"datasets of others": (1_450, 25), "checks with fixes": (1_150, 12), "files of ManiFlow": (250, 3)}
TYPED = {"config", "spec", "env", "policy"}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def borrowed(tree: ast.AST) -> list[str]:
    """Private names that a module imports from another, or reads from a module of the package that it imported."""
    modules, found = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("sparring"):
            found += [f"line {node.lineno}: {node.module}.{a.name}" for a in node.names if is_private(a.name)]
            found += [f"line {node.lineno}: {node.module}" for part in node.module.split(".") if is_private(part)]
            modules |= {a.asname or a.name for a in node.names if is_module(f"{node.module}.{a.name}")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found += [f"line {node.lineno}: {node.value.id}.{node.attr}"] if is_private(node.attr) else []
    return found


def is_module(dotted: str) -> bool:
    path = SOURCE.joinpath(*dotted.split(".")[1:])
    return path.is_dir() or path.with_suffix(".py").is_file()


def public_names(tree: ast.Module) -> list[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]


def untyped(tree: ast.AST) -> list[str]:
    """Functions with a parameter of TYPED that has no annotation."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            bare = [p.arg for p in parameters if p.arg in TYPED and p.annotation is None]
            found += [f"line {node.lineno}: {node.name}({', '.join(bare)})"] if bare else []
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_module_uses_private_names_of_another(path):
    assert borrowed(TREES[path]) == []


def test_use_of_private_names_is_found():
    code = "from sparring.runs.run import _x\nfrom sparring.envs import gym\ngym._y\ngym.z\n"
    code += "from sparring import __version__"
    assert borrowed(ast.parse(code)) == ["line 1: sparring.runs.run._x", "line 3: gym._y"]


def test_number_of_files_and_lines_is_within_budget():
    assert len(FILES) <= 215
    assert sum(LINES.values()) <= sum(lines for lines, _ in BUDGET.values())


def test_length_of_every_file_is_within_budget():
    assert {name_of(path): lines for path, lines in LINES.items() if lines > 450} == {}
    small = {name_of(p): n for p, n in LINES.items() if n < 40 and p.parent != SOURCE and p.name != "__init__.py"}
    assert small == {}


def test_number_of_public_names_is_within_budget():
    names = {name_of(path): public_names(tree) for path, tree in TREES.items()}
    by_package: dict[str, int] = {}
    for file, found in names.items():
        by_package[str(Path(file).parent)] = by_package.get(str(Path(file).parent), 0) + len(found)
    assert sum(by_package.values()) <= sum(names for _, names in BUDGET.values()), by_package


def test_common_parameters_are_annotated():
    bare = {name_of(path): found for path, tree in TREES.items() if (found := untyped(tree))}
    listed = "\n".join(f"{file}: {'; '.join(found)}" for file, found in bare.items())
    assert not bare, f"\n{listed}"


class Worker:
    """The attributes of a test process that xdist's scheduler uses."""

    id, shutting_down = "", False

    def __init__(self):
        self.gateway, self.sent = self, []

    def send_runtest_some(self, numbers):
        self.sent += numbers


def test_tests_of_a_module_and_timed_modules_stay_in_one_process():
    import conftest

    config = SimpleNamespace(getvalue=lambda option: ["popen", "popen"], option=SimpleNamespace())
    conftest.pytest_configure(config)
    scheduler, workers = conftest.pytest_xdist_make_scheduler(config, None), [Worker(), Worker()]
    modules = ["processes/test_launch", "runs/test_run_ends", "test_docs", "test_normalize"]
    tests = [f"tests/{module}.py::test_{number}[a@b]" for module in modules for number in range(5)]
    for worker in workers:
        scheduler.add_node(worker)
    for worker in workers:
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    # the first two are TIMED: one group
    assert [worker.sent for worker in workers] == [list(range(10)), list(range(10, 15))]
