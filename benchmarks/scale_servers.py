"""What the backends talk to, simulated: each call takes its time and is counted.

A folder is a real one in memory whose system calls are intercepted, so that all of the folder
backend's code runs. etcd, c10d's store and the object store are small servers behind the clients'
seams. The store of c10d serves one call after the other, as the real one does.
"""

import io
import json
import os
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self

from scale_clock import SimulatedClock

from elastic.rendezvous.backends.backend import Backend
from elastic.rendezvous.backends.directory import DirectoryBackend
from elastic.rendezvous.backends.etcd import Answer, EtcdBackend, RangeResponse, Response, StoredKey
from elastic.rendezvous.backends.host import Answer as HostAnswer
from elastic.rendezvous.backends.host import GroupInMemory, HostBackend, Question
from elastic.rendezvous.backends.object_store import ObjectStoreBackend
from elastic.storage.remote import Listed
from elastic.system.untrusted import encode

CALL_S = 0.001
# Of an answer of etcd 3.4 as JSON, and of a key in it beside its name and value: measured.
HEADER_BYTES, KEY_BYTES = 120, 76
OBJECT_CALL_S = 0.06
STORE_CALL_S, STORE_BYTE_S = 10e-6, 1e-9
NAME_BYTES = 40  # of a listing, beside the name itself


class Traffic:
    """Calls and bytes of all nodes so far. `bytes`: sent to the nodes."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock = clock
        self.calls: Counter[str] = Counter()
        self.bytes = 0
        self.is_on = True

    def call(self, kind: str, seconds: float, effect: Callable[[], Any]) -> Any:
        """The effect of a call takes place at its end."""
        self.calls[kind] += 1
        self.clock.sleep(seconds)
        return effect()


@contextmanager
def folder(traffic: Traffic, path: Path) -> Iterator[Callable[[], Backend]]:
    """Each system call on a file below `path` is one call to a file server."""
    real = {
        name: getattr(os, name)
        for name in ("listdir", "scandir", "unlink", "link", "replace", "stat", "open")
    }
    real_open = io.open
    root = str(path)

    def counted(kind: str, function: Any) -> Any:
        def call(target: Any, *arguments: Any, **options: Any) -> Any:
            if not traffic.is_on or not isinstance(target, str | Path) or not str(target).startswith(root):
                return function(target, *arguments, **options)
            answers: list[Any] = []

            def effect() -> None:
                try:
                    answers.append(function(target, *arguments, **options))
                except OSError as error:
                    answers.append(error)

            traffic.call(kind, CALL_S, effect)
            if isinstance(answers[0], OSError):
                raise answers[0]
            if kind == "open":
                traffic.bytes += real["stat"](target).st_size if not isinstance(answers[0], io.IOBase) else 0
            elif kind == "listdir":
                traffic.bytes += sum(NAME_BYTES + len(name) for name in answers[0])
            elif kind == "scandir":
                with answers[0] as entries:
                    found = list(entries)
                traffic.bytes += sum(NAME_BYTES + len(each.name) for each in found)
                answers[0] = _Entries(found)
            return answers[0]

        return call

    for name, function in real.items():
        setattr(os, name, counted(name, function))
    io.open = counted("create", real_open)
    try:
        yield lambda: DirectoryBackend(path)
    finally:
        for name, function in real.items():
            setattr(os, name, function)
        io.open = real_open


class _Entries(list[Any]):
    """What a counted scandir returns."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


