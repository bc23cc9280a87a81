"""What an instruction reads and writes, for versions of Python that the tests are not run with."""

from typing import Any, NamedTuple

import pytest

from elastic.train.accesses import ATTRIBUTES, Action, accesses, accesses_in
from elastic.train.control_flow import instructions

WHOLE, TARGET = (3, 14, 40), (3, 4, 9)  # line and columns: of a comprehension, of what it is assigned to


class Listed(NamedTuple):
    opname: str
    argval: Any = None
    positions: Any = None


class Span(NamedTuple):
    lineno: int
    col_offset: int
    end_col_offset: int


def listed(text):
    """Lines `NAME names span` as `dis` shows them; several names are those of one instruction."""
    found = []
    for line in text.strip().splitlines():
        name, *given = line.split()
        spans = {"whole": Span(*WHOLE), "target": Span(*TARGET)}
        span = spans[given.pop()] if given[-1:] and given[-1] in spans else Span(3, 0, 1)
        found.append(Listed(name, tuple(given) if len(given) > 1 else next(iter(given), None), span))
    return found


def named(listing, ends=None, cells=()):
    found = accesses_in(listed(listing), ends or {}, cells)
    letters = {Action.READ: "", Action.WRITE: "=", Action.DELETE: "-"}
    return " ".join(letters[each.action] + each.name for those in found for each in those)


# `for name in s: zip(a, s)`, as Python 3.11 to 3.14 compile it where s was assigned just before.
@pytest.mark.parametrize(
    ("listing", "found"),
    [
        ("STORE_FAST s\nLOAD_FAST s\nGET_ITER\nLOAD_METHOD pop\nLOAD_CLOSURE c", "=s s pop c"),
        ("LOAD_FAST_CHECK s\nLOAD_ATTR parts\nLOAD_SUPER_ATTR step\nLOAD_CONST s", "s parts step"),
        ("STORE_FAST_LOAD_FAST s s\nGET_ITER\nLOAD_FAST_LOAD_FAST a s\nCALL 2", "=s s a s"),
        ("STORE_FAST_STORE_FAST a s\nLOAD_FAST_LOAD_FAST a s\nSTORE_ATTR x", "=a =s a s =x"),
        ("LOAD_FAST_BORROW_LOAD_FAST_BORROW a s\nLOAD_SMALL_INT 1\nLOAD_FAST_BORROW s", "a s s"),
        ("LOAD_NAME s\nLOAD_FROM_DICT_OR_GLOBALS s\nLOAD_FROM_DICT_OR_DEREF s\nDELETE_FAST s", "s s s -s"),
        ("LOAD_COMMON_CONSTANT AssertionError\nLOAD_SPECIAL __enter__\nLOAD_BUILD_CLASS\nLOAD_LOCALS", ""),
    ],
)
def test_the_names_of_each_instruction_are_found_for_every_version_of_python(listing, found):
    assert named(listing) == found


def test_a_shared_variable_that_a_new_function_gets_is_no_read_of_what_it_holds():
    """Python 3.13 compiles that as it does the read of a variable of the function alone."""
    (shared,), (own,) = accesses_in(listed("LOAD_FAST s\nLOAD_FAST x"), {}, cells={"s"})
    assert (shared.place.name, own.place.name) == ("HANDED", "LOCAL")


# norms = [p.norm() for p in xs]; p = p + 1
INLINED = {
    "3.12": """
        LOAD_FAST xs
        GET_ITER
        LOAD_FAST_AND_CLEAR p whole
        SWAP 2
        BUILD_LIST 0
        SWAP 2
        FOR_ITER exit
        STORE_FAST p
        LOAD_FAST p
        LOAD_ATTR norm
        CALL 0
        LIST_APPEND 2
        JUMP_BACKWARD loop
        END_FOR
        STORE_FAST norms target
        STORE_FAST p whole
        LOAD_FAST_CHECK p
        STORE_FAST p
        RETURN_CONST None
        SWAP 2
        POP_TOP
        SWAP 2
        STORE_FAST p whole
        RERAISE 0
        """,
    "3.13": """
        LOAD_FAST xs
        GET_ITER
        LOAD_FAST_AND_CLEAR p whole
        SWAP 2
        BUILD_LIST 0
        SWAP 2
        FOR_ITER exit
        STORE_FAST_LOAD_FAST p p
        LOAD_ATTR norm
        CALL 0
        LIST_APPEND 2
        JUMP_BACKWARD loop
        END_FOR
        POP_TOP
        STORE_FAST_STORE_FAST norms p target
        LOAD_FAST_CHECK p
        STORE_FAST p
        RETURN_CONST None
        SWAP 2
        POP_TOP
        SWAP 2
        STORE_FAST p whole
        RERAISE 0
        """,
}


@pytest.mark.parametrize("version", INLINED)
def test_a_comprehension_that_runs_in_its_function_neither_reads_nor_writes_what_its_variable_hides(version):
    listing = INLINED[version]
    names = [each.opname for each in listed(listing)]
    ends = {names.index("FOR_ITER"): [names.index("END_FOR"), names.index("RETURN_CONST") + 1]}
    assert named(listing, ends) == "xs norm =norms p =p"


def test_what_a_comprehension_is_assigned_to_is_written_though_its_own_variable_has_that_name():
    """Of two stores into one variable in a row the compiler may leave out the first one."""
    kept = "\nEND_FOR\nSWAP 2\nSTORE_FAST x whole\nSTORE_FAST x target"
    left_out = "\nEND_FOR\nSWAP 2\nPOP_TOP\nSTORE_FAST x target"
    begin = "LOAD_FAST xs\nGET_ITER\nLOAD_FAST_AND_CLEAR x whole\nFOR_ITER exit\nSTORE_FAST x\nLOAD_FAST x"
    assert named(begin + kept, {3: [6]}) == "xs =x"
    assert named(begin + left_out, {3: [6]}) == "xs =x"


def test_comprehensions_in_one_another_hide_the_same_name_one_by_one():
    def outer(xs, x):
        found = [[x + 1 for x in x.parts] for x in xs]
        return found, x

    those = [each for of_one in accesses(outer.__code__) for each in of_one if each.place not in ATTRIBUTES]
    assert [(each.action.name, each.name) for each in those] == [
        ("READ", "xs"),
        ("WRITE", "found"),
        ("READ", "found"),
        ("READ", "x"),
    ]
    assert len(accesses(outer.__code__)) == len(instructions(outer.__code__))
