"""An object in a folder survives a power cut once its `write` or `create` has returned.

Links below the folder are refused: a listing says where they are, and none is read. It does not
promise anything on a file system that answers fsync without doing it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from elastic.errors import StoreFailed
from elastic.storage import store
from elastic.system import files

MOST_LISTINGS = 10


class LocalStore:
    def __init__(self, root: Path) -> None:
        self._root = root

    def list(self) -> list[store.StoredObject]:
        for _ in range(MOST_LISTINGS):
            # A folder that is removed during the listing makes way for another one, perhaps
            # unlisted: retention deletes a checkpoint because a newer one was committed.
            with _classified(f"listing {self._root}"), suppress(FileNotFoundError):
                return sorted(self._entries(self._root, ""), key=lambda entry: entry.name)
        raise store.StoreUnavailable(
            f"{self._root} changes while it is listed, {MOST_LISTINGS} times in a row; does another process delete files there?"
        )

    def read(self, name: str, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        path = self._root / name
        with _classified(f"reading {path}"), files.open_regular(path) as file:
            yield from store.read_range(file, start, end, store.CHUNK_BYTES)

    def write(self, name: str, payload: store.Payload, midway: Callable[[], None]) -> int:
        path = self._root / name
        with _classified(f"writing {path}"):
            files.make_folders(path.parent)
            try:
                _write_new(path, payload, midway)
            except BaseException:
                # The next attempt creates the same name exclusively, and must not find a part of
                # the payload there.
                with suppress(OSError):
                    path.unlink()
                raise
            self._sync_folders(path.parent)
            # By its name: the directory may have been moved under the open file, and a copy of it
            # put back that has a part of the payload.
            return path.stat().st_size

    def create(self, name: str, data: bytes) -> bool:
        path = self._root / name
        with _classified(f"creating {path}"):
            files.make_folders(path.parent)
            is_new = files.create_whole(path, data, fsync=True)
            # Also where another writer has the name: a caller that finds it there relies on it, and
            # a power cut must not take it.
            self._sync_folders(path.parent)
        return is_new

    def delete(self, name: str) -> None:
        path = self._root / name
        with _classified(f"deleting {path}"):
            path.unlink(missing_ok=True)
            # Up to the first that is not empty: another attempt or a commit record lies beside it.
            with suppress(OSError):
                for folder in self._folders_up(path.parent):
                    folder.rmdir()
            if path.parent.exists():
                files.sync_folder(path.parent)

    def _entries(self, folder: Path, prefix: str) -> Iterator[store.StoredObject]:
        try:
            found = list(os.scandir(folder))
        except FileNotFoundError:
            # The store's folder was never made: it holds nothing. Any other error must not look
            # like an empty folder, or the run would be started over.
            if folder != self._root:
                raise
            if folder.is_symlink():
                raise StoreFailed(
                    f"expected the checkpoints in {folder}, found a link to {folder.readlink()}, which is not there; is its disk mounted?"
                ) from None
            return
        for item in found:
            name = f"{prefix}{item.name}"
            # It may stand in the place of checkpoints, which must not look as if there were none.
            if item.is_symlink():
                raise store.OutsideStore(
                    f"expected no link in {self._root}, found {item.path} to {Path(item.path).readlink()}; remove it, and put what it names in its place if it is wanted"
                )
            if item.is_dir():
                yield from self._entries(Path(item.path), f"{name}/")
            else:
                yield store.StoredObject(name=name, size_bytes=item.stat().st_size)

    def _sync_folders(self, folder: Path) -> None:
        for each in (*self._folders_up(folder), self._root):
            files.sync_folder(each)

    def _folders_up(self, folder: Path) -> tuple[Path, ...]:
        """From `folder` up to the one below the root."""
        depth = len(folder.relative_to(self._root).parts)
        return (folder, *folder.parents)[:depth]


@contextmanager
def _classified(doing: str) -> Iterator[None]:
    try:
        yield
    except files.NotRegularFile as error:
        raise store.OutsideStore(f"{doing} failed: {error}; remove it") from error
    except files.NoHardLinks as error:
        raise StoreFailed(
            f"{error.filename} cannot be created: its file system has no hard links ({error}); put the run directory elsewhere, or in an object store"
        ) from error
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not doing.startswith("reading"):
            # Another writer's retention removed an empty folder between our mkdir and our open. The
            # next attempt makes it again.
            raise store.StoreUnavailable(f"{doing} failed: {error}") from error
        raise store.as_store_failure(doing, error) from error


def _write_new(path: Path, payload: store.Payload, midway: Callable[[], None]) -> None:
    # At least two chunks, so that a small payload has a middle as well.
    chunk_bytes = min(store.CHUNK_BYTES, max(1, (payload.size_bytes + 1) // 2))
    middle = -(-payload.size_bytes // chunk_bytes) // 2
    with path.open("xb", buffering=0) as file:
        for number, chunk in enumerate(payload.chunks(chunk_bytes)):
            if number == middle:
                midway()
            files.write_all(file.fileno(), chunk)
            # The disk works while the next chunk is copied and the payload is hashed.
            files.begin_writeback(file.fileno(), number * chunk_bytes, len(chunk))
        os.fsync(file.fileno())
