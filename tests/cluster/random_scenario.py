"""A random scenario is a function of its seed, in the language of scenario.py.

It keeps to what every run must survive. The first fault comes after the first commit; then nodes
may die in any number and return; what is damaged has a whole checkpoint behind it; a network is
whole again in the end. What then happens cannot be foretold, so it has no expected history: the
rules of oracle.py judge it.
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
# How often each fault is drawn, what must hold then, and the fault: a method, or a command of
# which one word of each `a|b` is drawn; and the seconds for which it lasts.
FAULTS = (
    (1, "", "", ""),
    (3, "calm", "pause|pause|cut|deafen|mute node NODE", "1|2|5"),
    (3, "calm unfinished", "kill worker of rank 0|-1", "0"),  # how many ranks there are is not known
    (2, "calm unfinished", "_end_all", ""),
    (2, "calm unfinished several", "_kill_node", ""),
    (2, "calm shut early several leavers", "_terminate", ""),
    (2, "calm shut early", "_start", ""),
    (2, "calm shut", "_refused", ""),
    (1, "calm saved", "flip newest checkpoint", ""),
    (2, "jumps", "jump|jump-back node NODE", ""),
    (1, "free volume", "fill volume", "3"),
    (1, "free etcd", "kill member e1|e2|e3", "3"),
    (1, "free store", "storage answers~500|answers~503|hangs", "4"),
)


def draw_scenario(seed: int, place: Place) -> str:
    return _Draw(seed, place).text()


class _Draw:
    def __init__(self, seed: int, place: Place) -> None:
        self._draw = random.Random(f"{seed} {place.value}")
        self._place = place
        self._size = self._draw.choice((2, 2, 3))
        self._has_jumps = self._draw.random() < 0.25  # of wall clocks; all nodes then start slowly
        self._disk = self._draw.choice(("", "", "volume 32", "disk 64")) if place is Place.FOLDER else ""
        self._lines: list[str] = []
        self._running: list[str] = []
        self._dead: list[str] = []
        self._leaving: list[str] = []
        self._started = 0
        self._held: list[str] = []  # the lines that end a fault which lasts
        self._loses_saves = self._draw.random() < 0.3

    def text(self) -> str:
        self._head()
        for gate in GATES:
            self._lines.append(f"stands {gate}")
            if gate == GATES[0]:
                self._lines.append("until checkpoint_committed step=4")
            self._hit(gate, self._draw.choice((0, 1, 1, 2)), is_open=False)
            # The ranks may go on to the next gate, so the fault hits them at any point.
            pause_s = self._draw.choice((0.05, 0.1, 0.2, 0.4, 0.8, 1.6))
            self._lines += [f"open {gate}", f"hold {pause_s}"]
            self._hit(gate, self._draw.choice((0, 0, 1)), is_open=True)
            self._mend()
        self._lines.append(f"end{' 0' * len(self._running)}")
        return "\n".join(self._lines) + "\n"

    def _head(self) -> None:
        meets, setting = MEETS[self._place]
        faults = ""
        if self._loses_saves:
            point = self._draw.choice(("upload", "before-commit", "after-commit"))
            faults = f" --faults 'checkpoint {self._draw.choice((8, 12, 16))} {point}: kill uploader'"
        self._lines = [
            f"# Random faults; the nodes meet in: {self._place.value}.",
            "within 240",
            setting,
            self._disk,
            f"options {OPTIONS} --max-nodes {self._size}{meets}{faults}",
            f"shut {' '.join(map(str, GATES))}",
        ]
        self._start(self._size)

    def _hit(self, gate: int, times: int, *, is_open: bool) -> None:
        """One fault at most that ends a generation, and now and then one that does not."""
        for _ in range(times):
            is_calm = not (self._held or self._leaving or self._dead)
            now = {
                "calm": is_calm,
                "unfinished": not (is_open and gate == GATES[-1]),  # else what is killed may have ended
                "shut": not is_open,
                "early": gate < GATES[-1],
                "several": len(self._running) > 1,
                "leavers": bool(self._may_leave()),
                "saved": gate >= GATES[-2] and not self._loses_saves and self._place is not Place.STORE,
                "jumps": self._has_jumps and bool(self._running),
                "free": not self._held,
                self._place.value: True,
                self._disk.partition(" ")[0]: True,
            }
            possible = [
                (fault, lasts_s)
                for weight, needs, fault, lasts_s in FAULTS
                for _ in range(weight)
                if all(now.get(need) for need in needs.split())
            ]
            fault, lasts_s = self._draw.choice(possible)
            if fault.startswith("_"):
                getattr(self, fault)()
            else:
                self._inject(fault, lasts_s)

    def _inject(self, fault: str, lasts_s: str) -> None:
        words = fault.replace("NODE", "|".join(self._running)).split()
        self._lines.append(" ".join(self._draw.choice(word.split("|")) for word in words).replace("~", " "))
        if lasts_s:
            ends = "storage heals" if fault.startswith("storage") else "release"
            self._held = [f"hold {self._draw.choice(lasts_s.split('|'))}", ends]
        self._loses_saves |= fault == "fill volume"

    def _kill_node(self) -> None:
        node = self._draw.choice(self._running)
        self._lines += [f"kill node {node}", f"ends {node} 137"]
        self._running.remove(node)
        self._dead.append(node)

    def _terminate(self) -> None:
        node = self._draw.choice(self._may_leave())
        # Before its first words it has no handler of the signal yet.
        self._lines += [f"says {node} generation", f"terminate node {node}"]
        self._running.remove(node)
        self._leaving.append(node)

    def _refused(self) -> None:
        """Another recipe's arguments, or another policy."""
        words = self._draw.choice(("-- --form sum", "--keep-alive 7"))
        self._started += 1
        self._lines += [f"start 1 --max-nodes {self._size} {words}", f"ends n{self._started} 2"]

    def _end_all(self) -> None:
        """Every node dies."""
        cuts = self._disk.startswith("disk") and self._draw.random() < 0.7
        self._lines.append("cut power" if cuts else "kill every node")
        self._lines += [f"ends {node} 137" for node in self._running]
        self._dead, self._running = self._dead + self._running, []
        self._revive()
        self._held = [""]  # the group comes to rest by itself

    # What follows from them.

    def _may_leave(self) -> list[str]:
        """All but the host of the store, without which the others would wait for it."""
        return [node for node in self._running if self._place is not Place.C10D or node != "n1"]

    def _start(self, count: int = 1) -> None:
        self._lines.append(f"start {count} --max-nodes {self._size}")
        self._running += [f"n{self._started + place}" for place in range(1, count + 1)]
        self._started += count

    def _mend(self) -> None:
        """Before the next gate, so that the group comes to rest there."""
        self._lines += [*self._held, *(f"ends {node} 75" for node in self._leaving)]
        self._held, self._leaving = [], []
        # The host of the store must come back; another node may stay away.
        if self._dead and ("n1" in self._dead or self._draw.random() < 0.7):
            self._revive()
        self._dead = []

    def _revive(self) -> None:
        self._lines += [f"again {node}" for node in self._dead]
        self._running += self._dead
        self._dead = []
