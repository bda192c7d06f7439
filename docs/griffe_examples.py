"""A Griffe extension: docstrings call the section with examples `Example:`, Griffe calls it `Examples:`."""

import re
from typing import Any

import griffe


class ExampleSections(griffe.Extension):
    """Renames `Example:` sections, which Griffe would show as a quotation instead of code."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Rename the sections of a docstring."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
