"""What lies in objects of Python's library that are made to hold something for others.

Only code of Python's own runs, and none that could call the recipe's.
"""

import argparse
import gc
import queue
import threading
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString
from concurrent.futures import Future
from contextvars import Context, ContextVar
from types import CellType, MappingProxyType, SimpleNamespace
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np

from elastic.data.stale_copies import SHARED
from elastic.train.own_code import attributes_of, cell_contents

_BY_ATTRIBUTES = (
    SimpleNamespace,
    argparse.Namespace,
    UserDict,
    UserList,
    UserString,
    ChainMap,
    queue.Queue,
    threading.Semaphore,
    np.ndindex,
    np.ndenumerate,
)
# The same, of modules that need not be imported for it.
_BY_NAME = {
    "asyncio.queues.Queue",
    "configparser.RawConfigParser",
    "csv.DictReader",
    "graphlib.TopologicalSorter",
    "multiprocessing.shared_memory.SharedMemory",
    "sched.scheduler",
    "tempfile.SpooledTemporaryFile",
    "tempfile._TemporaryFileWrapper",
    "torch.storage.TypedStorage",
}
_DICTS: tuple[Any, ...] = {}, OrderedDict[Any, Any]()
_VIEWS = tuple(type(view) for each in _DICTS for view in (each.keys(), each.values(), each.items()))


def opened(thing: Any) -> list[tuple[str, Any]] | None:
    """Its contents, each with what its path ends with; None for an object of another kind.

    They are what the object holds, and nothing that is made here and gone soon: the ids of that
    would be those of other objects later.
    """
    match thing:
        case _ if isinstance(thing, _BY_ATTRIBUTES) or _is_by_name(type(thing)):
            return [(f".{name}", value) for name, value in attributes_of(thing)]
        case threading.local():  # of this thread
            held = threading.local.__getattribute__(thing, "__dict__")
            return [(f".{name}", value) for name, value in list(held.items())]
        case WeakKeyDictionary() | WeakValueDictionary():
            return [(_key(_strong(key)), _strong(value)) for key, value in list(vars(thing)["data"].items())]
        case WeakSet():
            return [("", _strong(each)) for each in list(vars(thing)["data"])]
        case MappingProxyType():
            return [(_key(key), value) for key, value in list(thing.items())]
        case ReferenceType():
            return [("()", thing())]
        case ContextVar():
            return [(".get()", thing.get(None))]
        case threading.Event():
            return [(".is_set()", vars(thing)["_flag"])]
        case Future():  # an open one is None
            return [(".result()", vars(thing)["_result"])]
        case Context():
            return [(f"[{each.name}]", value) for each, value in list(thing.items())]
        case CellType():
            return [(".cell_contents", each) for each in cell_contents(thing)]
        case BaseException():
            return [(".args", thing.args), *((f".{name}", each) for name, each in attributes_of(thing))]
        case _ if isinstance(thing, _VIEWS):
            return [("", each) for each in gc.get_referents(thing)]
        case SHARED():
            return [(".value", vars(thing)["_obj"])]
        case _:
            return None


def _key(key: Any) -> str:
    return f"[{key!r:.40}]" if isinstance(key, (str, int)) else f"[{type(key).__name__}]"


def _is_by_name(kind: type) -> bool:
    return any(f"{each.__module__}.{each.__qualname__}" in _BY_NAME for each in kind.__mro__)


def _strong(thing: Any) -> Any:
    return thing() if isinstance(thing, ReferenceType) else thing
