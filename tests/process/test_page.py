"""The page of a run in a real browser draws without a complaint, asks for nothing, and can be used.

Chromium is installed from the distribution's packages where there is none; a machine that cannot do
that fails these tests with a sentence.
"""

import json
from dataclasses import replace

import drawn_runs
import pytest
from logged import started

from elastic.cli import main


@pytest.fixture
def show(chromium, tmp_path, capsys):
    """Write the page of a run, and open it from the disk. No page complains on the console, where a
    policy's refusal is one; and none asks for more.
    """
    opened = []

    def shown(events, lines, **how):
        run, html = drawn_runs.write(tmp_path / "run", events, lines), tmp_path / "page.html"
        assert main(["report", str(run), "--html", str(html)]) == 0
        opened.append(chromium.open(html.as_uri(), **how))
        return opened[-1]

    yield shown
    for page in opened:
        assert page.complaints() == []
        (own,) = page.requests()
        assert own.startswith("file://")
        page.close()


def count(page, selector):
    return page.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


def text(page, selector):
    found = page.evaluate(f"document.querySelector({json.dumps(selector)}).textContent")
    return found.replace("\u202f", " ").replace("\u00a0", " ")


def into_view(page, selector):
    """Left, top, width and height of an element."""
    page.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{ block: 'center' }})")
    return page.evaluate(
        f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        " return [box.left, box.top, box.width, box.height]; })()"
    )


def test_the_page_of_a_run_draws_all_of_its_parts(show):
    page = show(*drawn_runs.of_generations(7, 40))

    assert text(page, "h1").startswith("Finished: 280 steps")
    assert count(page, ".timeline .generation-group") == count(page, ".timeline .generation") == 7
    assert count(page, ".timeline .mark.fault") == 6 + 2  # the killed workers, and the lost nodes
    assert count(page, ".timeline .saved") == 7
    assert count(page, ".timeline .in") == 5  # of three nodes two are replaced by others
    assert count(page, ".chart canvas") == 4  # loss, two values, step time
    assert count(page, "#recoveries tbody tr") == 6
    sections = page.evaluate("[...document.querySelectorAll('section')].map((each) => each.id)")
    assert sections == ["time", "faults", "timeline", "logged", "steps", "recoveries", "checkpoints", "facts"]
    # A canvas that draws nothing raises no error: the colours of its lines must be there.
    into_view(page, "[data-name=loss]")
    drawn = page.evaluate(
        "(() => { const canvas = document.querySelector('[data-name=loss] canvas');"
        " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        " let blue = 0; for (let at = 0; at < data.length; at += 4)"
        " if (data[at + 2] > data[at] + 60 && data[at + 3] > 200) blue += 1; return blue; })()"
    )
    assert drawn > 300


@pytest.mark.parametrize(("number", "steps"), [(1, 0), (600, 2)])
def test_the_shortest_and_a_long_run_have_a_page(show, number, steps):
    """The long one says what it leaves out; a narrow window needs no scrolling to the side."""
    events, lines = drawn_runs.of_generations(number, steps) if steps else ([], [])
    page = show(events or [started(drawn_runs.BEGAN, 1, "start", ["a"])], lines, size=(390, 800))

    assert count(page, ".timeline .generation-group") == min(number, 500)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert count(page, "#timeline .note") == count(page, "#recoveries .aside") == (number > 500)


def test_the_timeline_and_the_charts_tell_and_zoom(show):
    """Dragging over one chart zooms every chart."""
    page = show(*drawn_runs.of_generations(3, 40))
    left, top, width, _ = into_view(page, ".timeline")

    page.mouse("mouseMoved", left + width * 0.95, top + 35)
    words = page.wait("!document.getElementById('tip').hidden && document.getElementById('tip').textContent")
    assert "generation 3: node left" in words
    assert "6 workers on 3 nodes, steps 81 to 120" in words
    page.mouse("mouseMoved", left + width * 0.95, top - 60)
    assert page.wait("document.getElementById('tip').hidden")
    parts = "[[0, 1, 2], [0, 2]].map((places) => page.timelines[0].unbroken(places))"
    assert page.evaluate(parts) == [[[0, 2]], [[0, 0], [2, 2]]]
    seen = "document.querySelectorAll('.timeline .generation').length"
    page.drag(left + width * 0.8, left + width * 0.9, top + 35)
    assert page.wait(f"{seen} < 3")
    page.evaluate("document.querySelector('button.reset').click()")
    assert page.wait(f"{seen} === 3")

    left, top, width, height = into_view(page, "[data-name=loss] .u-over")
    scales = "page.charts.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max])"

    page.mouse("mouseMoved", left + width / 2, top + height / 2)
    told = "document.querySelector('[data-name=loss] .value').textContent"
    assert page.wait(f"{told}.includes(' at step 6') && {told}")
    page.drag(left + width * 0.25, left + width * 0.5, top + height / 2)
    zoomed = page.wait(f"(() => {{ const all = {scales}; return all.every(([low]) => low > 1) && all; }})()")
    assert len({tuple(each) for each in zoomed}) == 1
    assert zoomed[0] == pytest.approx([31, 60], abs=3)


def test_the_names_of_a_hostile_run_are_text(show):
    """And a script that found its way into the page, as if one were not escaped, is refused."""
    page = show(*drawn_runs.hostile())

    # U+2028 is shown by its number: it is one of the characters that reorder a text.
    shown = drawn_runs.HOSTILE.replace("\u2028", "\\u2028")
    assert page.evaluate("document.querySelector('h1').textContent").count(shown) == 1
    assert count(page, "img") == 0
    assert count(page, "script") == 7  # the picture, five files of the page, and uPlot
    assert page.complaints() == []
    page.evaluate(
        "(() => { const added = document.createElement('script'); added.textContent = 'window.ran = true';"
        " document.body.append(added); })()"
    )
    assert page.evaluate("window.ran === undefined")
    assert len(page.complaints()) == 1


def test_two_runs_lie_over_each_other_with_their_difference(chromium, tmp_path, printed):
    events, lines = drawn_runs.of_generations(2, 40)
    other = lines[:29] + [replace(each, loss=each.loss + 1, chain="0" * 16) for each in lines[29:]]
    a, b = drawn_runs.write(tmp_path / "a", events, lines), drawn_runs.write(tmp_path / "b", events, other)

    said = printed(1, "diff", a, b, "--html", tmp_path / "pair.html")
    assert "the first step at which the runs differ is 30" in said
    page = chromium.open((tmp_path / "pair.html").as_uri())
    assert text(page, "h1") == "The first step at which the runs differ is 30."
    lines_of = "page.charts.map((chart) => [chart.plot.series.length - 1, chart.options.parts])"
    assert page.evaluate(lines_of) == [[2, 30]] * 4
    # Only the chart of the loss says that the runs differ: the others have the same values.
    assert page.evaluate("page.charts.map((chart) => chart.isSame())") == [False, True, True, True]
    assert count(page, "svg.timeline") == 2
    assert page.complaints() == []
    page.close()
