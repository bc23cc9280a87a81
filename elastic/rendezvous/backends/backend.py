"""A backend keeps one versioned value and one counter per node, and of all writers of a version exactly one wins.

It knows nothing of groups: what the bytes mean, and who is alive, is decided by its readers.
"""

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from elastic.errors import ElasticError

VALUE_LIMIT_BYTES = 4 * 1024 * 1024  # readers refuse a longer value


class BackendFailed(ElasticError):  # noqa: N818 - the name says what is wrong, as elsewhere in the tree of errors
    """The backend cannot be reached or did not do as asked: try again at the next poll; running workers need not stop."""


class BackendRefused(BackendFailed):
    """The backend answers and says no, to a password or a certificate: before the first generation the person's to change."""


class Backend(Protocol):
    """The contract that every implementation is tested against; all four may raise BackendFailed.

    Calls may come from several threads of a node and from all nodes at once. Nothing here ever blocks for another node.
    """

    def read(self) -> tuple[int, bytes] | None:
        """The newest version and its value, never older than any that this process has seen; None before the first."""

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        """Make `value` the successor of `version` (None: the first); False, and no change, if `version` is not the newest.

        Versions only grow. False may also mean "not sure": the caller reads again and applies its change once more.
        """

    def beat(self, node_id: str) -> None:
        """Move the counter of `node_id` to a value that it did not have before."""

    def beats(self) -> dict[str, int]:
        """Node id -> counter, not negative. A dead node's may serve_until_read or vanish; a live one's may be missing for a moment."""


@runtime_checkable
class PublishesGeneration(Protocol):
    """A backend that also shows the newest generation to processes that are in no group, such as an uploader's fence."""

    def publish_generation(self, generation: int) -> None:
        """Show `generation`, unless a newer one is shown already."""

    def shown_generation(self) -> int:
        """The newest generation shown by anybody; 0 before the first. Raises BackendFailed."""


@runtime_checkable
class TracksNodes(Protocol):
    """A backend that learns the nodes' names from listings, which may be old."""

    def track_nodes(self, node_ids: Collection[str]) -> None:
        """From now on `beats` looks for these by name, listed or not; it does not fail."""


@runtime_checkable
class MayHost(Protocol):
    """A backend that may live in this very process, and ends with it."""

    @property
    def is_host(self) -> bool: ...
