"""The page of a run in a real browser draws without a complaint, asks for nothing, and can be used.

Chromium is installed from the distribution's packages where there is none; a machine that cannot do
that fails these tests with a sentence.
"""

import json
import struct
from dataclasses import replace

import drawn_runs
import pytest
from logged import logged

from elastic.cli import main

GENERATIONS = 7


def is_clean(page):
    """No error or warning on the console, none of which a policy's refusal is; and no request."""
    assert page.complaints() == []
    (own,) = page.requests()
    assert own.startswith("file://")
    return True


def rectangle(page, selector):
    found = page.evaluate(
        f"(() => {{ const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
        " return [box.left, box.top, box.width, box.height]; })()"
    )
    return tuple(found)


def into_view(page, selector):
    page.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{ block: 'center' }})")
    return rectangle(page, selector)


def count(page, selector):
    return page.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_of_a_run_draws_all_of_its_parts(show, dark):
    page = show(*drawn_runs.of_generations(GENERATIONS, 40), dark=dark)

    assert page.evaluate("document.querySelector('h1').textContent").startswith("Finished: 280 steps")
    assert count(page, ".timeline .generation-group") == GENERATIONS
    assert count(page, ".timeline .generation") == GENERATIONS
    assert count(page, ".timeline .mark.fault") == GENERATIONS - 1 + 2  # the killed ones, and the lost nodes
    assert count(page, ".chart canvas") == 5  # loss, two values, step time, age
    assert count(page, "#recoveries tbody tr") == GENERATIONS - 1
    sections = page.evaluate("[...document.querySelectorAll('section')].map((each) => each.id)")
    assert sections == ["time", "faults", "timeline", "logged", "steps", "recoveries", "checkpoints", "facts"]
    paper = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) is dark
    assert is_clean(page)


@pytest.mark.parametrize(
    ("count_", "steps"), [(200, 20), (1, 1)], ids=["two hundred generations", "one step"]
)
def test_the_longest_and_the_shortest_run_have_a_page(show, count_, steps):
    page = show(*drawn_runs.of_generations(count_, steps))

    assert count(page, ".timeline .generation-group") == count_
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert is_clean(page)


def test_all_recoveries_are_shown_to_a_reader_who_asks(show):
    page = show(*drawn_runs.of_generations(30, 5))
    rows = "#recoveries tbody tr"

    assert count(page, rows) == 10
    page.evaluate("document.querySelector('#recoveries button').click()")
    assert count(page, rows) == 29
    page.evaluate("page.show(JSON.parse(document.getElementById('picture').textContent))")
    assert count(page, rows) == 29


def test_a_narrow_window_needs_no_scrolling_to_the_side(show):
    page = show(*drawn_runs.of_generations(3, 40), size=(390, 800))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_the_pointer_over_the_timeline_tells_of_the_generation(show):
    page = show(*drawn_runs.of_generations(3, 40))
    left, top, width, _ = into_view(page, ".timeline")

    page.mouse("mouseMoved", left + width * 0.95, top + 35)
    words = page.wait("!document.getElementById('tip').hidden && document.getElementById('tip').textContent")
    assert "generation 3: node left" in words
    assert "6 workers on 3 nodes, steps 81 to 120" in words
    page.mouse("mouseMoved", left + width * 0.95, top - 60)
    assert page.wait("document.getElementById('tip').hidden")


def test_dragging_over_the_timeline_zooms_and_a_button_shows_all_again(show):
    page = show(*drawn_runs.of_generations(9, 40))
    left, top, width, _ = into_view(page, ".timeline")
    seen = ".timeline .generation"

    page.drag(left + width * 0.6, left + width * 0.7, top + 35)
    assert page.wait(f"document.querySelectorAll({seen!r}).length < 4")
    assert count(page, ".timeline .generation-group") == 9
    page.evaluate("document.querySelector('button.reset').click()")
    assert page.wait(f"document.querySelectorAll({seen!r}).length === 9")
    page.evaluate(
        "document.querySelector('.timeline').dispatchEvent(new KeyboardEvent('keydown', {key: '+'}))"
    )
    assert page.wait(f"document.querySelectorAll({seen!r}).length < 9")
    assert is_clean(page)


