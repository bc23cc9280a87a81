"""A second loop is refused before the first one's hours are spent, if the text surely has one.

A run is one loop, and run.steps refuses a second call when it comes. Only calls that every way
through the same function makes are counted: a branch may be the other one. What the script surely
gets to, from its first line on, is refused. Two loops of a function that may not be called, or of a
`for` that may come once, are announced. So both come true, unless the script fails before, and what
is neither may still be refused when it comes.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic.config.parent import new_run_from
from elastic.errors import UsageError

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_CONDITIONAL = (ast.If, ast.IfExp, ast.Try, ast.TryStar, ast.While, ast.Match, ast.BoolOp, ast.comprehension)
_EXITS = {"exit", "quit", "_exit", "SystemExit"}
_ADVICE = "Make a recipe of each phase, and begin the second from the state of the first:"


def refuse(recipe: Path, text: bytes) -> None:
    """Raises UsageError where the script surely comes to a second loop."""
    tree = _parsed(text)
    lines = [] if tree is None else _Reader.of(tree, follows_calls=True).certain(tree.body)
    if len(lines) > 1:
        first, other = lines[:2]
        second = (
            ", to which the script comes twice" if first == other else f" and another one in line {other}"
        )
        raise UsageError(
            f"expected one loop over run.steps in {recipe}, found one in line {first}{second}: a run is one loop."
            f" {_ADVICE} elastic-train FIRST_RECIPE --run-dir runs/first; elastic-train SECOND_RECIPE --from runs/first --run-dir runs/second"
        )


def note(recipe: Path, text: bytes, run_dir: str) -> str:
    """What to tell the user; empty where the text shows no second loop."""
    lines = lines_of_calls(text)
    if not lines:
        return ""
    where = f"in line {lines[0]} and again in line {lines[1]}"
    if lines[0] == lines[1]:
        where = f"again and again in line {lines[0]}"
    return (
        f"{recipe} calls run.steps {where}: a run is one loop, and the second call will be refused when the first loop is over."
        f" {_ADVICE} {new_run_from(run_dir, 'SECOND_RECIPE')}"
    )


def lines_of_calls(text: bytes) -> list[int]:
    """The lines of the first two calls of `run.steps` that one function surely makes, or none."""
    tree = _parsed(text)
    if tree is None:
        return []
    reader = _Reader.of(tree, follows_calls=False)
    bodies = [tree.body]
    bodies += [each.body for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
    for body in bodies:
        lines = reader.certain(body)
        if len(lines) > 1:
            return lines[:2]
    return []


def _parsed(text: bytes) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _runs(tree: ast.Module) -> Iterator[str]:
    """The names that are given what elastic.start returns."""
    for each in ast.walk(tree):
        match each:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=function)):
                if ast.unparse(function) in ("elastic.start", "start"):
                    yield name
            case _:
                pass


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads which calls of run.steps are certain.

    runs: names of the run. functions: of the module, by name, whose calls are followed. A `for` is
    taken to come more than once, but not where calls are followed: then nothing is assumed.
    """

    runs: frozenset[str]
    functions: Mapping[str, ast.FunctionDef]
    follows_calls: bool
    followed: list[str] = field(default_factory=list)  # at this moment

    @staticmethod
    def of(tree: ast.Module, *, follows_calls: bool) -> "_Reader":
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        return _Reader(
            runs=frozenset(_runs(tree)),
            functions=functions if follows_calls else {},
            follows_calls=follows_calls,
        )

    def certain(self, block: Iterable[ast.stmt]) -> list[int]:
        """The lines of the calls that every way through the block makes, in order."""
        lines: list[int] = []
        for statement in block:
            lines += self._of(statement)
            if _may_leave(statement) or self._calls_an_exit(statement):
                break
        return lines

    def _of(self, node: ast.AST) -> list[int]:
        match node:
            case ast.If(test=test, body=body) if ast.unparse(test) == "__name__ == '__main__'":
                return self.certain(body)
            case ast.For(iter=iterated, body=body):
                is_whole = not self.follows_calls and not any(
                    isinstance(each, ast.Break | ast.Continue)
                    for inside in body
                    for each in _own_nodes(inside)
                )
                inner = self.certain(body) if is_whole else []
                return [*self._of(iterated), *inner, *inner]
            case ast.With(items=items, body=body):
                return [line for item in items for line in self._of(item)] + self.certain(body)
            case ast.Call(func=ast.Attribute(attr="steps", value=ast.Name(id=name))) if name in self.runs:
                return [node.lineno]
            case ast.Call(func=ast.Name(id=name)) if self._is_followed(node):
                self.followed.append(name)
                lines = self.certain(self.functions[name].body)
                self.followed.pop()
                return lines
        if isinstance(node, (*_FUNCTIONS, *_CONDITIONAL)):
            return []
        return [line for child in ast.iter_child_nodes(node) for line in self._of(child)]

    def _is_followed(self, call: ast.Call) -> bool:
        """Whether it is known what the call does: also which of its parameters is the run."""
        name = ast.unparse(call.func)
        if name not in self.functions or name in self.followed:
            return False
        function = self.functions[name]
        parameters = {each.arg for each in function.args.args}
        given = {ast.unparse(each) for each in (*call.args, *(word.value for word in call.keywords))}
        is_plain = not function.decorator_list and not any(
            isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(function)
        )
        return is_plain and parameters & self.runs <= given

    def _calls_an_exit(self, statement: ast.stmt) -> bool:
        """Whether a function of the module that it calls, at any depth, may end the script."""
        seen, left = set[str](), [*_own_nodes(statement)]
        while left:
            each = left.pop()
            name = ast.unparse(each.func) if isinstance(each, ast.Call) else ""
            if name in self.functions and name not in seen:
                seen.add(name)
                body = self.functions[name].body
                if any(map(_exits, body)):
                    return True
                left += [node for inside in body for node in _own_nodes(inside)]
        return False


def _may_leave(statement: ast.stmt) -> bool:
    """Whether what follows it may never run although nothing failed."""
    return _exits(statement) or any(isinstance(each, ast.Return) for each in _own_nodes(statement))


def _exits(statement: ast.stmt) -> bool:
    """Whether it may end the script well."""
    for each in _own_nodes(statement):
        match each:
            case ast.Call(func=function) if _name(function) in _EXITS:
                return True
            case ast.Raise(exc=ast.Name(id="SystemExit")):
                return True
            case _:
                pass
    return False


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Without the bodies of functions, which run elsewhere."""
    if not isinstance(node, _FUNCTIONS):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _own_nodes(child)


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]
