"""What elastic/ says to users, in one list: raised errors, refusals of options, printed lines.

A message is what stands in the source, with {expressions} where values are put in. A sentence that
a function returns to be raised elsewhere counts where it is longer than LONG. As a program it
writes all of them to tests/pure/messages.txt (`make messages`), where a change of them is read.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SNAPSHOT = ROOT / "tests/pure/messages.txt"
LONG = 200  # characters of constant text; a message with a command or an option may have more
LONGEST = 300
_ALSO = {"ArgumentTypeError", "print", "print_if_read"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """size: characters that are not put in."""

    file: str
    text: str
    size: int

    @property
    def most(self) -> int:
        return LONGEST if "elastic-train " in self.text or "--" in self.text else LONG


def messages() -> list[Message]:
    """In the order of files, and of their lines."""
    tree = ast.parse((ROOT / "elastic/errors.py").read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)} | _ALSO
    return [message for path in sorted((ROOT / "elastic").rglob("*.py")) for message in _of_file(path, names)]


def _of_file(path: Path, names: set[str]) -> Iterator[Message]:
    file = str(path.relative_to(ROOT / "elastic"))
    for node in ast.walk(ast.parse(path.read_text())):
        said: list[ast.expr] = []
        if isinstance(node, ast.Call) and _name(node.func) in names:
            said = node.args
        elif isinstance(node, ast.Return) and node.value is not None and _size(node.value) > LONG:
            said = [node.value]
        for each in said:
            if text := _text(each):
                yield Message(file=file, text=text, size=_size(each))


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _text(node: ast.expr) -> str:
    """Empty for what holds no text of its own."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text(each) if isinstance(each, ast.Constant) else _put_in(each) for each in node.values
        )
    return ""


def _put_in(node: ast.expr) -> str:
    # Versions of Python spell a text within a text differently.
    if any(isinstance(each, ast.JoinedStr) for each in ast.walk(node)):
        return "{...}"
    return f"{{{ast.unparse(node.value)}}}" if isinstance(node, ast.FormattedValue) else ""


def _size(node: ast.expr) -> int:
    if isinstance(node, ast.JoinedStr):
        return sum(len(_text(each)) for each in node.values if isinstance(each, ast.Constant))
    return len(_text(node))


def listing(found: list[Message]) -> str:
    """By file; within a file in the order of their text, so that code may be moved about."""
    texts = sorted((each.file, each.text) for each in found)
    return "".join(f"{file}: {text!r}\n" for file, text in texts)


if __name__ == "__main__":
    SNAPSHOT.write_text(listing(messages()))
