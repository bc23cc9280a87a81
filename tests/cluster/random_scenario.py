"""A random scenario is a function of its seed, in the language of scenario.py.

It keeps to what every run must survive: after the first commit something is drawn for each gate,
and whatever dies or leaves comes back. What then happens cannot be foretold, so it has no expected
history: the rules of oracle.py judge it.
"""

import random
from enum import Enum

GATES = (6, 9, 12, 15, 18, 21)  # the recipe has 24 steps, and commits every fourth
OPTIONS = "--min-nodes 1 --last-call 2s --max-restarts 50"


class Place(Enum):
    """Where the nodes meet."""

    FOLDER = "folder"
    C10D = "c10d"
    ETCD = "etcd"
    STORE = "store"


# The options of each, and a setting.
MEETS = {
    Place.FOLDER: ("", ""),
    Place.C10D: (" --rdzv-backend c10d --rdzv-endpoint {n1}", ""),
    Place.ETCD: (" --rdzv-backend etcd --rdzv-endpoint {etcd}", "etcd 3"),
    Place.STORE: ("", "store"),
}
# Commands at a gate, where a setting or place has this name; of each `a|b` one is drawn. OPEN lets
# the ranks go on, so what follows hits them at any point.
FAULTS = {
    "": (
        "pause|pause|cut|deafen|mute node NODE; OPEN; hold 1|2|5; release",
        "kill worker of rank 0|-1; OPEN",
        "kill node NODE; ends NODE 137; again NODE; hold 0|10; OPEN",
        "kill every node; GONE; BACK; OPEN",
        "jump|jump-back node NODE; OPEN",
    ),
    "open": (
        "OPEN; pause|pause|cut|deafen|mute node NODE; hold 1|2|5; release",
        "OPEN; kill worker of rank 0|-1",  # how many ranks there are is not known
        "OPEN; kill node NODE; ends NODE 137; again NODE",
    ),
    # Not of one that has just begun, and may have no handler of the signal yet.
    "old": ("terminate node OLD; OPEN; ends OLD 75; again OLD",),
    "volume": ("fill volume; OPEN; hold 3; release",),
    "disk": ("cut power; GONE; BACK; OPEN",),
    "etcd": ("kill member e1|e2|e3; OPEN; hold 3; release",),
    "store": ("storage~answers~500|storage~answers~503|storage~hangs; OPEN; hold 4; storage heals",),
}


def draw_scenario(seed: int, place: Place) -> str:
    draw = random.Random(f"{seed} {place.value}")
    nodes = [f"n{number}" for number in range(1, draw.choice((2, 2, 3)) + 1)]
    meets, setting = MEETS[place]
    disk = draw.choice(("", "", "volume 32", "disk 64")) if place is Place.FOLDER else ""
    lines = [
        f"# Random faults; the nodes meet in: {place.value}.",
        "within 240",
        setting,
        disk,
        f"options {OPTIONS}{meets}",
        f"shut {' '.join(map(str, GATES))}",
        f"start {len(nodes)}",
        f"stands {GATES[0]}",
        "until checkpoint_committed step=4",
    ]
    for gate in GATES:
        # Without the host of its store a group waits.
        old = [n for n in nodes if f"again {n}" not in lines and (place is not Place.C10D or n != "n1")]
        kinds = ["", place.value, *disk.split()[:1], *["old"] * bool(old)]
        # After the last gate what is killed may have ended.
        kinds += ["open"] * (gate != GATES[-1])
        commands = draw.choice([fault for kind in kinds for fault in FAULTS.get(kind, ())])
        texts = {
            "NODE": draw.choice(nodes),
            "OLD": draw.choice(old or nodes),
            "OPEN": f"open {gate}; hold {draw.choice((0.05, 0.1, 0.2, 0.4, 0.8, 1.6))}",
            "GONE": "; ".join(f"ends {node} 137" for node in nodes),
            "BACK": "; ".join(f"again {node}" for node in nodes),
        }
        for name, text in texts.items():
            commands = commands.replace(name, text)
        lines.append(f"stands {gate}")
        for command in commands.split("; "):
            words = [draw.choice(word.split("|")) for word in command.split()]
            lines.append(" ".join(words).replace("~", " "))
    return "\n".join([*lines, f"end{' 0' * len(nodes)}"]) + "\n"
