"""The architecture, enforced: imports point downward, inner layers have no dependencies."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "brakecheck"
# Lowest first (docs/architecture.md). Top-level modules (compare.py) sit between history and cli: they join the layers.
LAYERS = ["model", "stack", "kernels", "ops", "worker", "bench", "evidence", "verdict", "diagnose", "report", "history",
          "moe", "training", "api", "cli"]
# These run inside the stack under test, which has none of our dependencies.
BARE = {"model": set(), "ops": {"torch", "triton"}, "kernels": {"torch", "triton"}, "worker": {"torch", "triton"}}


def layer_of(module: str) -> str:
    parts = module.split(".")
    if len(parts) == 1:
        return "model"  # brakecheck/__init__.py holds the version and lazy names only
    if parts[1] == "__main__":
        return "cli"
    return parts[1] if (ROOT / parts[1]).is_dir() else "api"


def imports_of(path: Path):
    package = ["brakecheck", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *([node.module] if node.module else [])])
            if name in {"brakecheck", ".".join(package)} or node.module is None:
                for alias in node.names:
                    yield f"{name}.{alias.name}", node.lineno
            else:
                yield name, node.lineno


FILES = sorted(p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_import_points_upward(path):
    own = layer_of(".".join(["brakecheck", *path.relative_to(ROOT).with_suffix("").parts]))
    for name, line in imports_of(path):
        root = name.split(".")[0]
        if root == "brakecheck":
            other = layer_of(name)
            assert LAYERS.index(other) <= LAYERS.index(own), f"{path}:{line} ({own}) imports {name} ({other})"
            if own in BARE:
                assert other in {own, "model", "ops", "kernels"}, f"{path}:{line}: {own}/ is shipped without {other}/"
        elif own in BARE and root not in sys.stdlib_module_names and root not in BARE[own]:
            raise AssertionError(f"{path}:{line}: {own}/ may not depend on {root}")


def test_every_folder_is_a_layer():
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith("_")}
    assert folders <= set(LAYERS), folders - set(LAYERS)
