"""A backend keeps one versioned value, and one text of each node; of all writers of a version one
wins.

Its readers decide what the bytes and texts mean, and who is alive. Of a group it reads the
generation alone, which orders two histories where a state was lost.
"""

from collections.abc import Collection
from contextlib import suppress
from typing import Protocol

from elastic.errors import ElasticError
from elastic.system.untrusted import parse_json

VALUE_LIMIT_BYTES = 4 * 1024 * 1024  # readers refuse a longer value
LARGEST_GENERATION = 2**30


class BackendFailed(ElasticError):  # noqa: N818
    """The backend cannot be reached or a call failed: workers go on, the next poll tries again."""


class BackendRefused(BackendFailed):
    """The backend answers and refuses, for example a password; a person must correct that."""


class Backend(Protocol):
    """The contract that every implementation is tested against; all methods may raise
    BackendFailed.

    Calls may come from several threads of a node and from all nodes at once. No call waits for
    another node.
    """

    def read(self) -> tuple[int, bytes] | None:
        """The newest version and its value, None before the first.

        Never older than this process has seen before: versions never step back.
        """

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        """Make `value` the successor of `version` (None: the first).

        Returns False, and changes nothing, if `version` is not the newest. False may also mean that
        the outcome is unknown: the caller reads again and, if need be, applies its change again.
        """

    def show(self, node_id: str, text: str) -> None:
        """Show this short text of a node, in place of the one before."""

    def shown(self, node_ids: Collection[str] | None = None) -> dict[str, str]:
        """The texts of these nodes, None: of all nodes, by node id.

        The text of a dead node may stay or vanish; a live node's may be missing, or an old one, for
        a moment.
        """


def generation_of(value: bytes) -> int:
    """The generation that a group's JSON names, by which a backend whose state may be lost tells
    which of two histories is the later; 0 for other values.
    """
    with suppress(ValueError):
        found = parse_json(value)
        generation = found.get("generation") if isinstance(found, dict) else 0
        return generation if isinstance(generation, int) and 0 <= generation < LARGEST_GENERATION else 0
    return 0
