"""How much of a run is drawn at most, and what is given up where even that takes too many bytes."""

from dataclasses import dataclass, fields, replace

_FEWEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """points: of each series. commits: ticks in the timeline."""

    points: int = 1500
    generations: int = 600
    marks: int = 600
    commits: int = 600

    def halved(self, part: str) -> "Limits":
        """part: the name of one of the limits."""
        return replace(self, **{part: max(_FEWEST, getattr(self, part) // 2)})

    def reducible(self) -> list[str]:
        return [each.name for each in fields(self) if getattr(self, each.name) > _FEWEST]
