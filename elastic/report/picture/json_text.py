"""JSON for a script element or an answer: no text in it ends an element, and all is valid UTF-8."""

import json
import re
from typing import Any

# What a browser may not take for markup within a script element, what ends a line of a script, and
# half characters, which UTF-8 cannot write.
_ESCAPED = re.compile("[<>&\u2028\u2029\ud800-\udfff]")


def json_text(value: Any) -> str:
    """value: dicts, lists, texts and finite numbers."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def size_bytes(value: Any) -> int:
    return len(json_text(value).encode())
