"""Any fsspec URL is a store, and each failure of its library is a classified StoreFailed.

`Objects` has small objects: every request ends within its limit, whatever the storage does. The
limits are 5 s, and a minute until the storage has answered once, or those of the caller.
`ObjectStore` makes a Store of it, whose calls have no limit: the caller bounds the whole save.

It does not promise that a failed call had no effect: its answer may have been lost. An object is
never read as it was before this process wrote it, as far as the service keeps that promise; a
listing may be older. Where a service ignores the create-only header, `create` may replace an
object. The commit protocol stays correct, because attempts never share a payload.

All URLs are opened here, and by `Objects` alone. fsspec is imported only for a URL: without it the
uploader of a local run, and every command that reads one, start nearly a tenth of a second sooner.
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from elastic.errors import StoreFailed, UsageError
from elastic.storage import local, store
from elastic.system.files import write_all

FIRST_LIMIT_S = 60.0  # of the first call, which also finds credentials and builds a client
_AT_ONCE = 64
S3 = ("s3", "s3a")  # what a URL begins with
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def open_store(url: str) -> store.Store:
    """The store below a local path or an fsspec URL; nothing is created yet.

    Raises UsageError for a protocol that fsspec does not know, or whose library is not installed.
    """
    protocol, separator, path = url.partition("://")
    if not separator:
        return local.LocalStore(Path(url).absolute())
    if protocol in {"file", "local"}:
        return local.LocalStore(Path(path).absolute())
    return ObjectStore(url)


def check_url(url: str) -> None:
    """Raise UsageError where `open_store` would, without starting anything.

    An fsspec file system of a network starts a thread when it is made, and no worker can be forked
    from a process with threads.
    """
    protocol, separator, _ = url.partition("://")
    if separator:
        import fsspec

        with _explained(url):
            fsspec.get_filesystem_class(protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """`changed`: seconds since 1970 by the service's clock, None where it does not tell."""

    size_bytes: int
    changed: float | None


class Objects:
    """Safe to use from several threads; not across a fork. Every call may raise StoreFailed."""

    def __init__(
        self, url: str, *, limit_s: float | None = 5.0, first_limit_s: float = FIRST_LIMIT_S
    ) -> None:
        """No request is made yet; limit_s None sets no limit to any. Raises UsageError for a URL
        that fsspec has no library for.
        """
        import fsspec

        self.url = url.rstrip("/")
        self._limit_s = limit_s
        self._first_limit_s = None if limit_s is None else max(limit_s, first_limit_s)
        with _explained(url):
            # A shared or caching instance would go on listing what another process has deleted
            # since, and would miss what it committed. Within `limit_s` a call of the library must
            # have room for a second try.
            self.fs, root = fsspec.core.url_to_fs(
                url, use_listings_cache=False, skip_instance_cache=True, **_options(url, limit_s)
            )
        self.root = root.rstrip("/")
        self._has_answered = False

    def read(self, name: str) -> bytes | None:
        """None when there is no such object."""
        with classified(f"reading {self.url}/{name}"), suppress(FileNotFoundError):
            data = self._call("cat_file", self.path(name))
            assert isinstance(data, bytes)
            return data
        return None

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Several at once; those that do not exist are left out."""
        wanted = list(names)
        found: dict[str, bytes] = {}
        for begin in range(0, len(wanted), _AT_ONCE):
            paths = {self.path(name): name for name in wanted[begin : begin + _AT_ONCE]}
            with classified(f"reading {self.url}/{wanted[begin]} and others"):
                answers = self._call("cat", list(paths), on_error="return")
            for path, answer in answers.items():
                if isinstance(answer, bytes):
                    found[paths[path]] = answer
                elif not isinstance(answer, FileNotFoundError):
                    raise store.as_store_failure(f"reading {self.url}/{paths[path]}", answer) from answer
        return found

    def create(self, name: str, data: bytes) -> bool:
        """Store an object unless the name is taken; False when it is.

        It may have been taken by this very call, when the library repeated a request whose answer
        was lost.
        """
        with classified(f"creating {self.url}/{name}"), suppress(FileExistsError):
            self._call("pipe_file", self.path(name), data, mode="create")
            return True
        return False

    def write(self, name: str, data: bytes) -> None:
        with classified(f"writing {self.url}/{name}"):
            self._call("pipe_file", self.path(name), data)

    def delete(self, name: str) -> None:
        """Nothing happens where there is no such object."""
        with classified(f"deleting {self.url}/{name}"), suppress(FileNotFoundError):
            self._call("rm_file", self.path(name))

    def listed(self, folder: str) -> dict[str, Listed]:
        """Everything below `folder`, by name relative to the URL; empty when there is no such
        folder.
        """
        with classified(f"listing {self.url}/{folder}"), suppress(FileNotFoundError):
            return {
                path.removeprefix(self.root).lstrip("/"): _listed(about)
                for path, about in self._call("find", self.path(folder), detail=True).items()
                if about["type"] == "file" and not path.endswith("/")  # else it stands for a folder
            }
        return {}

    def directly_below(self, folder: str) -> dict[str, bool]:
        """The names directly below `folder`, and whether each is a folder, by one listing."""
        found: list[dict[str, Any]] = []
        with classified(f"listing {self.url}/{folder}"), suppress(FileNotFoundError):
            found = self._call("ls", self.path(folder), detail=True)
        own = self.path(folder).strip("/")  # may be listed as well, as an object without content
        paths: dict[str, bool] = {}
        for each in found:  # an object may have the name of a folder
            path = each["name"].strip("/")
            paths[path] = paths.get(path, False) or each["type"] == "directory"
        return {path.rpartition("/")[2]: is_folder for path, is_folder in paths.items() if path != own}

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Raises FileExistsError for a name that is taken, and what the library raises."""
        limit_s = self._limit_s if self._has_answered else self._first_limit_s
        try:
            if self.fs.async_impl:
                from fsspec.asyn import sync

                call = partial(sync, self.fs.loop, getattr(self.fs, f"_{verb}"), timeout=limit_s)
            else:  # a file system without a network: nothing to wait for
                call = getattr(self.fs, verb)
            answer = call(*arguments, **options)
        except (FileNotFoundError, FileExistsError):
            self._has_answered = True
            raise
        except Exception as error:
            if _says_exists(error):
                raise FileExistsError(arguments[0]) from error
            raise
        self._has_answered = True
        return answer

    def path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root


