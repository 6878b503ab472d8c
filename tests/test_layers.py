"""Does every import go down only, does the warm path stay light, and are files small?

The layers are those of the design: a module may import its own layer and those below, inside functions too. A new module gets a line in LAYERS.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import warnings
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "flashgen"
LAYERS = (
    {"errors", "settings", "target", "capture", "expression", "operations", "functions", "language"},
    {"source", "form", "packing", "variant", "catalogue", "problem", "checks"},
    {"analysis", "bounds", "score_bounds", "diagonals", "rewrite", "interval", "derivative", "ranges", "families", "plan", "traffic"},
    {"printer", "hooks", "abi", "emit"},
    {"build", "cache", "records", "pipeline", "workers"},
    {"launch", "bound", "workspaces", "tensor_map", "measured", "progress", "turns", "tune"},
    {
        "reference", "evaluate", "calls", "passes", "runs", "ops", "repeat", "tables", "kernel", "explain", "autotuner", "plot", "dynamo", "closures",
        "block_mask", "flex", "hf", "bench", "generated", "info", "__init__", "__main__",
    },
)  # fmt: skip
LONG_LINES = 300  # a file above this is warned about: it probably does two jobs

FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(), str(path)) for path in FILES}


def unit(path: Path) -> str:
    """The name in LAYERS: a module, or the subpackage it lies in."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def layer(name: str) -> int:
    return next((number for number, names in enumerate(LAYERS) if name in names), -1)


def type_checking_only(tree: ast.Module) -> set[ast.AST]:
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def is_module(name: str) -> bool:
    return (PACKAGE / f"{name}.py").exists() or (PACKAGE / name / "__init__.py").exists()


def own_imports(path: Path, tree: ast.Module) -> list[tuple[str, ast.AST]]:
    """The units of flashgen that a file imports, wherever the statement stands."""
    package = ["flashgen", *path.relative_to(PACKAGE).parts[:-1]]
    found: list[tuple[str, ast.AST]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            paths = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            # "from flashgen import name" may mean a module or something that __init__ defines.
            paths = [[*base, alias.name if is_module(alias.name) else "__init__"] for alias in node.names] if base == ["flashgen"] else [base]
        else:
            continue
        found += [(path[1] if len(path) > 1 else "__init__", node) for path in paths if path[0] == "flashgen"]
    return found


def eager(tree: ast.Module) -> set[str]:
    """Top-level packages imported when the module is."""
    inside = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) for inner in ast.walk(node)}
    skipped = inside | type_checking_only(tree)
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_every_module_has_a_layer_and_only_one():
    assert {unit(path) for path in FILES} - {name for names in LAYERS for name in names} == set()
    assert sum(len(names) for names in LAYERS) == len({name for names in LAYERS for name in names})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_an_import_goes_down_only(path):
    own = layer(unit(path))
    upward = [f"line {node.lineno}: {name} (layer {layer(name)})" for name, node in own_imports(path, TREES[path]) if layer(name) > own]  # type: ignore[attr-defined]
    assert not upward, f"{path.name} is in layer {own} and imports upward: {upward}"


def test_modules_import_each_other_without_cycles():
    graph = {}
    for path, tree in TREES.items():
        name = path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")
        skipped = type_checking_only(tree)
        if name not in ("__init__", "__main__"):
            graph[name] = {module for module, node in own_imports(path, tree) if node not in skipped and module != unit(path)}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which shows the cycle


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_heavy_packages_are_imported_where_the_design_allows(path):
    found, own = eager(TREES[path]), layer(unit(path))
    assert not found & {"cupy", "cupy_backends", "cupyx", "cuda", "matplotlib", "triton"}, "import it inside the function that needs it"
    if own <= 4:
        assert "torch" not in found, "layers up to 4 work without torch: import it inside a function"
    if unit(path) != "emit":
        assert "jinja2" not in found, "only emit imports jinja2"
    if (own != 2 and unit(path) not in ("printer", "explain")) or unit(path) == "families":
        assert "sympy" not in found, "a warm start must not load sympy: import it inside a function"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_environment_variables_are_read_in_settings_alone(path):
    reads = [
        node.lineno
        for node in ast.walk(TREES[path])
        if (isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ" and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get", "getenv", "environ.get"))
    ]
    assert unit(path) == "settings" or not reads, f"{path.name} reads the environment on lines {reads}: add a function to settings.py"


def test_importing_flashgen_loads_neither_sympy_nor_jinja2_nor_cupy():
    program = "import flashgen, sys; print(sorted({'sympy', 'jinja2', 'cupy', 'cupy_backends', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stdout + done.stderr


def test_long_files_are_pointed_out():
    texts = [path for folder in ("flashgen", "templates") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".j2", ".h", ".cuh")]
    for path in texts:
        lines = path.read_text().count("\n")
        if lines > LONG_LINES:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines", stacklevel=1)
    assert texts
