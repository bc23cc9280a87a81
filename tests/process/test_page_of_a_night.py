"""What a reader asks of the page in the morning is seen in a browser: faults, gaps, colours."""

from dataclasses import replace

import drawn_runs
import pytest
from logged import logged

from elastic.cli import main

BEGAN = drawn_runs.BEGAN
TIP = "document.getElementById('tip')"


@pytest.fixture
def show(show):
    """No page of this module complains."""
    opened = []

    def shown(events, lines, **how):
        opened.append(show(events, lines, **how))
        return opened[-1]

    yield shown
    assert [page.complaints() for page in opened] == [[] for _ in opened]


def text(page, selector):
    return page.evaluate(f"document.querySelector({selector!r}).textContent").replace("\u202f", " ")


def texts(page, selector):
    found = page.evaluate(f"[...document.querySelectorAll({selector!r})].map((each) => each.textContent)")
    return [each.replace("\u202f", " ").replace("\u00a0", " ") for each in found]


def timeline_box(page):
    page.evaluate("document.querySelector('.timeline').scrollIntoView({ block: 'center' })")
    return page.evaluate(
        "(() => { const box = document.querySelector('.timeline').getBoundingClientRect();"
        " return [box.left, box.top]; })()"
    )


def place(page, seconds):
    """Where a moment of the run is on the group's strip."""
    left, top = timeline_box(page)
    return left + page.evaluate(f"page.timelines[0].x({seconds})"), top + 35


def stopped_and_down():
    """Of 100 s each: training, a planned stop, training, no node, and training until it fails."""
    events = [
        drawn_runs.started(BEGAN, 1, "start", ["a"]),
        logged("run_interrupted", BEGAN + 100, 1, "a", step=100),
        drawn_runs.started(BEGAN + 200, 2, "resume", ["a"]),
        logged("checkpoint_committed", BEGAN + 299, 2, "a", step=199),
        drawn_runs.started(BEGAN + 400, 3, "resume", ["a"]),
        logged("worker_failed", BEGAN + 500, 3, "a", rank=0, message="ValueError: no\nmore"),
        logged("run_failed", BEGAN + 500, 3, "a", exit_code=1, reason="ValueError: no"),
    ]
    lines = [
        replace(drawn_runs.line(step, BEGAN + begin + step - first + 1, generation), seconds=1.0)
        for generation, first, begin in ((1, 1, 0), (2, 101, 200), (3, 201, 400))
        for step in range(first, first + 100)
    ]
    return events, lines


def test_the_gaps_between_two_commands_say_what_they_are(show):
    page = show(*stopped_and_down())

    kinds = page.evaluate("[...document.querySelectorAll('.gap')].map((each) => each.dataset.kind)")
    assert kinds == ["stop", "down"]
    assert len(page.evaluate("[...document.querySelectorAll('.timeline .in')].map(() => 1)")) == 3
    for seconds, words in (
        (150, "stopped as asked for 1 min 40 s"),
        (350, "no group was there for 1 min 40 s"),
    ):
        page.mouse("mouseMoved", *place(page, seconds))
        page.wait(f"!{TIP}.hidden")
        assert words in text(page, "#tip").replace("\u00a0", " ")
    assert {"stopped as asked", "no group was there"} <= {*texts(page, "#timeline .key span")}
    rows = texts(page, "#time tbody tr")
    assert "stopped as asked1 min 40 snot counted" in rows
    assert "no group was there1 min 40 s25.0 %1\u00d7" in rows


def test_what_went_wrong_is_a_table_and_the_headline_says_when_the_run_was_seen_last(show):
    page = show(*stopped_and_down())

    rows = [row.split(maxsplit=3) for row in texts(page, "#faults tbody tr")]
    assert ["the run failed: ValueError: no" in " ".join(row) for row in rows] == [True, False]
    assert "no node answered" in " ".join(rows[1])
    assert "1 min 40 s" in " ".join(rows[1])
    when = page.evaluate(f"clockTime({BEGAN + 500}, true)")
    assert text(page, "h1").endswith(f"The last sign of life: {when}.")
    page.set_dark(False, "print")
    assert page.evaluate("document.querySelector('#faults tbody tr').offsetHeight") > 0


def test_the_time_without_a_node_is_a_part_of_a_recovery_in_its_own_colour(show):
    events, lines = drawn_runs.of_generations(2, 20)
    resumed = [
        replace(each, event=replace(each.event, cause="resume"))
        if each.event.name == "generation_started" and each.generation == 2
        else each
        for each in events
    ]
    page = show(resumed, lines)

    part = "document.querySelector('.bars .down')"
    assert page.evaluate(f"Number({part}.getAttribute('width'))") > 0
    assert page.evaluate(f"{part}.textContent").startswith("no node answered: ")
    assert page.evaluate(f"getComputedStyle({part}).fill") == page.evaluate(
        "getComputedStyle(document.querySelector('#recoveries .swatch.down')).backgroundColor"
    )
    assert page.complaints() == []


