"""The text of the recipe's own files, and what in it computes and does not only show."""

import ast
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from elastic.data.own_files import is_own_file

_SHOWING = {"print", "event", "debug", "info", "warning", "write", "add_scalar", "add_text", "format"}
ON_STEP = "on_step"
_LOGGING = {"step", "run", "logger", "log", "logging", "wandb", "mlflow"}  # whose `log` shows


Places = list[tuple[int, str]]  # lines, and what stands there


def places_in_recipe(found_in: Callable[[bytes], Places]) -> list[str]:
    """As `train.py:12 (run.world_size)`. found_in: is given a text."""
    return [f"{name}:{line} ({what})" for name, text in recipe_texts() for line, what in found_in(text)]


def places_by_names(
    found_in: Callable[[bytes, Mapping[str, Any]], Places], frame: FrameType | None
) -> list[str]:
    """The same, where a text means something by its variables. frame: of the loop, or below it."""
    names = _files()
    while frame is not None:
        own = names.get(frame.f_code.co_filename)
        if own is not None and frame.f_locals is not frame.f_globals:
            names[frame.f_code.co_filename] = {**frame.f_locals, **own}
        frame = frame.f_back
    found = ((Path(path).name, found_in(_text_of(path), own)) for path, own in names.items())
    return [f"{name}:{line} ({what})" for name, places in found for line, what in places]


def recipe_texts() -> Iterator[tuple[str, bytes]]:
    """The script, and modules beside it: each file's name, and its text, empty where it is gone."""
    yield from ((Path(path).name, _text_of(path)) for path in _files())


def _files() -> dict[str, Mapping[str, Any]]:
    """By path, the variables of each."""
    script = sys.modules.get("__main__")
    main = getattr(script, "__file__", None)
    if main is None:
        return {}
    beside = f"{Path(main).absolute().parent}/"
    files: dict[str, Mapping[str, Any]] = {main: vars(script)}
    for module in [*sys.modules.values()]:
        path = getattr(module, "__file__", None)
        if isinstance(path, str) and path.startswith(beside) and path.endswith(".py") and is_own_file(path):
            files.setdefault(path, vars(module))
    return files


def parsed(text: bytes) -> ast.AST | None:
    """None for what is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def computing(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those whose value is only shown, and functions of run.on_step."""
    left, reporting = [tree], _reporting(tree)
    while left:
        node = left.pop()
        if any(node is each for each in reporting):
            continue
        yield node
        if not only_shows(node):
            left += ast.iter_child_nodes(node)


def _reporting(tree: ast.AST) -> list[ast.AST]:
    """Definitions of what is given to run.on_step, where nothing else calls it by that name."""
    given = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and called(node) == ON_STEP]
    words = [word for call in given for word in call.args]
    made = [word.func if isinstance(word, ast.Call) else word for word in words]
    names = {word.id for word in made if isinstance(word, ast.Name)}
    found: list[ast.AST] = [word for word in words if isinstance(word, ast.Lambda)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            marks = (each for each in node.decorator_list if isinstance(each, ast.Attribute))
            if node.name in names or any(each.attr == ON_STEP for each in marks):
                found.append(node)
    return found


def called(call: ast.Call) -> str:
    """The name of the function or method; empty where it has none."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def only_shows(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr():
            return True
        case ast.BinOp(op=ast.Mod(), right=ast.Call() as call):  # rank % device_count() is a device
            return called(call) == "device_count"
        case ast.Call(func=ast.Attribute(attr="log", value=ast.Name(id=owner) | ast.Attribute(attr=owner))):
            return owner in _LOGGING
        case ast.Call():
            return called(node) in _SHOWING
        case _:
            return False


def _text_of(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""
