"""The imports of a script are found in its text: no line of it runs, and no import that would run
is missed.
"""

import ast

from hypothesis import given
from hypothesis import strategies as st

from elastic.worker.preload import Import, LocalModule, find_imports, is_inside, parse_imports

NAMES = st.sampled_from(["a", "b", "c", "a.b", "a.b.c", "d.e"])
SIMPLE = st.sampled_from(
    ["x = 1", "print('import a')", "def f():\n    import never", "class C:\n    import never"]
)


@st.composite
def import_lines(draw):
    """One statement and what it imports."""
    module, name = draw(NAMES), draw(st.sampled_from(["x", "y", "*"]))
    if draw(st.booleans()):
        return f"import {module} as m", [Import(module=module)]
    return f"from {module} import {name}", [Import(module=module, name=None if name == "*" else name)]


def _block(inner):
    return "\n".join("    " + line for text, _ in inner for line in text.splitlines()) or "    pass"


def _all(*blocks):
    return [found for block in blocks for _, wanted in block for found in wanted]


@st.composite
def compounds(draw, inner):
    """A statement with bodies, and what those of them import that run when a module is imported."""
    one, two, three = (draw(st.lists(inner, max_size=3)) for _ in range(3))
    match draw(st.sampled_from(["if", "never", "main", "try", "with"])):
        case "if":
            return f"if x:\n{_block(one)}\nelif y:\n{_block(two)}\nelse:\n{_block(three)}", _all(
                one, two, three
            )
        case "never":
            test = draw(st.sampled_from(["TYPE_CHECKING", "typing.TYPE_CHECKING"]))
            return f"if {test}:\n{_block(one)}\nelse:\n{_block(two)}", _all(two)
        case "main":
            return f"if __name__ == '__main__':\n{_block(one)}", []
        case "try":
            text = f"try:\n{_block(one)}\nexcept ImportError:\n{_block(two)}\nfinally:\n{_block(three)}"
            return text, _all(one, two, three)
        case _:
            return f"with x:\n{_block(one)}", _all(one)


STATEMENTS = st.recursive(SIMPLE.map(lambda text: (text, [])) | import_lines(), compounds, max_leaves=12)


@given(st.lists(STATEMENTS, max_size=6))
def test_imports_are_those_of_the_statements_that_run_at_import(body):
    """Modules are put together from statements whose imports are known; functions, classes and
    guarded bodies hold imports that do not count.
    """
    source = "\n".join(text for text, _ in body)
    ast.parse(source)
    found, expected = parse_imports(source.encode(), ""), _all(body)
    assert sorted(found, key=repr) == sorted(expected, key=repr)


@given(
    st.dictionaries(
        st.sampled_from("abcdef"), st.lists(st.sampled_from("abcdefXYZ"), max_size=5), max_size=6
    ),
    st.lists(st.sampled_from("abcdefXYZ"), max_size=4),
)
def test_installed_modules_are_reached_through_every_chain_of_local_ones(local, first):
    """Lower-case modules are local, upper-case ones installed; cycles and missing modules are
    common.

    The twin closes the set step by step.
    """

    def find(name):
        if name.isupper():
            return None
        if name not in local:
            return LocalModule()
        return LocalModule(source="\n".join(f"import {inner}" for inner in local[name]).encode(), package="")

    reached = set(first)
    for _ in local:
        reached |= {inner for name in reached for inner in local.get(name, [])}
    source = "\n".join(f"import {name}" for name in first).encode()
    found = [wanted.module for wanted in find_imports(source, find)]
    assert len(found) == len(set(found))
    assert set(found) == {name for name in reached if name.isupper()}


def test_enclosing_packages_submodules_and_relative_imports_are_read():
    """`from pkg.sub import mod` runs three files, and each imports others by another kind of
    relative import.
    """
    texts = {
        "pkg": ("import T1", "pkg"),
        "pkg.sub": ("from . import mod\nfrom .. import other", "pkg.sub"),
        "pkg.sub.mod": ("from ..deep.er import thing\nfrom .... import above", "pkg.sub"),
        "pkg.other": ("import T2", "pkg"),
        "pkg.deep": ("", "pkg.deep"),
        "pkg.deep.er": ("from T3.part import *", "pkg.deep"),
    }

    def find(name):
        if name.startswith("T"):
            return None
        text, package = texts.get(name, (None, ""))
        return LocalModule() if text is None else LocalModule(source=text.encode(), package=package)

    found = find_imports(b"from pkg.sub import mod", find)
    assert set(found) == {Import(module="T1"), Import(module="T2"), Import(module="T3.part")}


def test_text_that_is_not_python_imports_nothing():
    """The worker raises the error."""
    assert (
        parse_imports(b"import a\ndef f(:", "")
        == parse_imports(b"import a\x00", "")
        == parse_imports(b"\xff\xfe", "")
        == []
    )


def test_a_module_counts_as_outside_only_if_its_file_is_in_none_of_the_folders():
    """A folder whose name begins like an allowed one is not inside it."""
    folders = ["/lib/site", "/lib/other"]
    files = ["/lib/site/a.py", "/lib/site", "/lib/other/d.py", "/home/me/b.py", "/lib/site-mine/c.py"]
    assert [file for file in files if not is_inside(file, folders)] == files[3:]
