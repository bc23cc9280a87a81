"""A save may take longer the larger it is: an upload that is slow and moves is not cut off.

How far a storage library is with an object, it does not tell. So a bandwidth is assumed that every
storage has that is of any use. It does not promise that a save that may take longer succeeds.
"""

SAVE_S = 600.0  # for what does not depend on the size: outages, retries, other writers
LEAST_BYTES_PER_S = 1e6


def save_limit_s(fixed_s: float, size_bytes: int) -> float:
    """How long the save of a payload may take; fixed_s: the part that its size does not change."""
    return fixed_s + size_bytes / LEAST_BYTES_PER_S
