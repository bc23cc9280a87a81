"""The backend contract within one process: for simulations and tests of groups, and the shortest reading of the contract.

It does not reach another process, and nothing of it survives its own.
"""

import threading


class MemoryBackend:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: list[bytes] = []
        self._beats: dict[str, int] = {}

    def read(self) -> tuple[int, bytes] | None:
        with self._lock:
            return (len(self._values), self._values[-1]) if self._values else None

    def compare_and_set(self, version: int | None, value: bytes) -> bool:
        with self._lock:
            if (version or 0) != len(self._values):
                return False
            self._values.append(value)
            return True

    def beat(self, node_id: str) -> None:
        with self._lock:
            self._beats[node_id] = self._beats.get(node_id, 0) + 1

    def beats(self) -> dict[str, int]:
        with self._lock:
            return dict(self._beats)

    def history(self) -> list[bytes]:
        """Every value there ever was, oldest first."""
        with self._lock:
            return list(self._values)