def test_no_two_ticks_of_the_timeline_say_the_same_however_far_it_is_zoomed(show):
    """Six hours, and then two seconds of the sixth hour."""
    events = [
        drawn_runs.started(drawn_runs.BEGAN, 1, "start", ["a"]),
        logged("run_failed", drawn_runs.BEGAN + 22_000, 1, "a"),
    ]
    page = show(events, [])
    for view in ("null", "{ from: 21000, to: 21200 }", "{ from: 21000, to: 21002 }"):
        page.evaluate(f"page.timelines[0].show({view})")
        ticks = page.evaluate(
            "[...document.querySelectorAll('.timeline > text[text-anchor]')].map((each) => each.textContent)"
        )
        assert len(ticks) > 3
        assert len(set(ticks)) == len(ticks)


def test_dragging_over_a_chart_zooms_every_chart_over_steps(show):
    page = show(*drawn_runs.of_generations(2, 100))
    left, top, width, height = into_view(page, "[data-name=loss] .u-over")
    scales = "page.charts.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max])"

    page.drag(left + width * 0.25, left + width * 0.5, top + height / 2)
    zoomed = page.wait(f"(() => {{ const all = {scales}; return all.every(([low]) => low > 1) && all; }})()")
    assert len({tuple(each) for each in zoomed}) == 1
    low, high = zoomed[0]
    assert low == pytest.approx(51, abs=3)
    assert high == pytest.approx(100, abs=3)
    assert is_clean(page)


def test_the_pointer_over_a_chart_tells_the_value_and_the_step(show):
    page = show(*drawn_runs.of_generations(1, 11))
    left, top, width, height = into_view(page, "[data-name=lr] .u-over")

    page.mouse("mouseMoved", left + width / 2, top + height / 2)
    told = "document.querySelector('[data-name=lr] .value').textContent"
    assert page.wait(f"{told}.includes('at step 6') && {told}") == "0.002 at step 6"


def test_the_page_of_a_run_that_failed_begins_with_the_reason_and_shows_the_gaps(show):
    events, lines = drawn_runs.of_generations(1, 40)
    lines[20] = drawn_runs.line(21, lines[20].time, 1, loss=None)
    end = lines[-1].time
    events = [
        *events[:-1],
        logged("worker_failed", end, 1, message="ValueError: no", traceback="Traceback\nValueError: no"),
        logged("run_failed", end + 1, 1, exit_code=1, reason="ValueError: no"),
    ]
    page = show(events, lines)

    assert page.evaluate("document.querySelector('h1').textContent").startswith("Failed at step 40 of 40")
    assert page.evaluate("document.querySelector('#traceback pre').textContent").endswith("ValueError: no")
    note = page.evaluate("document.querySelector('[data-name=loss] .note').textContent")
    assert note == "Not finite at 1 step, first at step 21."
    assert is_clean(page)


def test_what_was_logged_without_a_number_is_named_and_a_boolean_has_a_chart(show):
    events, lines = drawn_runs.of_generations(1, 8)
    page = show(
        events, [replace(each, values={"flag": each.step > 4, "note": "a", "tags": []}) for each in lines]
    )

    told = page.evaluate("document.querySelector('#logged > .note').textContent")
    assert told == "No number was logged as note, tags; metrics.jsonl has what was."
    assert page.evaluate("document.querySelector('[data-name=flag] .value').textContent") == "1"
    assert is_clean(page)


def test_the_names_of_a_hostile_run_are_text_and_run_nothing(show):
    page = show(*drawn_runs.hostile())

    # U+2028 is shown by its number: it is one of the characters that reorder a text.
    shown = drawn_runs.HOSTILE.replace("\u2028", "\\u2028")
    assert page.evaluate("document.querySelector('h1').textContent").count(shown) == 1
    assert count(page, "img") == 0
    assert count(page, "script") == 7  # the picture, five files of the page, and uPlot
    assert is_clean(page)


