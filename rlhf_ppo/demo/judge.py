"""The held-out judge: reads stories by the grammar that wrote the corpus, which no model ever sees.

It is stricter than the reward model, which has only seen noisy choices between stories: a response that is no story of
the grammar (a word out of place, a sentence said twice, a wrong pronoun, no end) loses to any that is one, however
pleasant its words. So a policy that only fools the reward model does not win.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_ppo.demo.corpus import ENDING, EVENTS, WORDS


@dataclass(frozen=True)
class Verdicts:
    """How a policy's stories compare with another's on the same openings.

    Attributes:
        wins: Number of openings where the first policy's story is the better one.
        losses: Number of openings where the second's is.
        ties: Number of openings where neither is.
    """

    wins: int
    losses: int
    ties: int

    @property
    def win_rate(self) -> float:
        """Share of openings won, a tie counting half: `(wins + ties / 2) / n`."""
        return (self.wins + self.ties / 2) / (self.wins + self.losses + self.ties)

    @property
    def tie_rate(self) -> float:
        """Share of openings where neither story is better."""
        return self.ties / (self.wins + self.losses + self.ties)

    @property
    def clear(self) -> bool:
        """Whether the win rate is above one half by more than three standard errors.

        Under the hypothesis that both are equally good, `wins - losses` has variance `wins + losses`.
        """
        return self.wins - self.losses > 3 * (self.wins + self.losses) ** 0.5


def pleasantness(response: str, hero: str) -> float:
    """Read a response and measure how pleasant the story is.

    Args:
        response: The text after the opening, without special tokens.
        hero: "She" or "He", the opening's hero.

    Returns:
        Sum of the pleasantness of the words, from -8 to 8; minus infinity where the response is no story.
    """
    sentences = re.findall(r" [^.]*\.", response)
    if not sentences or "".join(sentences) != response:
        return -math.inf
    read = [_read_sentence(sentence[1:], hero) for sentence in sentences]
    templates = [template for template, _ in read]
    events = templates[:-1] if templates[-1] == ENDING else templates
    well_formed = 1 <= len(events) <= 3 and set(events) <= set(EVENTS) and len(set(events)) == len(events)
    return sum(valence for _, valence in read) if well_formed else -math.inf


def _read_sentence(sentence: str, hero: str) -> tuple[str | None, int]:
    for template in (*EVENTS, ENDING):
        pronoun = hero.lower() if template == ENDING else hero
        choices = {slot: f"(?P<{slot}>{'|'.join(words)})" for slot, words in WORDS.items()}
        match = re.fullmatch(template.format(hero=pronoun, **choices), sentence)
        if match:
            return template, sum(WORDS[slot][word] for slot, word in match.groupdict().items())
    return None, 0


def compare(responses: Sequence[str], others: Sequence[str], heroes: Sequence[str]) -> Verdicts:
    """Judge two policies' responses to the same openings.

    Args:
        responses: One response per opening.
        others: The other policy's responses, in the same order.
        heroes: "She" or "He" for each opening.

    Returns:
        The numbers of wins, losses and ties of `responses`.
    """
    outcomes = [_better(a, b, hero) for a, b, hero in zip(responses, others, heroes, strict=True)]
    return Verdicts(wins=outcomes.count(1), losses=outcomes.count(-1), ties=outcomes.count(0))


def _better(response: str, other: str, hero: str) -> int:
    first, second = pleasantness(response, hero), pleasantness(other, hero)
    return (first > second) - (first < second)
