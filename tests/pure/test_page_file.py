"""`--html FILE` replaces a page, and nothing else that is there."""

import drawn_runs
import pytest

from elastic.cli import main


@pytest.fixture
def run(tmp_path):
    return drawn_runs.write(tmp_path / "run", *drawn_runs.of_generations(2, 3))


def commands(run):
    return [["report", str(run), "--html"], ["diff", str(run), str(run), "--html"]]


@pytest.mark.parametrize("content", ["import torch\n", "<!doctype html>\n<p>notes</p>\n", "{"])
def test_a_file_that_is_no_page_is_refused_and_stays(content, run, tmp_path, capsys):
    """Also through a link."""
    file, link = tmp_path / "recipe.py", tmp_path / "link"
    file.write_text(content)
    link.symlink_to(file)
    for words in commands(run):
        for path in (file, link):
            assert main([*words, str(path)]) == 2
            said = capsys.readouterr()
            assert f"found that {path} holds something else; take another name" in said.err
            assert file.read_text() == content


def test_a_new_name_a_page_of_before_and_an_empty_file_are_taken(run, tmp_path):
    """As mktemp makes it, or a shell for /dev/stdout."""
    file = tmp_path / "page.html"
    for words in commands(run):
        file.unlink(missing_ok=True)
        assert main([*words, str(file)]) == 0
        page = file.read_bytes()
        assert main([*commands(run)[0], str(file)]) == 0
        file.write_bytes(b"")
        assert main([*words, str(file)]) == 0
        assert file.read_bytes() == page
    assert main([*commands(run)[0], str(run / "page.html")]) == 0  # beside the run's own
