"""Two rules about imports that the import contracts in pyproject.toml cannot express."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

#: What a folder of nereus may import beside the standard library and nereus itself.
FRAMEWORKS = {"torch", "ray", "vllm", "megatron", "deepspeed", "triton", "pynvml"}
ALLOWED = {
    "ir": {"numpy"},
    "models": {"numpy"},
    "lang": {"numpy", "lark", "yaml"},
    "passes": {"numpy", "networkx", "ortools"},
    "sim": {"numpy"},
    # TensorBoard reads its own event files; protobuf is what it speaks.
    "planner": {"numpy", "tensorboard", "google"},
    "verify": {"numpy"},
    "cli": {"numpy", "rich"},
    "runtime": {"numpy"} | FRAMEWORKS,
    "kernels": {"numpy"} | FRAMEWORKS,
}


def imports(path: Path) -> set[tuple[str, bool]]:
    """(top-level package, whether it is imported when the module is) of every import statement."""
    tree = ast.parse(path.read_text())
    inside = {n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)}
    typing_only = {
        n
        for f in ast.walk(tree)
        if isinstance(f, ast.If) and ast.unparse(f.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for n in ast.walk(f)
    }
    found = set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [node.module]
        eager = node not in inside and node not in typing_only
        found |= {(name.split(".")[0], eager) for name in names}
    return found


def test_each_phase_imports_only_what_it_may(repo_root):
    wrong = []
    for path in sorted((repo_root / "nereus").rglob("*.py")):
        phase = path.relative_to(repo_root / "nereus").parts[0]
        for package, _ in sorted(imports(path)):
            if package in sys.stdlib_module_names or package == "nereus":
                continue
            if package not in ALLOWED.get(phase, set()):
                wrong.append(f"{path.relative_to(repo_root)} imports {package}")
    assert wrong == []


def test_the_command_line_loads_frameworks_only_when_asked(repo_root):
    """Modules that the cli imports while starting must not pull a framework in at import time."""
    probe = repo_root / "nereus" / "runtime" / "probe.py"
    assert {package for package, eager in imports(probe) if eager} & FRAMEWORKS == set()


def test_no_file_breaks_the_limits_of_the_tree(repo_root):
    sys.path.insert(0, str(repo_root / "tools"))
    try:
        from check_tree import problems
    finally:
        sys.path.pop(0)
    assert problems(repo_root) == []
