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
from string import Template
from typing import Any

from elastic.errors import UsageError
from elastic.system.untrusted import printable

_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "format.js", "timeline.js", "charts.js", "sections.js", "page.js")
# What a browser may not take for markup within a script element, what ends a line of a script, and
# half characters, which UTF-8 cannot write.
_ESCAPED = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


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
    return Template(_static("page.html")).substitute(parts)


def write_page(shown: dict[str, Any], name: str) -> str:
    """Write the page to this file, and say so. Raises UsageError."""
    if not name.endswith((".html", ".htm")):  # a recipe would be lost
        raise UsageError(f"expected a FILE behind --html that ends in .html, found {name}; give another name")
    data = html_page(shown).encode()
    try:
        Path(name).write_bytes(data)
    except (OSError, ValueError) as error:
        found = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(
            f"expected a file behind --html that can be written, found: {found} ({name}); give another one"
        ) from error
    return f"{printable(name)}: {len(data) / 1000:.0f} kB; open it in a browser"


@cache
def policy(*, polls: bool) -> str:
    """The Content-Security-Policy of the page."""
    rules = ["default-src 'none'", f"script-src {_hashes(_SCRIPTS)}", f"style-src {_hashes(_STYLES)}"]
    rules += ["base-uri 'none'", "form-action 'none'"]
    return "; ".join([*rules, "connect-src 'self'"] if polls else rules)


def _hashes(names: tuple[str, ...]) -> str:
    digests = (hashlib.sha256(_static(name).encode()).digest() for name in names)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)


@cache
def _static(name: str) -> str:
    return files("elastic.report").joinpath("static", *name.split("/")).read_text(encoding="utf-8")
