"""Every interpreter of a run begins with the same settings."""

import os

import pytest

from elastic.config import interpreter
from elastic.errors import UsageError

KEPT = ":".join(interpreter.KEEP_FREED)


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """An environment without the threads that other tests pinned."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what pin_threads sets
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_number_of_threads_is_one_unless_it_is_set(bare):
    """The result depends on the number of threads, so it must not follow the machine."""
    assert interpreter.pin_threads() == 1
    assert interpreter.pin_threads() == 1  # the second reading is what the first one pinned
    bare.setenv("OMP_NUM_THREADS", "3")
    assert interpreter.pin_threads() == 3


@pytest.mark.parametrize("value", ["", "0", "many", "-2", "4,2"])
def test_a_malformed_number_of_threads_is_refused(bare, value):
    """With "4,2" OpenMP nests its threads: there is no single number."""
    bare.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(UsageError, match="OMP_NUM_THREADS, found"):
        interpreter.pin_threads()


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    [
        ("always [madvise] never", None, f"glibc.malloc.hugetlb=1:{KEPT}"),
        (
            "always [madvise] never",
            "glibc.malloc.check=3",
            f"glibc.malloc.check=3:glibc.malloc.hugetlb=1:{KEPT}",
        ),
        ("always [madvise] never", "glibc.malloc.hugetlb=0", f"glibc.malloc.hugetlb=0:{KEPT}"),
        (
            "always [madvise] never",
            "glibc.malloc.trim_threshold=1:glibc.malloc.hugetlb=0:glibc.malloc.mmap_threshold=2",
            None,
        ),
        ("[always] madvise never", None, KEPT),
        (
            "always madvise [never]",
            "glibc.malloc.mmap_threshold=2",
            f"glibc.malloc.mmap_threshold=2:{interpreter.KEEP_FREED[1]}",
        ),
    ],
)
def test_children_get_the_settings_of_malloc_that_help(bare, tmp_path, mode, before, after):
    """A second call changes nothing."""
    (tmp_path / "enabled").write_text(mode)
    bare.setattr(interpreter, "LARGE_PAGES", tmp_path / "enabled")
    bare.setenv("GLIBC_TUNABLES", before or "")
    for _ in range(2):
        interpreter.set_up_malloc()
    assert os.environ["GLIBC_TUNABLES"] == (after or before or "")


@pytest.mark.parametrize(
    ("found", "says"), [(None, ""), ("random", ""), ("5", "PYTHONHASHSEED is 0"), ("0", "")]
)
def test_all_workers_hash_strings_alike(bare, found, says):
    """Two nodes whose shells set different hash seeds would build sets in different orders."""
    bare.setenv("PYTHONHASHSEED", found or "")
    if found is None:
        bare.delenv("PYTHONHASHSEED")
    said = interpreter.fix_hashing()
    assert said.startswith(says) and bool(said) == bool(says)
    assert os.environ["PYTHONHASHSEED"] == "0"
    assert interpreter.fix_hashing() == ""


@pytest.mark.parametrize("older", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_what_older_variables_of_malloc_set_stays(bare, tmp_path, older):
    """glibc passes over such a variable where GLIBC_TUNABLES has the same setting."""
    bare.setattr(interpreter, "LARGE_PAGES", tmp_path / "none")
    bare.setenv("GLIBC_TUNABLES", "")
    bare.setenv(older, "4096")
    interpreter.set_up_malloc()
    name = older.removeprefix("MALLOC_").strip("_").lower()
    assert os.environ["GLIBC_TUNABLES"] in interpreter.KEEP_FREED
    assert name not in os.environ["GLIBC_TUNABLES"]
