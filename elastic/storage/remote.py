"""Any fsspec URL is a store, and each failure of its library is a classified StoreFailed.

Where a service ignores the create-only header, `create` may replace an object. The commit protocol
stays correct, because attempts never share a payload. It does not promise that a call returns in
time: the caller bounds the whole save.

All URLs are opened here, and by `open_url` alone. fsspec is imported only for a URL: without it the
uploader of a local run, and every command that reads one, start nearly a tenth of a second sooner.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from elastic.errors import StoreFailed, UsageError
from elastic.storage.local import LocalStore
from elastic.storage.store import (
    CHUNK_BYTES,
    Payload,
    Store,
    StoredObject,
    StoreRefused,
    as_store_failure,
    chunk_sizes,
)
from elastic.system.files import write_all

S3 = ("s3", "s3a")  # what a URL begins with
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
    """Raise UsageError where `open_store` would, without starting anything.

    An fsspec file system of a network starts a thread when it is made, and no worker can be forked
    from a process with threads.
    """
    protocol, separator, _ = url.partition("://")
    if separator:
        import fsspec

        with _explained(url):
            fsspec.get_filesystem_class(protocol)


def open_url(url: str, *, call_limit_s: float | None = None) -> tuple[Any, str]:
    """An fsspec file system of its own, and the path of `url` in it; no request is made yet.

    call_limit_s: within it a call of the library must have room for a second try. Raises
    UsageError.
    """
    import fsspec

    with _explained(url):
        # A shared or caching instance would go on listing what another process has deleted since,
        # and would miss what it committed.
        fs, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **_options(url, call_limit_s)
        )
    return fs, root.rstrip("/")


class FsspecStore:
    def __init__(self, url: str) -> None:
        self._url = url
        self._fs, self._root = open_url(url)

    def list(self) -> list[StoredObject]:
        with classified(f"listing {self._url}"):
            self._fs.invalidate_cache()
            try:
                # `find` of some file systems leaves out what may not be read. A store that looked
                # empty would be taken for a new run; `ls` raises.
                self._fs.ls(self._root, detail=True)
                found = self._fs.find(self._root, detail=True)
            except FileNotFoundError:
                return []
            entries = [
                StoredObject(name=path.removeprefix(self._root).lstrip("/"), size_bytes=int(about["size"]))
                for path, about in found.items()
                if about["type"] == "file" and not path.endswith("/")
            ]
        return sorted(entries, key=lambda entry: entry.name)

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        # Without a cache each chunk is one ranged request. Read-ahead would fetch, and keep, bytes
        # that are read once.
        with (
            classified(f"reading {self._url}/{name}"),
            self._fs.open(self._path(name), "rb", cache_type="none") as file,
        ):
            file.seek(start)
            for size_bytes in chunk_sizes(start, end, 4 * CHUNK_BYTES):
                if not (chunk := file.read(size_bytes)):
                    return
                yield chunk

    def write(self, name: str, payload: Payload, midway: Callable[[], None]) -> int:
        midway()
        with classified(f"writing {self._url}/{name}"):
            self._fs.makedirs(self._fs._parent(self._path(name)), exist_ok=True)  # noqa: SLF001 - it has no public name
            # put_file aborts its multipart upload when it fails. A file object opened for writing
            # would publish a truncated object: leaving its `with` closes it, and closing uploads
            # what there is.
            with _as_file(payload) as path:
                self._fs.put_file(path, self._path(name))
            self._fs.invalidate_cache()
            return int(self._fs.info(self._path(name))["size"])

    def create(self, name: str, data: bytes) -> bool:
        with classified(f"creating {self._url}/{name}"), suppress(FileExistsError):
            self._fs.pipe_file(self._path(name), data, mode="create")
            return True
        return False

    def delete(self, name: str) -> None:
        with classified(f"deleting {self._url}/{name}"), suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


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
    # One that got through would end the uploader's thread, and its save would never have a result.
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not doing.startswith("reading"):
            raise StoreRefused(
                f"{doing} failed: {error}. Expected the bucket to exist: create it, or correct --run-dir"
            ) from error
        raise as_store_failure(doing, error) from error


@contextmanager
def _as_file(payload: Payload) -> Iterator[str]:
    """A file in memory that holds the payload and nothing else: storage libraries upload whole
    files.
    """
    fd = os.memfd_create("elastic-upload", os.MFD_CLOEXEC)
    try:
        for chunk in payload.chunks():
            write_all(fd, chunk)
        yield f"/dev/fd/{fd}"
    finally:
        os.close(fd)


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
