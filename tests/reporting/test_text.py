"""Untrusted text in the terminal, in logs and in Markdown."""

from __future__ import annotations

import io
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_ppo.terminal import CONTROL, markdown, print_text, visible, visible_logger


@given(st.text(st.characters(codec=None)))
def test_no_control_character_and_no_surrogate_is_left(text: str) -> None:
    shown = visible(text)
    assert CONTROL.search(shown) is None
    shown.encode()


def test_markdown_shows_no_markup() -> None:
    assert markdown("a|b\n<script>&") == "a&#124;b<br>&lt;script&gt;&amp;"


def test_printed_and_logged_text_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    stream = io.StringIO()
    print_text("[bold]\x1b[31m" + "word " * 50 + "end", stream, style="red")
    assert stream.getvalue() == "[bold]\\x1b[31m" + "word " * 50 + "end\n"
    logger = visible_logger("rlhf_ppo.test")
    with caplog.at_level(logging.WARNING):
        logger.warning("of a %s\x1b", "model")
    assert caplog.records[-1].getMessage() == "of a model\\x1b"