class Etcd:
    """One etcd: all keys with the revision that wrote them."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._revision = 1
        self._keys: dict[bytes, tuple[int, bytes]] = {}

    def open(self) -> Backend:
        backend = EtcdBackend("simulated", "group", {}, self._traffic.clock)
        backend._etcd = self  # type: ignore[assignment]
        return backend

    def call(self, path: str, body: dict[str, Any]) -> Answer:
        kind = path.removeprefix("kv/")
        answer: Answer = self._traffic.call(kind, CALL_S, lambda: self._do(kind, body))
        self._traffic.bytes += HEADER_BYTES + _size(answer)
        return answer

    def _do(self, kind: str, body: dict[str, Any]) -> Answer:
        match kind:
            case "put":
                self._put(body)
            case "txn":
                return self._txn(body)
            case _:
                return Answer(ID="1")
        return Answer()

    def _txn(self, body: dict[str, Any]) -> Answer:
        holds = all(map(self._holds, body.get("compare", [])))
        responses: list[Response] = []
        for each in body.get("success" if holds else "failure", []):
            if "request_put" in each:
                self._put(each["request_put"])
            else:
                found = RangeResponse(kvs=self._range(each["request_range"]))
                responses.append(Response(response_range=found))
        return Answer(succeeded=holds, responses=tuple(responses))

    def _holds(self, compare: dict[str, str]) -> bool:
        return self._keys.get(b64decode(compare["key"]), (0, b""))[0] == int(compare["mod_revision"])

    def _put(self, body: dict[str, Any]) -> None:
        self._revision += 1
        self._keys[b64decode(body["key"])] = self._revision, b64decode(body["value"])

    def _matching(self, body: dict[str, Any]) -> list[bytes]:
        begin = b64decode(body["key"])
        if "range_end" not in body:
            return [begin] if begin in self._keys else []
        end = b64decode(body["range_end"])
        return [key for key in self._keys if begin <= key < end]

    def _range(self, body: dict[str, Any]) -> tuple[StoredKey, ...]:
        return tuple(
            StoredKey(
                key=b64encode(key).decode(),
                value=b64encode(self._keys[key][1]).decode(),
                mod_revision=str(self._keys[key][0]),
            )
            for key in sorted(self._matching(body))
        )


def _size(answer: Answer) -> int:
    return sum(KEY_BYTES + len(each.key) + len(each.value) for each in answer.kvs)


class Store:
    """The store of a c10d host, which does one thing after the other."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._free_s = 0.0
        self._group = GroupInMemory()

    def open(self) -> Backend:
        backend = HostBackend("127.0.0.1:1", "group")
        backend._ask = self._ask  # type: ignore[method-assign]
        return backend

    def _ask(self, op: str, **fields: Any) -> HostAnswer:
        traffic, clock = self._traffic, self._traffic.clock
        question = Question(op=op, group="group", **fields)
        answer: HostAnswer = traffic.call(op, CALL_S, lambda: self._group.answer(question))
        received_bytes = len(json.dumps(encode(answer)))
        traffic.bytes += received_bytes
        sent_bytes = len(json.dumps(encode(question)))
        service_s = STORE_CALL_S + STORE_BYTE_S * (sent_bytes + received_bytes)
        self._free_s = max(self._free_s, clock.monotonic()) + service_s
        if self._free_s - clock.monotonic() > CALL_S:
            clock.sleep(self._free_s - clock.monotonic())
        return answer


class Bucket:
    """One object store."""

    url = "memory://bucket"

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._objects: dict[str, bytes] = {}

    def open(self) -> Backend:
        backend = ObjectStoreBackend(self.url, clock=self._traffic.clock)
        backend._objects = self  # type: ignore[assignment]
        return backend

    def read(self, name: str) -> bytes | None:
        found: bytes | None = self._call("get", lambda: self._objects.get(name))
        self._traffic.bytes += len(found or b"")
        return found

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        wanted, found = list(names), dict[str, bytes]()
        for begin in range(0, len(wanted), 64):
            some = wanted[begin : begin + 64]
            self._traffic.calls["get"] += len(some) - 1
            found |= self._call("get", partial(self._existing, some))
        self._traffic.bytes += sum(map(len, found.values()))
        return found

    def _existing(self, names: list[str]) -> dict[str, bytes]:
        return {name: self._objects[name] for name in names if name in self._objects}

    def create(self, name: str, data: bytes) -> bool:
        def effect() -> bool:
            if name in self._objects:
                return False
            self._objects[name] = data
            return True

        return bool(self._call("create", effect))

    def write(self, name: str, data: bytes) -> None:
        def effect() -> None:
            self._objects[name] = data

        self._call("put", effect)

    def delete(self, name: str) -> None:
        self._call("delete", lambda: self._objects.pop(name, None))

    def listed(self, prefix: str) -> dict[str, Listed]:
        def effect() -> dict[str, Listed]:
            return {
                name: Listed(size_bytes=len(data), changed=None)
                for name, data in self._objects.items()
                if name.startswith(prefix)
            }

        found: dict[str, Listed] = self._call("list", effect)
        self._traffic.bytes += sum(150 + len(name) for name in found)
        return found

    def _call(self, kind: str, effect: Callable[[], Any]) -> Any:
        return self._traffic.call(kind, OBJECT_CALL_S, effect)
