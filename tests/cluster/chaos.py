"""`make chaos`: random scenarios, one after the other, on all places where nodes can meet.

    python tests/cluster/chaos.py [--seed 1] [--minutes 10 | --hours N | --cases N] [--place PLACE]

Case n has seed `--seed` + n and the next place. Each is drawn by random_scenario.py and judged by
oracle.py: the undisturbed digest, every step once, no commit of an older generation, no start over.
The log has the command that plays a failed case again, its text, and where its files are kept.
Exit 1: a case failed.
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import run
from random_scenario import Place, draw_scenario
from scenario import parse

PLACES = tuple(Place)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=10.0, help="begin no case after that [10]")
    parser.add_argument("--hours", type=float, help="the same in hours")
    parser.add_argument("--cases", type=int, help="how many, whatever time they take")
    parser.add_argument("--place", choices=[place.value for place in Place])
    parser.add_argument("--namespaces", action="store_true", help="no containers, even where they can run")
    parser.add_argument("--show", action="store_true", help="print the scenarios, and run none")
    args = parser.parse_args()
    if args.show:
        for number in range(args.cases or 1):
            print(draw_scenario(args.seed + number, _place(args, number)))
        return 0
    return run.played(lambda name: _play(args, name))


def _place(args: argparse.Namespace, number: int) -> Place:
    return Place(args.place) if args.place else PLACES[(args.seed + number) % len(PLACES)]


def _play(args: argparse.Namespace, name: str) -> int:
    harness = run.open_harness(name, only_namespaces=args.namespaces)
    began_s, failed, number = time.monotonic(), [], 0
    faults: Counter[str] = Counter()
    while _goes_on(args, number, time.monotonic() - began_s):
        seed, place = args.seed + number, _place(args, number)
        text = draw_scenario(seed, place)
        result = run.run_scenario(parse(f"chaos-{seed}-{place.value}", text), harness)
        faults.update(_faults(text))
        run.print_result(result)
        if result.problems:
            failed.append(seed)
            if result.kept is not None:
                Path(result.kept, "scenario.txt").write_text(text)
            print(f"{text}replay: make chaos SEED={seed} PLACE={place.value} CASES=1", flush=True)
        number += 1
    print(", ".join(f"{count} x {fault}" for fault, count in sorted(faults.items())))
    minutes = (time.monotonic() - began_s) / 60
    print(f"{number} cases in {minutes:.0f} minutes, {len(failed)} failed{f': {failed}' if failed else ''}")
    return 1 if failed else 0


def _goes_on(args: argparse.Namespace, number: int, took_s: float) -> bool:
    if args.cases is not None:
        return number < int(args.cases)
    minutes: float = args.hours * 60 if args.hours is not None else args.minutes
    return took_s < minutes * 60


def _faults(text: str) -> list[str]:
    """The kinds of faults of a scenario, without the names of nodes."""
    commands = parse("drawn", text).commands
    found = [words.get("fault") or words.get("how", "") for _, words in commands]
    return [fault for fault in found if fault and fault != "heals"]


if __name__ == "__main__":
    sys.exit(main())