def test_a_save_that_failed_has_the_colour_of_a_fault_and_not_that_of_a_checkpoint(show):
    events, lines = drawn_runs.of_generations(1, 20)
    failed = logged("checkpoint_failed", lines[9].time, 1, events[0].node, step=10, reason="disk full")
    page = show([*events[:3], failed, *events[3:]], lines)

    fill = "getComputedStyle(document.querySelector('{}')).fill"
    assert page.evaluate(fill.format(".timeline .mark.save")) == page.evaluate(
        "getComputedStyle(document.body.appendChild(Object.assign(document.createElement('i'),"
        " { style: 'color: var(--fault)' }))).color"
    )
    assert "a save failed" in text(page, "#timeline .key")


def test_a_tap_on_a_fault_tells_of_it(show):
    page = show(*stopped_and_down(), size=(400, 800))
    page.call("Emulation.setTouchEmulationEnabled", enabled=True)
    x, y = place(page, 300)

    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x + 9, "y": y}])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    page.wait(f"!{TIP}.hidden")
    assert "no node answered" in text(page, "#tip")
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y + 300}])
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    assert page.wait(f"{TIP}.hidden")


def test_generations_that_are_not_drawn_say_so_and_the_numbers_are_those_of_all(show):
    page = show(*drawn_runs.of_generations(800, 2))

    page.mouse("mouseMoved", *place(page, page.evaluate("page.timelines[0].shown.ends / 2")))
    page.wait(f"!{TIP}.hidden")
    assert "200 generations are not drawn here" in text(page, "#tip")
    assert "planned" not in text(page, "#tip")
    assert page.evaluate("document.querySelector('.timeline').getAttribute('aria-label')").startswith(
        "800 generations on "
    )
    assert "10 longest of 799" in text(page, "#recoveries .aside")
    assert "200 checkpoints between those that are shown" in text(page, "#timeline .note")


def test_the_chart_of_the_slowest_rank_has_gaps_and_the_axis_of_the_step_times(show):
    events, lines = drawn_runs.of_generations(1, 100)
    own = {"slowest_rank": 1, "slowest_s": 0.2, "others_s": 0.1}
    page = show(events, [replace(each, **own) if 40 < each.step <= 60 else each for each in lines])

    assert (
        page.evaluate("page.charts.slice(-2).map(({ plot }) => [plot.scales.x.min, plot.scales.x.max])")
        == [[1, 100]] * 2
    )
    assert page.evaluate("page.charts.at(-1).plot.data[1].map((each) => each ?? 0)") == [
        0.2 if 40 < step <= 60 else 0 for step in range(1, 101)
    ]
    assert page.evaluate("document.querySelectorAll('#steps .note').length") == 0


def luminance(color):
    channels = [int(each) / 255 for each in color[color.index("(") + 1 : -1].split(",")[:3]]
    linear = [each / 12.92 if each <= 0.03928 else ((each + 0.055) / 1.055) ** 2.4 for each in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_each_cause_has_a_colour_of_its_own_that_stands_out_from_the_page(show, dark):
    page = show(*drawn_runs.of_generations(2, 5), dark=dark)
    found = page.evaluate(
        "[...Object.keys(CAUSES).map(causeColor), 'cause-other', 'train'].map((kind) => {"
        " const box = document.querySelector('svg.bar').appendChild(shape('rect', { class: kind }));"
        " const swatch = document.body.appendChild(element('i', { class: `swatch ${kind}` }));"
        " return [getComputedStyle(box).fill, getComputedStyle(swatch).backgroundColor]; })"
    )
    paper = luminance(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))

    assert all(bar == swatch for bar, swatch in found)
    assert len({bar for bar, _ in found}) == len(found) == 11
    for bar, _ in found:
        dim, bright = sorted([luminance(bar), paper])
        assert (bright + 0.05) / (dim + 0.05) >= 3


def test_two_runs_have_their_tables_and_bars_on_one_scale(chromium, tmp_path, capsys):
    """The second run took about half of the time of the first one."""
    a = drawn_runs.write(tmp_path / "a", *drawn_runs.of_generations(2, 40))
    b = drawn_runs.write(tmp_path / "b", *drawn_runs.of_generations(1, 40))
    assert main(["diff", str(a), str(b), "--html", str(tmp_path / "pair.html")]) == 1
    page = chromium.open((tmp_path / "pair.html").as_uri())

    assert page.evaluate("document.querySelectorAll('#time table.causes').length") == 2
    assert text(page, "#time .aside") == "both bars on one scale"
    widths = page.evaluate(
        "[...document.querySelectorAll('svg.bar')].map((bar) => [...bar.children]"
        ".reduce((sum, each) => sum + Number(each.getAttribute('width')), 0))"
    )
    walls = page.evaluate(
        "(() => { const { a, b } = JSON.parse(document.getElementById('picture').textContent);"
        " return [a.wall_s, b.wall_s]; })()"
    )
    assert widths[1] / widths[0] == pytest.approx(walls[1] / walls[0], abs=0.01)
    assert page.complaints() == []
    page.close()
