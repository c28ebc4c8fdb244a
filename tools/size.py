"""Counts lines of code per folder and holds files and functions to their caps.

Caps: a file has at most 600 lines (800 under kernels/), a function at most 60 (kernels and the
makers of golden data are exempt). Lines are physical lines; golf is not the way under a
cap. Run: python tools/size.py
"""

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "examples")
FILE_CAP = 600
KERNEL_FILE_CAP = 800
FUNCTION_CAP = 60


def main() -> int:
    counts: Counter[str] = Counter()
    problems: list[str] = []
    for path in sorted(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT)
        text = path.read_text(encoding="utf-8")
        num_lines = text.count("\n")
        counts[str(name.parent)] += num_lines
        is_kernel = name.parts[:3] == ("src", "twinspark", "kernels")
        cap = KERNEL_FILE_CAP if is_kernel else FILE_CAP
        if num_lines > cap:
            problems.append(f"{name}: {num_lines} lines, the cap is {cap}")
        if not is_kernel and "golden" not in name.parts:
            problems += [f"{name}:{found}" for found in long_functions(text)]
    for folder, num_lines in sorted(counts.items()):
        print(f"{num_lines:7d}  {folder}")
    print(f"{sum(counts.values()):7d}  in all")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def long_functions(text: str) -> list[str]:
    """Functions of a module that are over the cap, decorators not counted."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > FUNCTION_CAP:
                found.append(
                    f"{node.lineno}: {node.name} has {num_lines} lines, the cap is {FUNCTION_CAP}"
                )
    return found


if __name__ == "__main__":
    sys.exit(main())
