"""One file shows a run in a browser: it opens from disk, and asks no network for anything.

Foreign text stands in the page as escaped text, and as JSON that can end no element. Scripts and
styles are those of `static/` alone: the policy in the page lists their hashes, so that a browser
runs nothing else, whatever a run is named.
"""

import base64
import hashlib
import html
from dataclasses import asdict
from functools import cache
from importlib.resources import files

from elastic.report.picture.json_text import json_text
from elastic.report.picture.picture import Comparison, Picture

_STYLES = ("uplot/uPlot.min.css", "page.css")
_SCRIPTS = ("uplot/uPlot.iife.min.js", "format.js", "timeline.js", "charts.js", "sections.js", "page.js")


def page(shown: Picture | Comparison, *, polls: bool = False) -> str:
    """polls: the page asks the server that it came from for newer pictures."""
    is_pair = isinstance(shown, Comparison)
    name = f"{shown.a.name} and {shown.b.name}" if isinstance(shown, Comparison) else shown.name
    headline = shown.reason if isinstance(shown, Comparison) else shown.headline
    parts = {
        "policy": policy(polls=polls),
        "title": html.escape(name),
        "headline": html.escape(headline),
        "licence": _static("uplot/LICENSE"),
        "styles": "\n".join(f"<style>{_static(name)}</style>" for name in _STYLES),
        "picture": document(shown),
        "scripts": "\n".join(f"<script>{_static(name)}</script>" for name in _SCRIPTS),
        "mode": "live" if polls else ("pair" if is_pair else "file"),
    }
    # In one pass: what is put in is not looked at again.
    head, *rest = _static("page.html").split("{{")
    pieces = [head]
    for each in rest:
        key, _, text = each.partition("}}")
        pieces += [parts[key], text]
    return "".join(pieces)


def document(shown: Picture | Comparison) -> str:
    """The JSON of a picture, for a script element or an answer."""
    return json_text(asdict(shown))


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
    return files("elastic.report.picture").joinpath("static", *name.split("/")).read_text(encoding="utf-8")
