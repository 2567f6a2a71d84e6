"""The map in CONTRIBUTING.md: imports point one way, and flags are known to the commands alone."""

import ast
import graphlib
import re
from collections.abc import Iterator
from pathlib import Path

import softfree

PACKAGE = Path(softfree.__file__).parent
MAP = (PACKAGE.parent / "CONTRIBUTING.md").read_text()
ROOMS = ("ops", "layers", "models", "data", "training", "analysis", "explorer", "commands")
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
FLAG = re.compile(r"(?<![\w-])--[a-z]")


def room(module: str) -> str:
    return f"{module}.".split(".")[1]


IN_ROOMS = [module for module in MODULES if room(module) in ROOMS]


def imports(module: str) -> Iterator[str]:
    """Modules of the package that a module imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}: imports name the package"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in MODULES or (node.module in MODULES and alias.name != "__version__"):
                    yield name if name in MODULES else node.module


def test_the_rooms_are_those_of_the_map_in_its_order():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ROOMS)
    assert re.findall(r"^      (\w+)/  ", MAP, re.M) == list(ROOMS)
    (rule,) = re.findall(r"Imports point one way: (.*?); nothing", MAP, re.S)
    assert [word for word in re.findall(r"\w+", rule) if word in ROOMS] == list(ROOMS)


def test_nothing_imports_what_comes_after_it():
    def height(module: str) -> int:
        # The package itself imports from all rooms below the commands.
        return ROOMS.index(room(module) if module in IN_ROOMS else "commands")

    above = [
        f"{module} imports {imported}"
        for module in IN_ROOMS
        for imported in imports(module)
        if height(imported) > height(module)
    ]
    assert not above


def test_no_modules_import_each_other():
    graph = {module: set(imports(module)) for module in IN_ROOMS}
    graphlib.TopologicalSorter(graph).prepare()  # raises with the cycle


def test_only_commands_speak_of_flags():
    below = [module for module in IN_ROOMS if room(module) != "commands"]
    speaking = {module: flags(module) for module in below if flags(module)}
    assert not speaking


def flags(module: str) -> list[str]:
    """Strings with a flag such as --img-size, except for documentation, in which settings explain themselves."""
    tree = ast.parse(MODULES[module].read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        f"line {node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in documentation
        and FLAG.search(node.value)
    ]
