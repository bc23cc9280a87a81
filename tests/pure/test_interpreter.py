"""Every interpreter of a run begins with the same settings."""

import os

import pytest

from elastic.config import environment
from elastic.errors import UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch):
    """An environment without the threads that other tests pinned."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "")  # so that monkeypatch undoes what pin_threads sets
        monkeypatch.delenv(name)
    return monkeypatch


def test_the_number_of_threads_is_one_unless_it_is_set(bare):
    """The result depends on the number of threads, so it must not follow the machine."""
    assert environment.pin_threads() == 1
    assert environment.pin_threads() == 1  # the second reading is what the first one pinned
    bare.setenv("OMP_NUM_THREADS", "3")
    assert environment.pin_threads() == 3


@pytest.mark.parametrize("value", ["", "0", "many", "-2", "4,2"])
def test_a_malformed_number_of_threads_is_refused(bare, value):
    """With "4,2" OpenMP nests its threads: there is no single number."""
    bare.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(UsageError, match="OMP_NUM_THREADS, found"):
        environment.pin_threads()


@pytest.mark.parametrize("name", ["", "GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_malloc_works_as_the_environment_says(bare, name):
    """glibc passes over the older variables where GLIBC_TUNABLES is set."""
    for each in ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        bare.setenv(each, "")
        bare.delenv(each)
    if name:
        bare.setenv(name, "4096")
    environment.set_up_malloc()
    expected = {"": environment.MALLOC, "GLIBC_TUNABLES": "4096"}.get(name)
    assert os.environ.get("GLIBC_TUNABLES") == expected


@pytest.mark.parametrize(
    ("found", "says"), [(None, ""), ("random", ""), ("5", "PYTHONHASHSEED is 0"), ("0", "")]
)
def test_all_workers_hash_strings_alike(bare, found, says):
    """Two nodes whose shells set different hash seeds would build sets in different orders."""
    bare.setenv("PYTHONHASHSEED", found or "")
    if found is None:
        bare.delenv("PYTHONHASHSEED")
    said = environment.fix_hashing()
    assert said.startswith(says) and bool(said) == bool(says)
    assert os.environ["PYTHONHASHSEED"] == "0"
    assert environment.fix_hashing() == ""
