"""Preference pairs in each of TRL's formats."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_ppo.data.sources import with_explicit_prompt


def say(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED, GOOD, BAD = say("user", "Sky?"), say("assistant", "Blue."), say("assistant", "Black.")
CONVERSATION = {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}
HH = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Sky?\n\nAssistant:"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Sky?", "chosen": " Blue.", "rejected": " Black."}, None),
        (CONVERSATION, None),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, CONVERSATION),
        ({"prompt": "Sky?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}, CONVERSATION),
        ({"prompt": "Sky?", "chosen": [GOOD], "rejected": [BAD]}, CONVERSATION),
        ({"prompt": [ASKED], "chosen": "Blue.", "rejected": "Black."}, CONVERSATION),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is a lake."},
            {"prompt": "The sky is", "chosen": " blue.", "rejected": " a lake."},
        ),
        (
            {"chosen": f"{HH} Blue.", "rejected": f"{HH} Black."},
            {"prompt": HH, "chosen": " Blue.", "rejected": " Black."},
        ),
    ],
    ids=["text", "conversation", "implicit", "both", "text, messages", "messages, texts", "implicit text", "hh-rlhf"],
)
def test_every_format_gives_prompt_chosen_and_rejected(row: dict[str, Any], expected: dict[str, Any] | None) -> None:
    assert with_explicit_prompt({**row, "id": 3}) == {**(expected or row), "id": 3}