def test_a_script_that_found_its_way_into_the_page_is_refused_by_its_policy(show):
    """The second wall: what would run if a text were not escaped."""
    page = show(*drawn_runs.of_generations(1, 2))
    page.evaluate(
        "(() => { const added = document.createElement('script'); added.textContent = 'window.ran = true';"
        " document.body.append(added); })()"
    )

    assert page.evaluate("window.ran === undefined")
    assert len(page.complaints()) == 1


def test_the_printed_page_is_light_and_has_the_charts(show):
    page = show(*drawn_runs.of_generations(3, 40), dark=True)
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.set_dark(True, "print")

    assert page.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(253, 253, 252)"
    assert page.evaluate("getComputedStyle(document.querySelector('button')).display") == "none"
    assert page.pdf().startswith(b"%PDF")
    assert is_clean(page)


def test_a_slow_rank_is_named_beside_what_the_others_did_meanwhile(show):
    events, lines = drawn_runs.of_generations(1, 100)
    events.append(logged("worker_started", drawn_runs.BEGAN, 1, "spot-1-100-00000001", rank=1, pid=7))
    lines = [replace(each, slowest_rank=1, slowest_s=0.2, others_s=0.1) for each in lines]
    page = show(events, lines)

    assert page.evaluate("page.charts.at(-1).plot.data.slice(1).map((own) => own[5])") == [0.2, 0.1]
    assert page.evaluate("document.querySelector('#steps td').parentNode.textContent") == (
        "1spot-1-100-0000000140.0\u202f%10\u202fs"
    )
    assert is_clean(page)


def test_a_run_without_a_step_has_a_page(show):
    page = show([drawn_runs.started(drawn_runs.BEGAN, 1, "start", ["a"])], [])
    assert page.evaluate("document.querySelector('h1').textContent").startswith("Interrupted at step 0")
    assert is_clean(page)


def test_two_runs_lie_over_each_other_and_their_first_difference_is_marked(chromium, tmp_path, capsys):
    events, lines = drawn_runs.of_generations(2, 40)
    other = lines[:29] + [replace(each, loss=each.loss + 1, chain="other") for each in lines[29:]]
    a, b = drawn_runs.write(tmp_path / "a", events, lines), drawn_runs.write(tmp_path / "b", events, other)

    assert main(["diff", str(a), str(b), "--html", str(tmp_path / "pair.html")]) == 1
    assert "the first step at which the runs differ is 30" in capsys.readouterr().out
    page = chromium.open((tmp_path / "pair.html").as_uri())
    assert page.evaluate("document.querySelector('h1').textContent") == (
        "The first step at which the runs differ is 30."
    )
    assert (
        page.evaluate("page.charts.map((chart) => [chart.plot.series.length - 1, chart.options.parts])")
        == [[2, 30]] * 4
    )
    # Only the chart of the loss says that the runs differ: the others have the same values.
    assert page.evaluate("page.charts.map((chart) => chart.isSame())") == [False, True, True, True]
    assert count(page, "svg.timeline") == 2
    assert is_clean(page)
    page.close()


def test_a_picture_of_the_page_is_not_empty(show):
    """A canvas that draws nothing raises no error: the colours of its lines must be there."""
    page = show(*drawn_runs.of_generations(2, 100))
    into_view(page, "[data-name=loss]")
    drawn = page.evaluate(
        "(() => { const canvas = document.querySelector('[data-name=loss] canvas');"
        " const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
        " let blue = 0; for (let at = 0; at < data.length; at += 4)"
        " if (data[at + 2] > data[at] + 60 && data[at + 3] > 200) blue += 1; return blue; })()"
    )
    assert drawn > 300
    width, height = struct.unpack(">II", page.screenshot()[16:24])
    assert (width, height) == (1280, 900)
