"""Examples in docstrings (`>>> …`) as code blocks of the reference; Markdown alone takes `>` for a quotation."""

import re

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)  # from a prompt to the next empty line


class Fences(griffe.Extension):
    """Fences each example, so that it is highlighted as a session at the prompt."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called for each object when all of it is known."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
