"""No CUDA source without tests: compiled for both targets on the CPU, compared on a GPU."""

import ast
from functools import cache
from pathlib import Path

import pytest

import twinspark.kernels

KERNELS = Path(twinspark.kernels.__file__).parent
SOURCES = sorted(KERNELS.rglob("*.cu"))
TESTS = Path(__file__).parents[1] / "kernels"


def used(tree: ast.AST) -> set[str]:
    """Every name and attribute in a tree."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@cache
def all_files() -> list[ast.Module]:
    return [ast.parse(file.read_text("utf-8")) for file in sorted(TESTS.glob("test_*.py"))]


def files_that_import(package: str) -> list[ast.Module]:
    """The test files that import from a package."""
    return [
        tree
        for tree in all_files()
        if any(
            isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}.")
            for node in ast.walk(tree)
        )
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda s: str(s.relative_to(KERNELS)))
def test_every_source_is_compiled_and_compared(source: Path) -> None:
    (owner,) = [f for f in source.parent.glob("*.py") if f'"{source.name}"' in f.read_text("utf-8")]
    functions = [
        node
        for tree in files_that_import(f"twinspark.kernels.{source.parent.name}")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    assert any({"ARCHITECTURES", "compile_cubin"} <= used(f) for f in functions), owner
    on_gpu = [f for f in functions if any("gpu" in used(d) for d in f.decorator_list)]
    assert any("equal" in used(f) or "assert_close" in used(f) for f in on_gpu), owner
