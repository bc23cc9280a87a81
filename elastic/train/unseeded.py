"""Where a recipe draws from the operating system or the clock: found in its text.

Such numbers are others in each process and in each step that is done again. Nothing here knows what
becomes of one (it may name a folder), so it is named and not refused; what is only shown is left
out.
"""

import ast
import re

from elastic.train.recipe_text import called, computing, parsed

_WITHOUT_SEED = {"default_rng", "RandomState", "SeedSequence", "PCG64", "MT19937", "Philox", "Random", "seed"}
_ALWAYS = {"uuid1", "uuid4", "urandom", "getrandom", "SystemRandom", "token_bytes", "token_hex", "randbits"}
# A file without any of these words is not parsed: a recovery waits for this.
_WORDS = re.compile("|".join(sorted(_WITHOUT_SEED | _ALWAYS)).encode())


def unseeded_in(text: bytes) -> list[tuple[int, str]]:
    """The lines, and what stands there, in order; each line once."""
    if _WORDS.search(text) is None or (tree := parsed(text)) is None:
        return []
    own = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    found: dict[int, str] = {}
    for node in computing(tree):
        if isinstance(node, ast.Call) and called(node) not in own and _is_unseeded(node):
            found.setdefault(node.lineno, ast.unparse(node))
    return sorted(found.items())


def _is_unseeded(call: ast.Call) -> bool:
    name, given = called(call), [*call.args, *(each.value for each in call.keywords)]
    has_seed = any(not (isinstance(each, ast.Constant) and each.value is None) for each in given)
    return name in _ALWAYS or (name in _WITHOUT_SEED and not has_seed)
