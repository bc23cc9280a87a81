"""No line of the library can unpickle or evaluate data."""

import ast
from functools import cache
from pathlib import Path

import elastic

LIBRARY = Path(elastic.__file__).parent
UNSAFE_MODULES = {
    "_pickle",
    "cloudpickle",
    "code",
    "copyreg",
    "dill",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
    "xmlrpc",
    "yaml",
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "breakpoint"}
LOADERS = {"torch", "np", "numpy"}  # they are imported under these names only
UNSAFE_LOADS = {"load", "hub", "package", "jit"}
# Its pipes and queues unpickle: these modules use them between a process and its own children. One
# more only asks whether an object of the recipe's is a number in shared memory.
# A recipe is compiled and not run, to refuse what is not Python; a shell's name is an argument.
REVIEWED = {
    "agent/preflight.py": ["compile"],
    "commands.py": ["shell"],
}
USERS_OF_MULTIPROCESSING = {"data/loading_processes.py", "testing/ranks.py"}


def unsafe(tree: ast.AST) -> list[str]:
    """The names in this code that could run the data it reads."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [each.name for each in names]
                found += [
                    str(e.asname) for e in names if e.name in LOADERS and (e.asname or e.name) not in LOADERS
                ]
            case ast.ImportFrom(module=module, names=names):
                modules = [module or "", *(f"{module}.{each.name}" for each in names)]
            case _:
                modules = []
        found += [name for name in modules if UNSAFE_MODULES & set(name.split("."))]
        found += [name for name in modules if name.endswith("_object") or "_object_" in name]
        found += [
            name for name in modules if name in {f"{lib}.{each}" for lib in LOADERS for each in UNSAFE_LOADS}
        ]
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in UNSAFE_CALLS:
                found.append(name)
            case ast.Attribute(attr=name) if name.endswith(("_object", "_object_list")):
                found.append(name)
            case ast.Attribute(value=ast.Name(id=library), attr=name) if (
                library in LOADERS and name in UNSAFE_LOADS
            ):
                found.append(f"{library}.{name}")
            case ast.keyword(arg="allow_pickle" | "shell" as name):
                found.append(name)
            case _:
                pass
    return found


def modules() -> list[str]:
    return sorted(str(path.relative_to(LIBRARY)) for path in LIBRARY.rglob("*.py"))


def test_no_module_unpickles_or_evaluates():
    """Searches imports, calls and attributes: pickles, torch.load, collectives of objects, eval."""
    example = "from torch import load\nimport _pickle, torch as t\nnp.load(x, allow_pickle=eval(y))\nd.gather_object(x)"
    assert len(unsafe(ast.parse(example))) == 7
    found = {name: unsafe(parsed(name)) for name in modules()}
    assert {name: what for name, what in found.items() if what} == REVIEWED


def test_only_the_reviewed_modules_use_multiprocessing():
    """A new one would unpickle what its processes send."""
    users = {name for name in modules() if "multiprocessing" in imported(parsed(name))}
    assert users == USERS_OF_MULTIPROCESSING


@cache
def parsed(name: str) -> ast.AST:
    return ast.parse((LIBRARY / name).read_text())


def imported(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {each.name.split(".")[0] for each in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found
