"""Docstrings for the site: their roles and formulas, which are those of Sphinx, as Markdown."""

import re
import textwrap

import griffe

MATH = re.compile(r"^( *)\.\. math::(.*(?:\n(?:\1 +\S.*))*)", re.MULTILINE)


def as_markdown(text: str) -> str:
    r"""A docstring with its formulas between dollars and its names as code.

    >>> print(as_markdown("See :func:`f`, :math:`x`.\n\n.. math:: a\n    = b"))
    See `f`, $x$.
    <BLANKLINE>
    $$
    a
    = b
    $$
    """

    def block(match: re.Match[str]) -> str:
        formula = "\n".join(line.strip() for line in match[2].strip().splitlines())
        return textwrap.indent(f"$$\n{formula}\n$$", match[1])

    text = MATH.sub(block, text)
    text = re.sub(r":math:`([^`]+)`", r"$\1$", text)
    text = re.sub(r":(?:func|class|meth|mod|data|attr):`~?([^`]+)`", r"`\1`", text)
    return re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE)


class Markdown(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """For every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
