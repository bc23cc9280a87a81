"""Where a recipe draws from the operating system, a process's number or the clock: found in its
text.

Such numbers are others in each process and in each step that is done again. Nothing here knows what
becomes of one (it may name a folder), so it is named and not refused; what is only shown is left
out. A seed whose value is None is seen where it is used (drawn_places.py).
"""

import ast
import re

from elastic.train.recipe_text import called, computing, parsed

_WITHOUT_SEED = {"default_rng", "RandomState", "SeedSequence", "PCG64", "MT19937", "Philox", "Random", "seed"}
_RANDOM = {"uuid1", "uuid4", "urandom", "getrandom", "SystemRandom", "token_bytes", "token_hex", "randbits"}
_ALWAYS = _RANDOM | {"getpid", "getppid", "get_ident", "get_native_id"}
_CLOCKS = {"time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "now", "utcnow"}
# A file without any of these words is not parsed: a recovery waits for this.
_WORDS = re.compile("|".join(["SEED", *sorted(_WITHOUT_SEED | _ALWAYS)]).encode())


def unseeded_in(text: bytes) -> list[tuple[int, str]]:
    """The lines, and what stands there, in order; each line once."""
    if _WORDS.search(text) is None or (tree := parsed(text)) is None:
        return []
    imports = (each for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in node.names)
    first = {each.asname: each.name for each in imports if each.asname is not None}
    own = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    found: dict[int, str] = {}
    for node in computing(tree):
        name = called(node) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and name not in own and _is_unseeded(node, first.get(name, name)):
            found.setdefault(node.lineno, ast.unparse(node))
        if isinstance(node, ast.Call | ast.Assign) and _seeds_by_clock(node):
            found.setdefault(node.lineno, ast.unparse(node))
    return sorted(found.items())


def _is_unseeded(call: ast.Call, name: str) -> bool:
    """name: of the function, before an import gave it another one."""
    given = [*call.args, *(each.value for each in call.keywords)]
    has_seed = any(not (isinstance(each, ast.Constant) and each.value is None) for each in given)
    return name in _ALWAYS or (name in _WITHOUT_SEED and not has_seed)


def _seeds_by_clock(node: ast.Call | ast.Assign) -> bool:
    """Whether it is a call, an option or an assignment that speaks of a seed, with a time in it."""
    match node:
        case ast.Call():
            values = [*node.args, *(each.value for each in node.keywords)]
            words = (each.value for each in values if isinstance(each, ast.Constant))
            name = " ".join([called(node), *map(str, words)])
        case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=value):
            values = [value]
        case _:
            return False
    if "seed" not in name.lower() and name not in _WITHOUT_SEED:
        return False
    inside = (each for value in values for each in ast.walk(value))
    return any(isinstance(each, ast.Call) and called(each) in _CLOCKS for each in inside)
