"""A machine that cannot install what a test needs fails it with a sentence; nothing is skipped."""

import apt
import pytest


def test_a_machine_without_the_program_and_without_apt_gets_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(apt.CannotInstall, match=r"expected x or apt-get .*, found neither; do y"):
        apt.need("x", "x-package", otherwise="do y")


def test_apt_get_that_fails_is_told_with_its_last_lines(monkeypatch, tmp_path):
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho no such package >&2\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(apt.CannotInstall, match="apt-get update to succeed, found: no such package"):
        apt.need("x", "x-package", otherwise="do y")
