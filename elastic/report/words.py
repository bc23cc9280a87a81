"""Numbers, durations and foreign text as a person reads them; no text is longer than its limit."""

from elastic.system.untrusted import printable

MOST_LETTERS = 160  # of a name, a cause or a reason


def short(text: str, most: int = MOST_LETTERS) -> str:
    """The text without what commands a terminal or reorders letters, cut at the end."""
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def shortened_at_front(text: str, most: int) -> str:
    """As `short`, of a text whose end says the most, such as a traceback."""
    shown = printable(text[-most - 1 :])
    return shown if len(shown) <= most else "…" + shown[1 - most :]


def count(number: int, one: str, several: str) -> str:
    return f"{grouped(number)} {one if number == 1 else several}"


def grouped(number: int) -> str:
    """Digits in groups of three, from five digits on."""
    return f"{number:,}".replace(",", " ") if abs(number) >= 10_000 else str(number)


def duration(seconds: float) -> str:
    """In the two largest units: 0.8 s, 41 s, 7 min 3 s, 7 h 41 min, 3 d 2 h."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, unit, smaller_size, smaller in _UNITS:
        if whole >= size:
            rest = round((whole % size) / smaller_size)
            if rest * smaller_size == size:  # 59 min 59.6 s
                return f"{whole // size + 1} {unit}"
            return f"{whole // size} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{whole} s"


_UNITS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
