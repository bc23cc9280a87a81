"""Time, environment and code are each read in few modules; all others take them as arguments."""

import ast
from functools import cache
from pathlib import Path

import elastic

LIBRARY = Path(elastic.__file__).parent
MODULES = sorted(str(path.relative_to(LIBRARY)) for path in LIBRARY.rglob("*.py"))
# pause.py runs without the package: it resumes the process that a fault has stopped.
MAY_READ_TIME = {"system/clock.py"}
MAY_READ_ENVIRONMENT = {"config/environment.py", "config/interpreter.py"}
TIME = {"now", "utcnow", "today"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "expandvars", "expanduser"}


def reads_time(tree: ast.AST) -> list[str]:
    """Imports of `time`, and what tells the time without it: datetime.now() and its like."""
    found = [name for name in imported(tree) if name.split(".")[0] == "time"]
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="datetime" | "date"), attr=name)) if (
                name in TIME
            ):
                found.append(name)
            case ast.Call(func=ast.Attribute(attr="times" as name, value=ast.Name(id="os"))):
                found.append(name)
            case _:
                pass
    return found


def reads_environment(tree: ast.AST) -> list[str]:
    found = [name for name in imported(tree) if name.split(".")[-1] in ENVIRONMENT]
    return found + [
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
    ]


def reads_code(tree: ast.AST) -> list[str]:
    """Of a recipe: its bytecode or its syntax."""
    found = [name for name in imported(tree) if name.split(".")[0] in ("ast", "dis")]
    return found + [
        node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "__code__"
    ]


def imported(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [each.name for each in node.names]
        if isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{each.name}" for each in node.names]
    return found


def test_only_the_clock_reads_time_or_sleeps():
    """Looks at every module; the pause of a fault is the one exception."""
    assert {name for name in MODULES if reads_time(parsed(name))} == MAY_READ_TIME


def test_only_two_modules_read_or_change_the_environment():
    """Looks at every module."""
    assert {name for name in MODULES if reads_environment(parsed(name))} == MAY_READ_ENVIRONMENT


def test_no_module_reads_a_recipe_but_for_its_imports():
    """Two executions are compared instead. Looks at every module."""
    assert {name for name in MODULES if reads_code(parsed(name))} == {
        "agent/preflight.py",
        "worker/preload.py",
    }


@cache
def parsed(name: str) -> ast.AST:
    return ast.parse((LIBRARY / name).read_text())
