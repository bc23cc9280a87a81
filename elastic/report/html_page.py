"""One file shows a run in a browser: it opens from disk, and asks no network for anything.

Foreign text stands in the page as escaped text, and as JSON that can end no element. Scripts and
styles are those of `static/` alone: the policy in the page lists their hashes, so that a browser
runs nothing else, whatever a run is named.
"""

import base64
import hashlib
import html
import json
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from elastic.errors import UsageError
from elastic.system.untrusted import printable

_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "format.js", "timeline.js", "charts.js", "sections.js", "page.js")
# What a browser may not take for markup within a script element, what ends a line of a script, and
# half characters, which UTF-8 cannot write.
_ESCAPED = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_BEGIN = b'<!doctype html>\n<html lang="en" data-mode="'  # of each page


def json_text(value: Any) -> str:
    """For a script element or an answer. value: dicts, lists, texts and finite numbers."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def html_page(shown: dict[str, Any], *, polls: bool = False) -> str:
    """shown: as page.py makes it, of a run or of two. polls: the page asks the server that it came
    from for newer ones.
    """
    parts = {
        "policy": policy(polls=polls),
        "title": html.escape(shown["name"]),
        "headline": html.escape(shown["headline"]),
        "licence": _static("uplot/LICENSE"),
        "styles": "\n".join(f"<style>{_static(name)}</style>" for name in _STYLES),
        "picture": json_text(shown),
        "scripts": "\n".join(f"<script>{_static(name)}</script>" for name in _SCRIPTS),
        "mode": "live" if polls else "file",
    }
    # In one pass: inserted text is not looked at again.
    head, *rest = _static("page.html").split("{{")
    pieces = [head]
    for each in rest:
        key, _, text = each.partition("}}")
        pieces += [parts[key], text]
    return "".join(pieces)


def write_page(shown: dict[str, Any], text: str) -> str:
    """Write the page to the file that `text` names, and say so.

    Raises UsageError, also for a file with another content: a recipe would be lost.
    """
    path, data, begin = Path(text), html_page(shown).encode(), b""
    try:
        if path.is_file():
            with path.open("rb") as file:
                begin = file.read(len(_BEGIN))
        if begin in (b"", _BEGIN):
            path.write_bytes(data)
            return f"{printable(text)}: {len(data) / 1000:.0f} kB; open it in a browser"
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            f"expected a file behind --html that can be written, found: {found} ({path}); give another one"
        ) from error
    raise UsageError(
        f"expected a new file behind --html, or a page of before, found that {path} holds something else; take another name"
    )


@cache
def policy(*, polls: bool) -> str:
    """The Content-Security-Policy of the page."""
    rules = [
        "default-src 'none'",
        f"script-src {_hashes(_SCRIPTS)}",
        f"style-src {_hashes(_STYLES)}",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join([*rules, "connect-src 'self'"] if polls else rules)


def _hashes(names: tuple[str, ...]) -> str:
    digests = (hashlib.sha256(_static(name).encode()).digest() for name in names)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


@cache
def _static(name: str) -> str:
    return files("elastic.report").joinpath("static", *name.split("/")).read_text(encoding="utf-8")
