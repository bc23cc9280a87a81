"""Settings that the interpreter and its libraries read from the environment as they begin.

Threads, string hashing and malloc: this process's children inherit these settings.
"""

import os
from pathlib import Path

from elastic.errors import UsageError

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
HUGETLB = "glibc.malloc.hugetlb=1"
# Memory that is freed at the end of the heap stays the process's, up to 256 MiB, and arrays up to
# 32 MiB lie in the heap: as far as glibc moves its own threshold, which these settings fix.
KEEP_FREED = "glibc.malloc.mmap_threshold=33554432", "glibc.malloc.trim_threshold=268435456"
MALLOC = ":".join((HUGETLB, *KEEP_FREED))
# The older variables that set the same, which glibc passes over where GLIBC_TUNABLES has it.
_OLDER = {
    "glibc.malloc.mmap_threshold": "MALLOC_MMAP_THRESHOLD_",
    "glibc.malloc.trim_threshold": "MALLOC_TRIM_THRESHOLD_",
}
HASH_SEED = "PYTHONHASHSEED"


def pin_threads() -> int:
    """Pin the number of intra-op threads for this process's children, and return it.

    It is OMP_NUM_THREADS, or 1 if that is not set: CPU kernels split their sums by threads, so
    another number of threads gives another result. Raises UsageError.
    """
    threads = os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise UsageError(
            f"expected a number of threads in OMP_NUM_THREADS, found {threads!r}; unset it to use 1"
        )
    os.environ.setdefault("MKL_NUM_THREADS", threads)
    # OpenBLAS starts its threads when numpy is imported, and the fork server must have one thread.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # cuBLAS is deterministic only with a fixed workspace (cuBLAS documentation, section 2.1.4).
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")
    return int(threads)


def fix_hashing() -> str:
    """The same string hashing in all workers: otherwise a set of strings would iterate in another
    order on each node and after each resume. Returns a sentence where that changes a value.
    """
    found = os.environ.get(HASH_SEED)
    os.environ[HASH_SEED] = "0"
    if found in (None, "", "0", "random"):
        return ""
    return f"{HASH_SEED} is 0 in every run, not {found}: sets of strings iterate alike on all nodes and after each resume"


def set_up_malloc() -> None:
    """Have malloc keep freed memory, in large pages.

    A step frees what the next one allocates. By itself malloc gives the end of the heap back in
    between, and the kernel zeroes its pages anew: a step of ResNet-18 took 7 % longer. A large
    page costs one page fault in place of 512: a worker's first step is a quarter faster, and later
    steps a tenth. glibc reads GLIBC_TUNABLES only when a process starts; before 2.35 it does not
    know the large pages. Nothing happens with another C library. What the variable sets, stays,
    and so does what MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ set.
    """
    tunables = [*filter(None, os.environ.get("GLIBC_TUNABLES", "").split(":"))]
    known = {each.partition("=")[0] for each in tunables}
    known |= {name for name, older in _OLDER.items() if older in os.environ}
    try:
        is_glibc = "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")
    except (OSError, ValueError):
        return
    wanted = (*_large_pages(), *KEEP_FREED) if is_glibc else ()
    missing = [each for each in wanted if each.partition("=")[0] not in known]
    if missing:
        os.environ["GLIBC_TUNABLES"] = ":".join([*tunables, *missing])


def _large_pages() -> tuple[str, ...]:
    """Where the kernel gives them on request; elsewhere asking changes nothing."""
    try:
        mode = LARGE_PAGES.read_text()
    except (OSError, ValueError):
        return ()
    return (HUGETLB,) if "[madvise]" in mode else ()
