"""Any fsspec URL is a store with the same promises; what a storage library raises becomes a classified StoreFailed.

Where a service ignores the create-only header, `create` may replace: the commit protocol stays right, because attempts never share a
payload. It does not promise that a call returns in time; whoever calls bounds the whole save.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec

from elastic.errors import StoreFailed, UsageError
from elastic.storage.local import LocalStore
from elastic.storage.objects import quick_failure
from elastic.storage.store import CHUNK_BYTES, Payload, Store, StoredObject, as_store_failure
from elastic.system.files import write_all

_REQUEST_BYTES = 4 * CHUNK_BYTES
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


def open_store(url: str) -> Store:
    """The store below a local path or an fsspec URL; nothing is created yet.

    Raises UsageError for a protocol that fsspec does not know, or whose library is not installed.
    """
    protocol, separator, path = url.partition("://")
    if not separator:
        return LocalStore(Path(url).absolute())
    if protocol in {"file", "local"}:
        return LocalStore(Path(path).absolute())
    return FsspecStore(url)


def check_url(url: str) -> None:
    """Raises UsageError where `open_store` would, and starts nothing: file systems of a network begin with a thread."""
    protocol, separator, _ = url.partition("://")
    if separator:
        with _explained(url):
            fsspec.get_filesystem_class(protocol)


class FsspecStore:
    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, self._root = _file_system(url)

    def list(self) -> list[StoredObject]:
        with _classified(f"listing {self._url}"):
            self._fs.invalidate_cache()
            try:
                # Some file systems leave out of `find` what they may not read, and nothing found would mean a fresh start; `ls` raises.
                self._fs.ls(self._root, detail=True)
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return []
            entries = [
                StoredObject(name=self._relative(path), size_bytes=int(about["size"]))
                for path, about in found.items()
                if about["type"] == "file" and not path.endswith("/")
            ]
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str) -> Iterator[bytes]:
        # Without a cache each chunk is one ranged request; read-ahead would fetch and keep what is read once.
        with (
            _classified(f"reading {self._url}/{name}"),
            self._fs.open(self._path(name), "rb", cache_type="none") as file,
        ):
            while chunk := file.read(_REQUEST_BYTES):
                yield chunk

    def write(self, name: str, payload: Payload, midway: Callable[[], None]) -> int:
        midway()
        with _classified(f"writing {self._url}/{name}"):
            self._fs.makedirs(self._fs._parent(self._path(name)), exist_ok=True)  # noqa: SLF001 - it has no public name
            # put_file aborts what it began when it fails; a file object opened for writing would publish a torn object.
            with _as_file(payload) as path:
                self._fs.put_file(path, self._path(name))
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(name))["size"])

    def create(self, name: str, data: bytes) -> bool:
        with _classified(f"creating {self._url}/{name}"):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                return False
        return True

    def delete(self, name: str) -> None:
        with _classified(f"deleting {self._url}/{name}"):
            try:
                self._fs.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")


@contextmanager
def _as_file(payload: Payload) -> Iterator[str]:
    """A file that holds the payload and nothing else, in memory: storage libraries upload whole files."""
    fd = os.memfd_create("elastic-upload", os.MFD_CLOEXEC)
    try:
        for chunk in payload.chunks():
            write_all(fd, chunk)
        yield f"/dev/fd/{fd}"
    finally:
        os.close(fd)


def _file_system(url: str) -> tuple[Any, str]:
    with _explained(url):
        # A shared or caching instance would go on serving a listing from before another process committed or deleted.
        fs, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **quick_failure(url)
        )
    return fs, root.rstrip("/")


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


@contextmanager
def _classified(doing: str) -> Iterator[None]:
    try:
        yield
    except StoreFailed:
        raise
    # Storage libraries raise their own classes (botocore, aiohttp, google) that share no base; one that got through would end
    # the uploader's thread without any word about the save.
    except Exception as error:
        raise _kind(doing, error) from error


def _kind(doing: str, error: Exception) -> StoreFailed:
    if isinstance(error, FileNotFoundError) and not doing.startswith("reading"):
        return StoreFailed(
            f"{doing} failed: {error}. Expected the bucket to exist: create it, or correct --run-dir"
        )
    return as_store_failure(doing, error)
