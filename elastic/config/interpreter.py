"""Settings that the interpreter and its libraries read from the environment as they begin.

Threads, string hashing and malloc: child processes inherit what is set here. String hashing and
malloc take a restart of the interpreter itself.
"""

import os
import sys
from pathlib import Path

from elastic.errors import UsageError
from elastic.system import interrupt

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
RESTARTED = "elastic-restarted"  # an option -X, which none of the restarted process's children has
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


def restart() -> None:
    """Restart this process, once, if it lacks settings that an interpreter reads when it begins.

    Its children inherit them. String hashing is fixed: otherwise a set of strings would iterate in
    another order on each node and after each resume. Raises UsageError where that has no effect.
    """
    lacks_hashing, lacks_malloc = _fix_hashing(), _set_up_malloc()
    if RESTARTED in sys._xoptions:  # noqa: SLF001 - documented
        # What starts this interpreter takes variables away: a wrapper, or the C library, which
        # drops GLIBC_TUNABLES where the file has capabilities. It would restart for ever.
        if lacks_hashing:
            raise UsageError(
                f"expected {sys.executable} to pass {HASH_SEED} on, found it taken away; set {HASH_SEED}=0 where the interpreter is started"
            )
    elif lacks_hashing or lacks_malloc:
        interrupt.hold()
        os.execv(sys.executable, [sys.executable, "-X", RESTARTED, *sys.orig_argv[1:]])  # noqa: S606 - itself


def _fix_hashing() -> bool:
    """Whether this process still has to be restarted for it."""
    found = os.environ.get(HASH_SEED)
    if found == "0":
        if sys.flags.hash_randomization:
            raise UsageError(
                f"expected an interpreter that obeys {HASH_SEED}, found one that ignores it; start Python without -E and -I"
            )
        return False
    if found not in (None, "", "random"):
        print(
            f"{HASH_SEED} is 0 in every run, not {found}: sets of strings iterate alike on all nodes and after each resume"
        )
        sys.stdout.flush()
    os.environ[HASH_SEED] = "0"
    return True


def _set_up_malloc() -> bool:
    """Have malloc keep what is freed, in large pages; whether this process must restart for that.

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
        return False
    wanted = (*_large_pages(), *KEEP_FREED) if is_glibc else ()
    missing = [each for each in wanted if each.partition("=")[0] not in known]
    if missing:
        os.environ["GLIBC_TUNABLES"] = ":".join([*tunables, *missing])
    return bool(missing)


def _large_pages() -> tuple[str, ...]:
    """Where the kernel gives them on request; elsewhere asking changes nothing."""
    try:
        mode = LARGE_PAGES.read_text()
    except (OSError, ValueError):
        return ()
    return (HUGETLB,) if "[madvise]" in mode else ()
