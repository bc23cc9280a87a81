"""Small objects below a URL; every call returns or fails within a few seconds, whatever the storage does.

It does not promise that a call that failed had no effect: an answer may be lost on its way. What is read is never older than what this process wrote
or created before, as far as the service keeps that promise; a listing may be older.
"""

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import fsspec
from fsspec.asyn import sync

from elastic.errors import ElasticError

LIMIT_S = 5.0
FIRST_LIMIT_S = 60.0  # of the first call, which also finds credentials and builds a client
LIST_LIMIT_S = 60.0
_AT_ONCE = 64
_TRIES_A_CALL = 2.5


class ObjectsFailed(ElasticError):  # noqa: N818 - the name says what is wrong, as elsewhere in the tree of errors
    """The storage did not do as asked in time; perhaps it did, and the answer was lost."""


class ObjectsRefused(ObjectsFailed):
    """The storage says no: to the credentials, or because there is no such bucket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """`changed`: seconds since 1970 by the service's clock, None where it does not tell. `mark` differs when the object was written anew."""

    size_bytes: int
    changed: float | None
    mark: str


class Objects:
    """Safe to use from several threads; not across a fork."""

    def __init__(self, url: str, *, limit_s: float = LIMIT_S) -> None:
        """No request is made yet. Raises ValueError or ImportError for a URL that fsspec has no library for."""
        self.url = url.rstrip("/")
        self._limit_s = limit_s
        self._fs, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **_options(url, limit_s)
        )
        self._root = root.rstrip("/")
        self._is_async = bool(getattr(self._fs, "async_impl", False))
        self._has_answered = False

    def read(self, name: str) -> bytes | None:
        """None when there is no such object."""
        try:
            data = self._call("read", name, "cat_file", self._path(name))
        except FileNotFoundError:
            return None
        assert isinstance(data, bytes)
        return data

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Several at once; those that are not there are left out."""
        wanted = list(names)
        found: dict[str, bytes] = {}
        for begin in range(0, len(wanted), _AT_ONCE):
            found |= self._read_some(wanted[begin : begin + _AT_ONCE])
        return found

    def create(self, name: str, data: bytes) -> bool:
        """Store an object unless the name is taken; False when it is, perhaps by this very call, whose first answer was lost."""
        try:
            self._call("create", name, "pipe_file", self._path(name), data, mode="create")
        except FileExistsError:
            return False
        except FileNotFoundError as error:
            raise self._no_bucket(error) from error
        return True

    def write(self, name: str, data: bytes) -> None:
        try:
            self._call("write", name, "pipe_file", self._path(name), data)
        except FileNotFoundError as error:
            raise self._no_bucket(error) from error

    def listed(self, folder: str) -> dict[str, Listed]:
        """Everything below `folder`, by name relative to the URL; empty when there is no such folder."""
        try:
            found = self._call(
                "list", folder, "find", self._path(folder), limit_s=LIST_LIMIT_S, detail=True, maxdepth=None
            )
        except FileNotFoundError:
            return {}
        return {
            path.removeprefix(self._root).lstrip("/"): _listed(about)
            for path, about in found.items()
            if about["type"] == "file" and not path.endswith("/")
        }

    def _read_some(self, names: list[str]) -> dict[str, bytes]:
        paths = {self._path(name): name for name in names}
        answers = (
            self._call("read", f"{names[0]} and others", "cat", list(paths), on_error="return")
            if paths
            else {}
        )
        found = {}
        for path, answer in answers.items():
            if isinstance(answer, bytes):
                found[paths[path]] = answer
            elif not isinstance(answer, FileNotFoundError):
                raise self._failed("read", paths[path], answer) from answer
        return found

    def _call(
        self, doing: str, name: str, verb: str, *words: Any, limit_s: float = 0.0, **options: Any
    ) -> Any:
        """Raises FileNotFoundError, FileExistsError or ObjectsFailed."""
        limit_s = max(limit_s, self._limit_s, 0.0 if self._has_answered else FIRST_LIMIT_S)
        try:
            answer = self._bounded(verb, limit_s)(*words, **options)
        except (FileNotFoundError, FileExistsError):
            self._has_answered = True
            raise
        # Storage libraries raise their own classes, which share no base.
        except Exception as error:
            if _says_exists(error):
                raise FileExistsError(name) from error
            raise self._failed(doing, name, error) from error
        self._has_answered = True
        return answer

    def _bounded(self, verb: str, limit_s: float) -> Callable[..., Any]:
        if not self._is_async:
            return getattr(self._fs, verb)  # type: ignore[no-any-return] # a file system without a network: nothing to wait for
        loop, call = self._fs.loop, getattr(self._fs, f"_{verb}")
        return lambda *words, **options: sync(loop, call, *words, timeout=limit_s, **options)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _failed(self, doing: str, name: str, error: BaseException) -> ObjectsFailed:
        sentence = f"could not {doing} {self.url}/{name}: {type(error).__name__}: {error}"
        is_no = isinstance(error, PermissionError) or "Credentials" in type(error).__name__
        if is_no:
            return ObjectsRefused(f"{sentence}. Expected to be allowed to: check credentials and permissions")
        return ObjectsFailed(sentence)

    def _no_bucket(self, error: FileNotFoundError) -> ObjectsRefused:
        return ObjectsRefused(f"expected the bucket of {self.url} to exist: create it first ({error})")


def quick_failure(url: str, **timeouts: float) -> dict[str, Any]:
    """Options of the storage library with which a call fails after seconds: whoever calls tries again, and looks in between at what has become of the first try."""
    if url.partition("://")[0] not in ("s3", "s3a"):
        return {}
    # Each of the library's five tries would be five of botocore's.
    return {"config_kwargs": {"retries": {"max_attempts": 1}} | timeouts}


def _options(url: str, limit_s: float) -> dict[str, Any]:
    # Time for a second try within a call.
    share_s = limit_s / _TRIES_A_CALL
    options = quick_failure(url, connect_timeout=share_s, read_timeout=share_s)
    # One request for each object, instead of one that asks for its size first.
    return options | {"max_concurrency": 1} if options else {}


def _listed(about: dict[str, Any]) -> Listed:
    # S3, Google, Azure and fsspec's memory each have their own word for it.
    names = ("LastModified", "mtime", "updated", "last_modified", "created")
    changed = next((about[name] for name in names if about.get(name) is not None), None)
    seconds = changed.timestamp() if isinstance(changed, datetime) else None
    return Listed(
        size_bytes=int(about["size"]),
        changed=seconds,
        mark=f"{about.get('ETag', about.get('etag', ''))} {changed}",
    )


def _says_exists(error: Exception) -> bool:
    """Services that speak S3 but do not say which condition failed; there was only one."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return (
        isinstance(error, OSError) and error.errno == errno.EINVAL and code in ("PreconditionFailed", "412")
    )
