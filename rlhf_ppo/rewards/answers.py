"""The answer that a text ends in, and whether two answers agree."""

from __future__ import annotations

import math
import re

MARKERS = re.compile(r"####|\banswer\s+is\b:?|\banswer:", re.IGNORECASE)
"""What announces an answer: GSM8K's `####`, "the answer is", "Answer:"."""

_BOXED = "\\boxed{"
_NUMBER = re.compile(
    r"(?:(?<![\w.)])[-+\N{MINUS SIGN}])?"  # a sign, but no minus between two numbers
    r"(?:[$€£]\s?)?"
    r"(?<![\w.])(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
    r"(?:\s?/\s?(?P<denominator>\d+))?"
)


def final_answer(text: str) -> str:
    r"""Return the answer that a text announces last, or the whole text where it announces none.

    Announced is what stands behind `####`, "the answer is" or "Answer:" up to the end of the line, without the
    asterisks of bold type, and the content of `\boxed{}`.
    """
    boxed = text.rfind(_BOXED)
    marked = [match.end() for match in MARKERS.finditer(text)]
    if boxed >= 0 and boxed + len(_BOXED) >= max(marked, default=0):
        return _braced(text[boxed + len(_BOXED) :]).strip()
    if not marked:
        return text.strip()
    return text[marked[-1] :].lstrip("* \t\n").split("\n")[0].rstrip("* \t")


def same_text(answer: str, reference: str) -> bool:
    """Tell whether two texts end in the same answer, but for case, spacing and a closing full stop."""
    return _plain(final_answer(answer)) == _plain(final_answer(reference))


def same_number(answer: str, reference: str) -> bool:
    """Tell whether two texts end in the same number; fractions to one part in a million, whole numbers exactly.

    A number may have thousands separators, a sign, a currency before it and units behind it; `3/4` is 0.75. It is the
    first one of an announced answer (behind its last `=`, if there is one), or else the last one of the text.
    """
    given, wanted = final_number(answer), final_number(reference)
    if given is None or wanted is None:
        return False
    if given.is_integer() and wanted.is_integer():
        return given == wanted  # one part in a million would let 1,000,001 pass for 1,000,000
    return math.isclose(given, wanted, rel_tol=1e-6, abs_tol=1e-9)


def final_number(text: str) -> float | None:
    """Return the number that a text ends in, as `same_number` describes, or None if it has none that is finite."""
    announced = final_answer(text)
    is_announced = announced != text.strip()
    segment = announced.rpartition("=")[2] if is_announced else announced
    found = list(_NUMBER.finditer(_without_latex(segment)))
    value = _value(found[0 if is_announced else -1]) if found else math.nan
    return value if math.isfinite(value) else None


def is_number(text: str) -> bool:
    """Tell whether a text's answer is one number and nothing else but a currency or a percent sign."""
    answer = _without_latex(final_answer(text)).rstrip(".% ")
    return _NUMBER.fullmatch(answer) is not None


def _value(match: re.Match[str]) -> float:
    value = float(match["digits"].replace(",", ""))
    if match["denominator"] is not None:
        denominator = float(match["denominator"])
        value = value / denominator if denominator else math.nan
    return -value if match[0][0] in "-\N{MINUS SIGN}" else value


def _without_latex(text: str) -> str:
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\$", "$").replace("\\%", "%")
    return re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).rstrip(". ")


def _braced(text: str) -> str:
    """Return what stands before the brace that closes an open one; all of it if none does."""
    depth = 1
    for index, character in enumerate(text):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[:index]
    return text
