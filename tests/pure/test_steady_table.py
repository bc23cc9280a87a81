"""The table of steady state shows what was measured, and says what is missing."""

import json

import steady
from paired_turns import Turn
from steady import Session
from steady_cells import WIDE, Cell, Choice, Side, choose
from steady_measure import Measured, Pace, Result
from steady_models import WORKLOADS
from steady_programs import Ended

TWO = Cell(model="gpt", workers=2, shards=1)
ONE = Cell(model="mlp64", workers=1, shards=8)


def measured(*step_ms: float, sent_bytes: float | None = None, peak_bytes: int = 500_000_000) -> Measured:
    turns = [Turn(steps=100, seconds=each / 10) for each in step_ms]
    return Measured(turns=turns, sent_bytes=sent_bytes, peak_bytes=peak_bytes, device_bytes=0)


def of_two() -> Result:
    ours = measured(3.0, 4.0, 5.0, sent_bytes=2e6)
    return Result(
        cell=TWO,
        measured={Side.OURS: ours, Side.DDP: measured(2.0, 2.0, 2.0, sent_bytes=1e6)},
        others_share=0.25,
    )


def session(*results: Result, choice: Choice | None = None, failed: tuple[str, ...] = ()) -> Session:
    cells = tuple(result.cell for result in results)
    chosen = choice or Choice(cells=cells, left_out=(), too_wide=())
    return Session(about={"cores": 2}, choice=chosen, results=[*results], failed=[*failed])


def test_a_row_has_the_median_of_the_ratios_of_its_pairs_and_their_spread():
    text = session(of_two()).markdown()
    row = next(line for line in text.splitlines() if line.startswith("| GPT"))
    fields = [field.strip() for field in row.strip("|").split("|")]
    assert fields[1:4] == ["4", "DDP", "2"]
    assert fields[4].startswith("2.000 ± 0.5") and fields[5] == "1.500 to 2.500" and fields[6] == "3"
    assert fields[7:] == ["2 / 1", "500 / 500", "25%"]


def test_each_program_beside_ours_has_a_row_and_rows_of_a_model_stand_together():
    both = {
        Side.OURS: measured(1.0, 1.0, 1.0),
        Side.PLAIN: measured(1.0, 1.0, 1.0),
        Side.DDP: measured(1.0, 1.0, 1.0),
    }
    first = Cell(model="mlp64", workers=1, shards=1)
    results = [of_two(), Result(cell=first, measured=both, others_share=0.0)]
    lines = [line for line in session(*results).markdown().splitlines() if line.startswith("| ")]
    assert [line.split("|")[3].strip() for line in lines[2:]] == ["plain", "DDP", "DDP"]
    assert lines[2].startswith("| MLP") and lines[4].startswith("| GPT")


def test_memory_beyond_plain_is_counted_in_gradients():
    gradients = WORKLOADS[WIDE].gradient_bytes()
    of = {
        Side.OURS: measured(peak_bytes=500_000_000 + 7 * gradients // 2),
        Side.PLAIN: measured(),
    }
    result = Result(cell=Cell(model=WIDE, workers=1, shards=8), measured=of, others_share=None)
    found = session(result)
    assert found.markdown().splitlines()[2].endswith("| 500 | 3.5 |")
    assert json.loads(found.json())["cells"]["wide-1w-8s-fp32"]["ratios"] == {}


def test_what_failed_was_not_begun_or_was_left_out_is_named():
    choice = choose(takes_all=False, only=[], gpus=2)
    text = session(of_two(), choice=choice, failed=(ONE.name,)).markdown()
    assert "Failed, and so not in the table: mlp64-1w-8s-fp32\n" in text
    assert "Not measured, as the time was up or a signal came: mlp64-1w-1s-fp32 mlp512-1w-8s-fp32 " in text
    assert "More workers than GPUs: mlp64: 4w-1s-fp32; resnet18: 4w-1s-fp32; gpt: 4w-1s-fp32\n" in text
    assert "Left out (--all measures them): mlp64: 1w-1s-bf16 " in text


def test_the_json_has_every_turn():
    found = json.loads(session(of_two()).json())
    assert found["cells"][TWO.name]["programs"]["DDP"]["turns"] == [{"steps": 100, "seconds": 0.2}] * 3
    assert found["cells"][TWO.name]["ratios"]["DDP"]["pairs"] == 3
    assert found["machine"] == {"cores": 2} and found["failed"] == [] and found["not_begun"] == []


def test_a_cell_that_fails_costs_itself_alone(monkeypatch, capsys):
    """One program ends by itself, and a worker of another cell is gone when it is looked for."""
    cells = (ONE, TWO, Cell(model="gpt", workers=4, shards=1))

    def measure(cell: Cell, _pace: Pace) -> Result:
        if cell is ONE:
            raise Ended("ours ended with 1:\nno room")
        if cell is cells[-1]:
            raise ProcessLookupError("process 12 ended")
        return of_two()

    monkeypatch.setattr(steady, "measure", measure)
    found = session(choice=Choice(cells=cells, left_out=(), too_wide=()))
    found.measure(Pace(turn_s=1.0, least_pairs=10, least_steps=2, cell_s=20.0), 60.0)
    assert [result.cell for result in found.results] == [TWO]
    assert found.failed == ["mlp64-1w-8s-fp32", "gpt-4w-1s-fp32"] and not found.not_begun
    assert "no room" in capsys.readouterr().err


def test_no_cell_begins_when_the_time_is_up(monkeypatch):
    monkeypatch.setattr(steady, "measure", lambda *_: of_two())
    found = session(choice=Choice(cells=(ONE, TWO), left_out=(), too_wide=()))
    found.measure(Pace(turn_s=1.0, least_pairs=10, least_steps=2, cell_s=20.0), -1.0)
    assert not found.results and found.not_begun == [ONE.name, TWO.name]
