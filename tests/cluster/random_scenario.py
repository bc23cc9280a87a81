"""A random scenario is a function of its seed, in the language of scenario.py.

It keeps to what every run must survive. The first fault comes after the first commit; then nodes
may die in any number and return; what is damaged has a whole checkpoint behind it; a network is
whole again in the end. What then happens cannot be foretold, so it has no expected history: the
rules of oracle.py judge it.
"""

import random
from collections.abc import Callable
from enum import Enum

GATES = (6, 9, 12, 15, 18, 21)  # the recipe has 24 steps, and commits every fourth
OPTIONS = "--min-nodes 1 --last-call 2s --max-restarts 50"


class Place(Enum):
    """Where the nodes meet."""

    FOLDER = "folder"
    C10D = "c10d"
    ETCD = "etcd"
    STORE = "store"


def draw_scenario(seed: int, place: Place) -> str:
    return _Draw(seed, place).text()


class _Draw:
    def __init__(self, seed: int, place: Place) -> None:
        self._random = random.Random(f"{seed} {place.value}")
        self._place = place
        self._size = self._random.choice((2, 2, 3))
        self._has_jumps = self._random.random() < 0.25  # of wall clocks; all nodes then start slowly
        self._disk = self._random.choice(("", "", "volume 32", "disk 64")) if place is Place.FOLDER else ""
        self._lines: list[str] = []
        self._running: list[str] = []
        self._dead: list[str] = []
        self._leaving: list[str] = []
        self._started = 0
        self._codes: list[int] = []
        self._held = ""  # a fault that lasts, and the line that ends it
        self._loses_saves = False
        self._gate = 0
        self._is_open = False

    def text(self) -> str:
        self._head()
        for self._gate in GATES:
            self._lines.append(f"stands {self._gate}")
            if self._gate == GATES[0]:
                self._lines.append("until checkpoint_committed step=4")
            self._phase(is_open=False)
            self._lines.append(f"open {self._gate}")
            self._phase(is_open=True)
            self._mend()
        self._lines.append(f"end {' '.join(map(str, sorted([*self._codes, *[0] * len(self._running)])))}")
        return "\n".join(self._lines) + "\n"

    def _head(self) -> None:
        options = [OPTIONS, f"--max-nodes {self._size}"]
        if self._place is Place.C10D:
            options.append("--rdzv-backend c10d --rdzv-endpoint {n1}")
        elif self._place is Place.ETCD:
            options.append("--rdzv-backend etcd --rdzv-endpoint {etcd}")
            self._lines.append("etcd 3")
        elif self._place is Place.STORE:
            self._lines.append("store")
        if self._random.random() < 0.3:
            self._loses_saves = True
            step, point = (
                self._random.choice((8, 12, 16)),
                self._random.choice(("upload", "before-commit", "after-commit")),
            )
            options.append(f"--faults 'checkpoint {step} {point}: kill uploader'")
        title = f"# Random faults; the nodes meet in: {self._place.value}."
        self._lines = [
            title,
            "within 240s",
            *self._lines,
            *([self._disk] if self._disk else []),
            f"options {' '.join(options)}",
        ]
        self._lines.append(f"shut {' '.join(map(str, GATES))}")
        self._start(self._size)

    def _phase(self, *, is_open: bool) -> None:
        """One fault at most that ends a generation, and now and then one that does not.

        is_open: the ranks may go on to the next gate, so the fault hits them at any point.
        """
        self._is_open = is_open
        if is_open:
            self._lines.append(f"hold {self._random.choice((0.05, 0.1, 0.2, 0.4, 0.8, 1.6))}s")
        for _ in range(self._random.choice((0, 1, 1, 2)) if not is_open else self._random.choice((0, 0, 1))):
            self._random.choice(self._faults())()

    def _faults(self) -> list[Callable[[], None]]:
        """Those that are possible now; one that stands here twice is drawn twice as often."""
        found: list[Callable[[], None]] = [self._nothing]
        is_calm = not (self._held or self._leaving or self._dead)
        # Else what is to be killed may have finished.
        may_kill = is_calm and not (self._is_open and self._gate == GATES[-1])
        if is_calm:
            found += [self._hold_node] * 3
        if may_kill:
            found += [self._kill_worker] * 3
        if is_calm and not self._is_open:
            found += [self._stranger, self._other_policy]
            if self._gate < GATES[-1]:
                found += [self._spare] * 2
        if may_kill and len(self._running) > 1:
            found += [self._kill_node] * 2
            if not self._is_open and self._gate < GATES[-1] and self._may_leave():
                found += [self._terminate] * 2
        if may_kill:
            found += [self._end_all] * 2
        is_saved = self._gate >= GATES[-2] and not self._loses_saves
        if is_calm and is_saved and self._place is not Place.STORE:
            found.append(self._damage)
        if self._has_jumps and self._running:
            found += [self._jump] * 2
        if not self._held:
            found += self._faults_of_place()
        return found

    def _faults_of_place(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        if self._disk.startswith("volume"):
            found.append(self._fill)
        if self._place is Place.ETCD:
            found.append(lambda: self._hold(f"kill member {self._random.choice(('e1', 'e2', 'e3'))}", 3))
        if self._place is Place.STORE:
            how = self._random.choice(("answers 500", "answers 503", "hangs"))
            found.append(lambda: self._hold(f"storage {how}", 4, ends="storage heals"))
        return found

    # Faults.

    def _nothing(self) -> None:
        pass

    def _kill_worker(self) -> None:
        # How many ranks there are depends on who has come back in time.
        self._lines.append(f"kill worker of rank {self._random.choice((0, -1))}")
        self._held = "settle"

    def _kill_node(self) -> None:
        self._die([self._random.choice(self._running)])

    def _end_all(self) -> None:
        """Every node dies, and some files with them."""
        if self._disk.startswith("disk") and self._random.random() < 0.7:
            self._lines.append("cut power")
        else:
            self._lines.append("kill every node")
        down = [*self._running]
        self._running.clear()
        for node in down:
            self._lines.append(f"ends {node} 137")
        if self._place is Place.FOLDER and self._random.random() < 0.4:
            self._lines.append("empty newest version")
        self._dead += down
        self._revive()
        self._held = "settle"

    def _terminate(self) -> None:
        node = self._random.choice(self._may_leave())
        # Before its first words it has no handler of the signal yet.
        self._lines += [f"until {node} says generation", f"terminate node {node}"]
        self._running.remove(node)
        self._leaving.append(node)

    def _hold_node(self) -> None:
        verb = self._random.choice(("pause", "pause", "cut", "deafen", "mute"))
        self._hold(f"{verb} node {self._random.choice(self._running)}", self._random.choice((1, 2, 5)))

    def _jump(self) -> None:
        verb = self._random.choice(("jump", "jump-back"))
        self._lines.append(f"{verb} node {self._random.choice(self._running)}")

    def _spare(self) -> None:
        self._start(1)

    def _stranger(self) -> None:
        self._refused("-- --form sum")

    def _other_policy(self) -> None:
        self._refused("--keep-alive 7")

    def _fill(self) -> None:
        self._loses_saves = True
        self._hold("fill volume", 3)

    def _damage(self) -> None:
        self._lines.append(self._random.choice(("flip newest checkpoint", "truncate newest checkpoint")))

    # What follows from them.

    def _may_leave(self) -> list[str]:
        """All but the host of the store, without which the others would wait for it."""
        return [node for node in self._running if self._place is not Place.C10D or node != "n1"]

    def _start(self, count: int) -> None:
        self._lines.append(f"start {count} --max-nodes {self._size}")
        self._running += [f"n{self._started + place}" for place in range(1, count + 1)]
        self._started += count

    def _refused(self, words: str) -> None:
        self._started += 1
        self._lines += [f"start 1 --max-nodes {self._size} {words}", f"ends n{self._started} 2"]

    def _die(self, nodes: list[str]) -> None:
        self._lines.append(f"kill node{'s' if len(nodes) > 1 else ''} {' '.join(nodes)}")
        for node in nodes:
            self._lines.append(f"ends {node} 137")
            self._running.remove(node)
        self._dead += nodes

    def _hold(self, fault: str, seconds: float, ends: str = "release") -> None:
        self._lines.append(fault)
        self._held = f"hold {seconds}s\n{ends}"

    def _mend(self) -> None:
        """Before the next gate, so that the group comes to rest there."""
        if self._held and self._held != "settle":
            self._lines += self._held.splitlines()
        self._held = ""
        for node in self._leaving:
            self._lines.append(f"ends {node} 75")
        self._leaving.clear()
        # The host of the store must come back; another node may stay away.
        if self._dead and ("n1" in self._dead or self._random.random() < 0.7):
            self._revive()
        self._dead.clear()

    def _revive(self) -> None:
        self._lines += [f"again {node}" for node in self._dead]
        self._running += self._dead
        self._dead.clear()
