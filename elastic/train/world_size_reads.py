"""Where a recipe asks how many workers there are, or adds over them itself: found in its text.

A result has the same bits at every number of workers as long as nothing that trains depends on it.
A learning rate that grows with it (DistributedDataParallel scripts write that, whose batch grows as
well) or a mean over ranks would be exact at one number, and another one at the next. So would a
seed or a slice that is computed from a rank; a rank that is only compared, or names a device, is
harmless. Nothing here knows what becomes of a number, so it is named and not refused; what is only
printed is left out.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.train.recipe_text import called, computing, parsed

_VARIABLES = {
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE"),
}
_IN_LOWER_CASE = {each.lower() for each in _VARIABLES}
_DEVICES = "CUDA_VISIBLE_DEVICES"
_RANKS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID"}
_ASKING = {"get_world_size", "device_count", "get_process_group_ranks", "DistributedSampler"}
_ASKING_RANK = {"get_rank", "get_node_local_rank", "get_group_rank"}
_SEEDING = {"manual_seed", "seed", "default_rng", "RandomState", "Random", "SeedSequence"}
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
# A file without any of these words is not parsed: a recovery waits for this.
_WORDS = re.compile(
    rb"world_size|WORLD_SIZE|device_count|all_reduce|all_gather|all_to_all|reduce\(|reduce_scatter|gather"
    rb"|get_process_group_ranks|DistributedSampler|rank|RANK|SLURM_|CUDA_VISIBLE_DEVICES|nvidia-smi"
)


def reads_of(text: bytes) -> list[tuple[int, str]]:
    """The lines, and what stands there, in order; each line once."""
    if _WORDS.search(text) is None or (tree := parsed(text)) is None:
        return []
    found: dict[int, str] = {}
    names = _Names(runs=frozenset({"run", *_runs(tree)}), is_lowered=b"environ" in text and b"lower" in text)
    ranks = _Ranks(names.runs, tree)
    for node in computing(tree):
        if _asks(node, names) or ranks.are_computed_with(node):
            found.setdefault(getattr(node, "lineno", 0), _short(node))
    return sorted(found.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """runs: of what elastic.start returns. is_lowered: the text may lower the environment's."""

    runs: frozenset[str]
    is_lowered: bool


def _asks(node: ast.AST, names: _Names) -> bool:
    match node:
        case ast.Attribute(attr="world_size", value=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in names.runs
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=name), ast.Constant("world_size"), *_]):
            return name in names.runs
        case ast.Call(args=[*arguments]) if any(map(_lists_devices, arguments)):
            return True
        case ast.Call(
            func=ast.Attribute(attr=name, value=ast.Name(id=owner) | ast.Attribute(attr=owner))
        ) if name not in ("get", "getenv"):
            return name in _ASKING or (name in _COLLECTIVES and owner in _DISTRIBUTED)
        case ast.Call(func=ast.Name(id=name)) if name != "getenv":
            return name in _ASKING or name in _COLLECTIVES - {"reduce", "gather"}
        case ast.Constant(value=str(text)):
            return (
                text in _VARIABLES
                or (names.is_lowered and text in _IN_LOWER_CASE)
                or any(f"${each}" in text or f"${{{each}" in text for each in _VARIABLES)
            )
        case _:
            return _variable_read(node) == _DEVICES


def _lists_devices(argument: ast.expr) -> bool:
    """Whether it is a command whose lines are the machine's GPUs."""
    return isinstance(argument, ast.Constant | ast.List) and bool(
        re.search(r"nvidia-smi\b.*(-L\b|--list-gpus|count)", ast.unparse(argument))
    )


def _variable_read(node: ast.AST) -> str:
    """That of the environment, or of another mapping, which is read here; empty for none."""
    match node:
        case ast.Subscript(slice=ast.Constant(str(text)), ctx=ast.Load()):
            return text
        case ast.Call(args=[ast.Constant(str(text)), *_]) if called(node) in ("get", "getenv"):
            return text
        case _:
            return ""


class _Ranks:
    """Numbers that are ranks: what asks for one, and the variables that are given it."""

    def __init__(self, runs: frozenset[str], tree: ast.AST) -> None:
        self._runs = runs
        self._variables = frozenset[str]()
        self._variables = frozenset(
            ast.unparse(target)
            for each in ast.walk(tree)
            if isinstance(each, ast.Assign)
            for target, value in _pairs(each)
            if self._is_one(value)
        )

    def are_computed_with(self, node: ast.AST) -> bool:
        """In a sum, a product or a power, in the bounds of a slice or range, or in a seed."""
        match node:
            case ast.BinOp(
                left=left, op=ast.Add() | ast.Sub() | ast.Mult() | ast.Div() | ast.Pow(), right=right
            ):
                return self._is_one(left) or self._is_one(right)
            case ast.Subscript(slice=ast.Slice(lower=lower, upper=upper, step=step)):
                return any(each is not None and self._is_one(each) for each in (lower, upper, step))
            case ast.Call(args=[*arguments]) if called(node) in _SEEDING:
                return any(map(self._is_in, arguments))
            case ast.Call(args=[*arguments]) if called(node) in ("range", "islice"):
                return any(map(self._is_one, arguments))
            case _:
                return False

    def _is_in(self, argument: ast.expr) -> bool:
        return any(isinstance(each, ast.expr) and self._is_one(each) for each in ast.walk(argument))

    def _is_one(self, value: ast.expr) -> bool:
        match value:
            case ast.Attribute(attr="rank", value=ast.Name(id=name) | ast.Attribute(attr=name)) if (
                name in self._runs
            ):
                return True
            case ast.Call(func=ast.Name(id="int" | "float"), args=[number]):
                return self._is_one(number)
            case ast.IfExp(body=one, orelse=other):
                return self._is_one(one) or self._is_one(other)
            case ast.Call() if called(value) in _ASKING_RANK:
                return True
            case ast.Name() | ast.Attribute():
                return ast.unparse(value) in self._variables
            case _:
                return _variable_read(value) in _RANKS


def _pairs(each: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    for target in each.targets:
        match target, each.value:
            case ast.Tuple(elts=targets), ast.Tuple(elts=values):
                yield from zip(targets, values, strict=False)
            case _:
                yield target, each.value


def _runs(tree: ast.AST) -> Iterator[str]:
    """The names that are given what elastic.start returns."""
    for each in ast.walk(tree):
        match each:
            case ast.Assign(targets=[ast.Name(id=name) | ast.Attribute(attr=name)], value=ast.Call() as call):
                if called(call) == "start":
                    yield name
            case _:
                pass


def _short(node: ast.AST) -> str:
    match node:
        case ast.Call(func=ast.Name(id="getattr")):
            return ast.unparse(node)
        case ast.Call():
            return f"{ast.unparse(node.func)}()"
        case _:
            return ast.unparse(node)
