"""`--html FILE` takes a name that no recipe has."""

import drawn_runs
import pytest

from elastic.cli import main


@pytest.mark.parametrize("command", ["report {} --html", "diff {} {} --html"])
def test_a_page_takes_no_name_of_a_recipe(command, tmp_path, capsys):
    run = drawn_runs.write(tmp_path / "run", *drawn_runs.of_generations(2, 3))
    words = command.replace("{}", str(run)).split()
    (recipe := tmp_path / "recipe.py").write_text("import torch\n")
    assert main([*words, str(recipe)]) == 2
    assert "expected a FILE behind --html that ends in .html" in capsys.readouterr().err
    assert recipe.read_text() == "import torch\n"
    for _ in range(2):
        assert main([*words, str(tmp_path / "page.html")]) == 0
