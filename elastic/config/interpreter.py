"""Settings that the interpreter and its libraries read from the environment as they begin.

Threads, string hashing and malloc: this process's children inherit these settings.
"""

import os

from elastic.errors import UsageError

# Large pages; and memory that is freed at the end of the heap stays the process's, up to 256 MiB,
# and arrays up to 32 MiB lie in the heap: as far as glibc moves its own thresholds.
MALLOC = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=268435456"
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
    """Have malloc keep freed memory, in large pages, unless the environment says how it works.

    A step frees what the next one allocates. By itself malloc gives the end of the heap back in
    between, and the kernel zeroes its pages anew: a step of ResNet-18 took 7 % longer. A large
    page costs one page fault in place of 512: a worker's first step is a quarter faster, and later
    steps a tenth. glibc reads GLIBC_TUNABLES only when a process starts, asks the kernel itself
    whether there are large pages, and passes over names that it does not know; other C libraries
    read none of it.
    """
    if not {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"} & os.environ.keys():
        os.environ.setdefault("GLIBC_TUNABLES", MALLOC)