class ObjectStore:
    def __init__(self, url: str) -> None:
        self._objects = Objects(url, limit_s=None)
        self.create, self.delete = self._objects.create, self._objects.delete

    def list(self) -> list[store.StoredObject]:
        self._objects.fs.invalidate_cache()
        # `find` of some file systems leaves out what may not be read. A store that looked empty
        # would be taken for a new run; `ls` raises.
        self._objects.directly_below("")
        found = sorted(self._objects.listed("").items())
        return [store.StoredObject(name=name, size_bytes=about.size_bytes) for name, about in found]

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        # Without a cache each chunk is one ranged request. Read-ahead would fetch, and keep, bytes
        # that are read once.
        with (
            classified(f"reading {self._objects.url}/{name}"),
            self._objects.fs.open(self._objects.path(name), "rb", cache_type="none") as file,
        ):
            yield from store.read_range(file, start, end, 4 * store.CHUNK_BYTES)

    def write(self, name: str, payload: store.Payload, midway: Callable[[], None]) -> int:
        midway()
        with classified(f"writing {self._objects.url}/{name}"):
            self._objects.fs.makedirs(self._objects.fs._parent(self._objects.path(name)), exist_ok=True)  # noqa: SLF001 - it has no public name
            # put_file aborts its multipart upload when it fails. A file object opened for writing
            # would publish a truncated object: leaving its `with` closes it, and closing uploads
            # what there is.
            with _as_file(payload) as path:
                self._objects.fs.put_file(path, self._objects.path(name))
            self._objects.fs.invalidate_cache()
            return int(self._objects.fs.info(self._objects.path(name))["size"])


@contextmanager
def classified(doing: str) -> Iterator[None]:
    """Raises StoreFailed for whatever is raised inside; `doing` begins with `reading` where an
    object may be missing.
    """
    try:
        yield
    except StoreFailed:
        raise
    # Storage libraries raise classes of their own (botocore, aiohttp, google) that share no base.
    # An unexpected error would end the uploader's thread, and its save would never have a result.
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not doing.startswith("reading"):
            raise store.StoreRefused(
                f"{doing} failed: {error}. Expected the bucket to exist: create it, or correct --run-dir"
            ) from error
        raise store.as_store_failure(doing, error) from error


@contextmanager
def _as_file(payload: store.Payload) -> Iterator[str]:
    """A file in memory that holds the payload and nothing else: storage libraries upload whole
    files.
    """
    with os.fdopen(os.memfd_create("elastic-upload", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        for chunk in payload.chunks():
            write_all(file.fileno(), chunk)
        yield f"/dev/fd/{file.fileno()}"


def _options(url: str, call_limit_s: float | None) -> dict[str, Any]:
    """With these a call fails after seconds: the caller tries again, and checks in between what the
    first try did.
    """
    if url.partition("://")[0] not in S3:
        return {}
    # Each of the five tries of s3fs would be five tries of botocore.
    config: dict[str, Any] = {"retries": {"max_attempts": 1}}
    if call_limit_s is None:
        return {"config_kwargs": config}
    share_s = call_limit_s / 2.5  # room for a second try
    timeouts = {"connect_timeout": share_s, "read_timeout": share_s}
    # One request for each object, instead of one before it that asks for the object's size.
    return {"config_kwargs": config | timeouts, "max_concurrency": 1}


@contextmanager
def _explained(url: str) -> Iterator[None]:
    protocol = url.partition("://")[0]
    try:
        yield
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        remedy = f"pip install elastic-train[{extra}]" if extra else f"install what it names: {error}"
        raise UsageError(
            f"expected the library for {protocol}:// to be installed, found that it is not: {remedy}"
        ) from error
    except ValueError as error:
        raise UsageError(
            f"expected a path or a URL that fsspec knows (file, s3, gs, memory, ...), found {url!r} ({error}); correct --run-dir"
        ) from error


def _listed(about: dict[str, Any]) -> Listed:
    # S3, Google, Azure and fsspec's memory each have a name of their own for it.
    names = ("LastModified", "mtime", "updated", "last_modified", "created")
    changed = next((about[name] for name in names if about.get(name) is not None), None)
    seconds = changed.timestamp() if isinstance(changed, datetime) else None
    return Listed(size_bytes=int(about["size"]), changed=seconds)


def _says_exists(error: Exception) -> bool:
    """Some services that speak S3 do not say which condition failed; we had set only one."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return (
        isinstance(error, OSError) and error.errno == errno.EINVAL and code in ("PreconditionFailed", "412")
    )
