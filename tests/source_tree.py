"""The package's source files, parsed, for the tests of the architecture."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from tests.layers import PURE_FOLDERS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "topics_server"
SOURCE = ROOT / "src" / PACKAGE

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name: the absolute module, the member of a `from` import, and the line."""

    module: str
    member: str
    line: int

    @property
    def top(self) -> str:
        """The name of the distribution or library: the first part of the module's name."""
        return self.module.partition(".")[0]


class Module:
    """One parsed source file; `name` is relative to the package, '' for the package itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text("utf-8")
        self.tree = ast.parse(self.text, filename=str(path))
        self.is_package = path.name == "__init__.py"
        parts = path.relative_to(SOURCE).with_suffix("").parts
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    @property
    def where(self) -> str:
        """The path to open, for messages."""
        return str(self.path.relative_to(ROOT))

    @cached_property
    def is_pure(self) -> bool:
        """Whether the module promises no I/O, by its folder or by its docstring."""
        folder = self.name.rpartition(".")[0]
        return folder in PURE_FOLDERS or "Pure." in (ast.get_docstring(self.tree) or "").split()

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the file, functions' bodies included."""
        return list(ast.walk(self.tree))

    @cached_property
    def imports(self) -> list[Import]:
        """Every import of the file, also lazy ones and those for types only."""
        found: list[Import] = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                found.extend(Import(alias.name, "", node.lineno) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                base = node.module or ""
                found.extend(Import(base, alias.name, node.lineno) for alias in node.names)
        return found

    def own_imports(self, known: set[str]) -> Iterator[tuple[str, int]]:
        """Yield (module of ours, line); `from package import module` means the module."""
        for item in self.imports:
            if item.top == PACKAGE:
                base = item.module.removeprefix(PACKAGE).removeprefix(".")
                member = f"{base}.{item.member}".removeprefix(".")
                yield (member if member in known else base), item.line

    @cached_property
    def functions(self) -> list[Function]:
        """Every function and method, nested ones included."""
        return [node for node in self.nodes if isinstance(node, Function)]


def load_modules() -> dict[str, Module]:
    """Parse the package; packages' `__init__` files are among the values."""
    return {module.name: module for module in map(Module, sorted(SOURCE.rglob("*.py")))}
