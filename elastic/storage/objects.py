"""Small objects below a URL; every request ends within its limit, whatever the storage does.

The limits are 5 s, and a minute until the storage has answered once, or what the caller gives. A
reading of many objects makes one request for each 64 of them.

It does not promise that a failed call had no effect: its answer may have been lost. What is read is
never older than what this process wrote or created before, as far as the service keeps that
promise; a listing may be older. Failures are classified as those of every store.
"""

import errno
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from elastic.errors import StoreFailed, UsageError
from elastic.storage.remote import S3, classified, open_url
from elastic.storage.store import ObjectNotFound, as_store_failure

FIRST_LIMIT_S = 60.0  # of the first call, which also finds credentials and builds a client
_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """`changed`: seconds since 1970 by the service's clock, None where it does not tell.

    `mark` changes whenever the object is written again.
    """

    size_bytes: int
    changed: float | None
    mark: str


class Objects:
    """Safe to use from several threads; not across a fork. Every call may raise StoreFailed."""

    def __init__(self, url: str, *, limit_s: float = 5.0, first_limit_s: float = FIRST_LIMIT_S) -> None:
        """No request is made yet. Raises UsageError for a URL that fsspec has no library for."""
        self.url = url.rstrip("/")
        self._limit_s = limit_s
        self._first_limit_s = max(limit_s, first_limit_s)
        self._fs, self._root = open_url(url, call_limit_s=limit_s)
        self._has_answered = False

    def read(self, name: str) -> bytes | None:
        """None when there is no such object."""
        with classified(f"reading {self.url}/{name}"), suppress(FileNotFoundError):
            data = self._call("cat_file", self._path(name))
            assert isinstance(data, bytes)
            return data
        return None

    def read_all(self, names: Iterable[str]) -> dict[str, bytes]:
        """Several at once; those that do not exist are left out."""
        wanted = list(names)
        found: dict[str, bytes] = {}
        for begin in range(0, len(wanted), _AT_ONCE):
            paths = {self._path(name): name for name in wanted[begin : begin + _AT_ONCE]}
            with classified(f"reading {self.url}/{wanted[begin]} and others"):
                answers = self._call("cat", list(paths), on_error="return")
            for path, answer in answers.items():
                if isinstance(answer, bytes):
                    found[paths[path]] = answer
                elif not isinstance(answer, FileNotFoundError):
                    raise as_store_failure(f"reading {self.url}/{paths[path]}", answer) from answer
        return found

    def create(self, name: str, data: bytes) -> bool:
        """Store an object unless the name is taken; False when it is.

        It may have been taken by this very call, when the library repeated a request whose answer
        was lost.
        """
        with classified(f"creating {self.url}/{name}"), suppress(FileExistsError):
            self._call("pipe_file", self._path(name), data, mode="create")
            return True
        return False

    def write(self, name: str, data: bytes) -> None:
        with classified(f"writing {self.url}/{name}"):
            self._call("pipe_file", self._path(name), data)

    def delete(self, name: str) -> None:
        """Nothing happens where there is no such object."""
        with classified(f"deleting {self.url}/{name}"), suppress(FileNotFoundError):
            self._call("rm_file", self._path(name))

    def listed(self, folder: str) -> dict[str, Listed]:
        """Everything below `folder`, by name relative to the URL; empty when there is no such
        folder.
        """
        found: dict[str, Any] = {}
        with classified(f"listing {self.url}/{folder}"), suppress(FileNotFoundError):
            found = self._call("find", self._path(folder), detail=True)
        return {
            path.removeprefix(self._root).lstrip("/"): _listed(about)
            for path, about in found.items()
            if about["type"] == "file" and not path.endswith("/")
        }

    def folders(self, folder: str) -> list[str]:
        """The names of the folders directly below `folder`, as a listing of them alone tells."""
        return [name for name, is_folder in self.directly_below(folder).items() if is_folder]

    def directly_below(self, folder: str) -> dict[str, bool]:
        """The names directly below `folder`, and whether each is a folder, by one listing."""
        found: list[dict[str, Any]] = []
        with classified(f"listing {self.url}/{folder}"), suppress(FileNotFoundError):
            found = self._call("ls", self._path(folder), detail=True)
        own = self._path(folder).strip("/")  # may be listed as well, as an object without content
        paths: dict[str, bool] = {}
        for each in found:  # an object may have the name of a folder
            path = each["name"].strip("/")
            paths[path] = paths.get(path, False) or each["type"] == "directory"
        return {path.rpartition("/")[2]: is_folder for path, is_folder in paths.items() if path != own}

    def check_bucket(self) -> None:
        """Raise UsageError where the URL's bucket does not exist, which looks like an empty one.

        Known of S3 alone, and where the bucket may be listed.
        """
        if self.url.partition("://")[0] not in S3:
            return
        bucket = self._root.partition("/")[0]
        try:
            with classified(f"reading {bucket}"):
                self._call("ls", bucket, detail=False)
        except ObjectNotFound as error:
            raise UsageError(
                f"expected the bucket {bucket} to exist, found none; correct the URL, or create it"
            ) from error
        except StoreFailed:
            pass

    def _call(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Raises FileExistsError for a name that is taken, and what the library raises."""
        limit_s = self._limit_s if self._has_answered else self._first_limit_s
        try:
            if self._fs.async_impl:
                from fsspec.asyn import sync  # see remote.py

                call = partial(sync, self._fs.loop, getattr(self._fs, f"_{verb}"), timeout=limit_s)
            else:  # a file system without a network: nothing to wait for
                call = getattr(self._fs, verb)
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

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root


def _listed(about: dict[str, Any]) -> Listed:
    # S3, Google, Azure and fsspec's memory each have a name of their own for it.
    names = ("LastModified", "mtime", "updated", "last_modified", "created")
    changed = next((about[name] for name in names if about.get(name) is not None), None)
    seconds = changed.timestamp() if isinstance(changed, datetime) else None
    return Listed(
        size_bytes=int(about["size"]),
        changed=seconds,
        mark=f"{about.get('ETag', about.get('etag', ''))} {changed}",
    )


def _says_exists(error: Exception) -> bool:
    """Some services that speak S3 do not say which condition failed; we had set only one."""
    response = getattr(error.__cause__, "response", None)
    code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
    return (
        isinstance(error, OSError) and error.errno == errno.EINVAL and code in ("PreconditionFailed", "412")
    )
