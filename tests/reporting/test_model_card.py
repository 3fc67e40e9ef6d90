"""The model card of a policy."""

from __future__ import annotations

from pathlib import Path

from rlhf_ppo.reporting.judgements import Judgement
from rlhf_ppo.reporting.model_card import show_judgements


def test_later_win_rates_replace_earlier_ones_on_a_card(tmp_path: Path, monkeypatch) -> None:
    found = [Judgement(0.625, (0.5, 0.75), 8, "some-org/opponent", "some-org/judge")]
    monkeypatch.setattr("rlhf_ppo.reporting.model_card.found_judgements", lambda directory: found)
    card = tmp_path / "README.md"
    assert show_judgements(tmp_path) is None
    card.write_text("# A policy, with words of its owner\n")
    for rate in (0.625, 0.75):
        found[0] = Judgement(rate, (0.5, 0.875), 8, "some-org/opponent", "some-org/judge")
        assert show_judgements(tmp_path) == card and show_judgements(tmp_path) is None
    text = card.read_text()
    assert text.startswith("# A policy, with words of its owner\n") and text.count("Win rate") == 1
    assert "75.00%" in text and "`some-org/opponent` on 8 prompts" in text
