"""What a run directory's URL says about its storage, without opening it."""

# Those whose libraries pass on a request that creates an object only where there is none.
_EXCLUSIVE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss"}


def has_exclusive_create(url: str) -> bool:
    """Whether nodes can meet in the storage at `url`: of several who create one object, exactly one is told that it did."""
    protocol, separator, _ = url.partition("://")
    return bool(separator) and protocol in _EXCLUSIVE
