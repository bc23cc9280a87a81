"""Where a recipe asks how many workers there are, or adds over them itself: found in its text.

A result has the same bits at every number of workers as long as nothing that trains depends on it.
A learning rate that grows with it (DistributedDataParallel scripts write that, whose batch grows as
well) or a mean over ranks would be exact at one number, and another one at the next. Nothing here
knows what becomes of the number, so it is named and not refused; what is only printed is left out.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from elastic.data.own_files import is_own_file

_VARIABLES = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"}
_ASKING = {"get_world_size", "device_count"}
_GATHERED = {
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all",
    "gather",
    "gather_object",
}
_COLLECTIVES = {"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", *_GATHERED}
_DISTRIBUTED = {"dist", "distributed"}
_SHOWING = {"print", "event", "debug", "info", "warning", "write", "add_scalar", "add_text", "format"}
_LOGGING = {"step", "run", "logger", "log", "logging", "wandb", "mlflow"}  # whose `log` shows
# A file without any of these words is not parsed: a recovery waits for this.
_WORDS = re.compile(
    rb"world_size|WORLD_SIZE|device_count|all_reduce|all_gather|all_to_all|reduce\(|reduce_scatter|gather"
)


def in_recipe() -> list[str]:
    """Places in the script and in modules beside it, as `train.py:12 (run.world_size)`."""
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    if main is None:
        return []
    beside = f"{Path(main).absolute().parent}/"
    files = {main: None}
    for module in [*sys.modules.values()]:
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.startswith(beside) and path.endswith(".py") and is_own_file(path):
            files[path] = None
    return [f"{Path(path).name}:{line} ({what})" for path in files for line, what in reads_of(_text_of(path))]


def reads_of(text: bytes) -> list[tuple[int, str]]:
    """The lines, and what stands there, in order; each line once."""
    if _WORDS.search(text) is None:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    found: dict[int, str] = {}
    names = {"run", *_runs(tree)}
    for node in _computing(tree):
        if _asks(node, names):
            found.setdefault(getattr(node, "lineno", 0), _short(node))
    return sorted(found.items())


def _computing(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those whose value is only shown."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        if not _only_shows(node):
            left += ast.iter_child_nodes(node)


def _only_shows(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr():
            return True
        case ast.Call(func=ast.Attribute(attr="log", value=ast.Name(id=owner) | ast.Attribute(attr=owner))):
            return owner in _LOGGING
        case ast.Call():
            return _called(node) in _SHOWING
        case _:
            return False


def _asks(node: ast.AST, runs: set[str]) -> bool:
    match node:
        case ast.Attribute(attr="world_size", value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in runs
        case ast.Call(func=ast.Attribute(attr=name, value=ast.Name(id=owner) | ast.Attribute(attr=owner))):
            return name in _ASKING or (name in _COLLECTIVES and owner in _DISTRIBUTED)
        case ast.Call(func=ast.Name(id=name)):
            return name in _ASKING or name in _COLLECTIVES - {"reduce", "gather"}
        case ast.Constant(value=str(text)):
            return text in _VARIABLES or any(
                f"${each}" in text or f"${{{each}" in text for each in _VARIABLES
            )
        case _:
            return False


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _runs(tree: ast.AST) -> Iterator[str]:
    """The names that are given what elastic.start returns."""
    for each in ast.walk(tree):
        match each:
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=ast.Call() as call):
                if _called(call) == "start":
                    yield name
            case _:
                pass


def _short(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return f"{ast.unparse(node.func)}()"
    return ast.unparse(node)


def _text_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
