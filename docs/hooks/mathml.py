"""Turns the equations of a page into MathML when the site is built, so that reading them needs no script."""

import html
import re

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """Replace what the arithmatex extension has marked; called by mkdocs for each page."""
    return EQUATION.sub(_to_mathml, content)


def _to_mathml(match: re.Match[str]) -> str:
    tag, delimiter, latex = match.groups()
    equation = convert(html.unescape(latex).strip(), display="block" if delimiter == "[" else "inline")
    return f'<{tag} class="equation">{equation}</{tag}>'
