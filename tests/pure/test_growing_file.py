"""Every line is read once and whole, from a file that grows in pieces, is replaced or is
truncated.
"""

import os
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.system.growing_file import AppendedFile, GrowingFile, last_lines, lines_of, read_from

READ_BYTES = 8
PIECES = st.text("ab\n", max_size=12).map(str.encode)


def lines_in(content):
    """Of a line that fills reads the end alone comes."""
    return [line[len(line) // READ_BYTES * READ_BYTES :] for line in content.split(b"\n")[:-1]]


CHANGES = st.sampled_from(["grow"] * 5 + ["replace", "truncate"])


@given(st.lists(st.tuples(CHANGES, PIECES, st.booleans()), max_size=20))
def test_lines_are_those_of_a_reader_that_keeps_everything(tmp_path_factory, history):
    """Reads of eight bytes, so that lines are longer than a read and end at any of its bytes. A
    file may be replaced several times between two calls: the number of the first may be used again.
    """
    path = tmp_path_factory.mktemp("log") / "file"
    file, told, content, is_new = GrowingFile(path, read_bytes=READ_BYTES), 0, b"", True
    for change, piece, looks in history:
        if change == "grow":
            content += piece
            with path.open("ab") as out:
                out.write(piece)
        elif change == "replace":
            content, told, is_new = piece, 0, True
            fresh = path.with_name("fresh")
            fresh.write_bytes(piece)
            fresh.replace(path)
        elif path.exists():
            os.truncate(path, 0)
            content, told, is_new, looks = b"", 0, is_new or file.position > 0, True  # noqa: PLW2901
        if looks:
            assert list(file.lines_to_end()) == lines_in(content)[told:]
            assert file.started_over == is_new
            told, is_new = len(lines_in(content)), not path.exists()
    file.close()
    if path.exists():
        assert list(lines_of(path)) == content.split(b"\n")[:-1]


@pytest.mark.parametrize("kind", ["missing", "link", "pipe", "folder"])
def test_what_is_no_regular_file_has_no_lines(tmp_path, kind):
    """Reading a link would read a file of the linker's choice; opening a pipe would wait for
    ever.
    """
    path, other = tmp_path / "file", tmp_path / "other"
    other.write_text("secret\n")
    if kind == "link":
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    file = GrowingFile(path)
    assert [*file.lines_to_end(), *lines_of(path), *last_lines(path, 9), read_from(path, 0, 9)] == [b""]


def test_the_last_lines_begin_anywhere_and_end_whole(tmp_path):
    path = tmp_path / "file"
    path.write_text("one\ntwo\nthree\nfo")
    assert last_lines(path, 10) == [b"o", b"three"]
    assert last_lines(path, 100) == [b"one", b"two", b"three"]
    assert read_from(path, 4, 6) == b"two\nth"


def test_a_line_does_not_continue_half_a_line_of_another(tmp_path):
    """That was killed while the disk was full; a third one finds whole lines."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    for number in (2, 3):
        with closing(AppendedFile(path)) as file:
            file.append({"c": number})
    assert path.read_bytes() == b'{"a": 1}\n{"b": \n{"c":2}\n{"c":3}\n'
