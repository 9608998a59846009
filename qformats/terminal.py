"""What files say, as a terminal may show it: whatever they hold is text there, never a command.

An escape sequence writes the clipboard, sets the title or hides what stood before it; bidirectional
controls show a text in another order than it has. Names, values and answers of a model file come
from whoever wrote it. Names are read so, values stay as they are until they are printed.
"""

from __future__ import annotations

import re
from typing import Final

# C0, delete and C1; line separators and bidirectional controls; halves of surrogate pairs.
_COMMANDS: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

MOST: Final = 2000
"""Characters of a sentence: a name in a file may have millions."""


def shown(text: str, keep: str = "") -> str:
    """text with the characters that a terminal obeys as escapes: ESC becomes four letters that read
    x1b behind a backslash. keep: those of them that stay, newline and tab in an answer."""
    return _COMMANDS.sub(
        lambda one: one[0] if one[0] in keep else one[0].encode("unicode_escape").decode(), text
    )


def sentence(text: str) -> str:
    """text as `shown`, in one line; of a long one the beginning and the end."""
    line = shown(" ".join(text.split()))
    if len(line) <= MOST:
        return line
    return f"{line[: MOST // 2]} ... {line[-MOST // 4 :]}"
