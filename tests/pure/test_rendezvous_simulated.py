"""Several nodes and one fake clock, without threads: real Rendezvous objects are polled in turns.

The files in tests/scenarios/rendezvous hold commands and what must follow from them.
"""

from pathlib import Path

import pytest
from rendezvous_world import World, other_settings

from elastic.rendezvous.membership import GroupPolicy

SCENARIOS = Path(__file__).parents[1] / "scenarios" / "rendezvous"


def run_scenario(text: str) -> str:
    """Replay the commands of a scenario; what happens takes the place of its `>` lines."""
    lines: list[str] = []
    world: World | None = None
    for line in text.splitlines():
        if line.startswith(">"):
            continue
        lines.append(line)
        command, *words = line.split() or ["#"]
        if command == "#":
            continue
        if command == "policy":
            options = dict(word.split("=") for word in words)
            policy = GroupPolicy(
                min_nodes=int(options["min"]),
                max_nodes=int(options["max"]),
                last_call_s=float(options["last_call"]),
                timeout_s=float(options["timeout"]),
            )
            world = World(policy=policy, keep_alive_s=float(options["keep_alive"]))
            continue
        assert world is not None, "a scenario begins with its policy"
        lines += _run_command(world, command, words)
    return "\n".join(lines) + "\n"


def _run_command(world: World, command: str, words: list[str]) -> list[str]:
    match command:
        case "start":
            for name in words:
                world.start(name)
        case "start-with":
            world.start(words[0], other_settings(world.settings, words[1:]))
        case "kill":
            world.kill(words[0])
        case "freeze" | "wake":
            world.machines[words[0]].is_frozen = command == "freeze"
        case "cut" | "deafen" | "mute":
            world.deaf |= set(words if command != "mute" else ())
            world.mute |= set(words if command != "deafen" else ())
        case "heal":
            world.deaf.clear()
            world.mute.clear()
        case "slow":
            world.machines[words[0]].stops_in = int(words[1])
        case "leave":
            world.leave(words[0])
        case "withdraw":
            world.withdraw(words[0], is_shared=words[1:] != ["alone"])
        case "contradict":
            world.contradict(words[0])
        case "fail":
            world.fail(words[0], step=int(words[1]))
        case "done":
            world.machines[words[0]].rendezvous.done()
        case "tick":
            world.tick(float(words[0]))
        case "show":
            return world.show()
        case _:
            raise ValueError(f"unknown command {command}")
    return []


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario_happens_as_written(path: Path) -> None:
    """The commands of the file run against real Rendezvous objects; the whole text is compared."""
    assert run_scenario(path.read_text()) == path.read_text()
