"""Text for the demo: stories from a seeded grammar, and the judge that reads stories by that grammar."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from string import Formatter

from datasets import Dataset

from rlhf_ppo.evaluation.win_rate import WinRate


def _scale(*words: str) -> dict[str, int]:
    """Return each word's pleasantness, from delightful (2) to dreadful (-2)."""
    return {word: valence for valence, group in zip((2, 1, 0, -1, -2), words, strict=True) for word in group.split()}


HEROES = {
    "She": ("Mina", "Clara", "Rosie", "Nora", "Tilda", "Hazel", "Ida", "Wren"),
    "He": ("Tom", "Oscar", "Hugo", "Felix", "Jonas", "Arlo", "Bert", "Milo"),
}
ANIMALS = "fox bear rabbit mouse badger hedgehog squirrel beaver deer goose frog cat".split()
PLACES = "river forest market garden meadow harbour village mill hill lake farm bridge".split()
DAYTIMES = "morning afternoon evening day night".split()
WEATHER = _scale("", "sunny bright warm", "quiet misty windy", "rainy icy stormy", "")

WORDS = {
    "quality": _scale("golden beautiful", "shiny clean", "little plain round", "dusty cracked", "broken filthy"),
    "temper": _scale("kind gentle friendly", "funny clever", "tall young busy", "grumpy lazy", "rude cruel nasty"),
    "taste": _scale("delicious", "sweet fresh", "warm thin", "cold bitter", "rotten"),
    "deed": _scale("danced laughed", "sang played", "sat waited walked", "grumbled argued", "fought cried"),
    "fate": _scale("won saved", "mended cleaned", "carried painted moved", "dropped lost", "ruined burned"),
    "sound": _scale("merry cheerful", "soft", "long new strange", "gloomy", "harsh dreadful"),
    "feeling": _scale("happy joyful", "proud calm", "sleepy curious hungry", "tired worried", "miserable terrified"),
    "thing": dict.fromkeys("bell box key lamp boat kite drum chair coin map hat book".split(), 0),
    "food": dict.fromkeys("soup bread porridge cake cheese pie honey stew".split(), 0),
    "spot": dict.fromkeys("tree roof moon bush wall clouds".split(), 0),
    "animal": dict.fromkeys(ANIMALS, 0),
}

OPENING = "One {weather} {daytime}, {name} the {animal} went to the {place}."
EVENTS = (
    "{hero} found a {quality} {thing}.",
    "{hero} met a {temper} {animal}.",
    "{hero} ate some {taste} {food}.",
    "{hero} {fate} the {thing}.",
    "{hero} heard a {sound} song.",
    "They {deed} under the {spot}.",
)
ENDING = "In the end {hero} was {feeling}."

DECISIVENESS = 1.0
"""Certainty with which a reader prefers the more pleasant story; see `preference_pairs`."""


@dataclass(frozen=True)
class Opening:
    """A story's first sentence, which is the prompt.

    Attributes:
        text: The sentence.
        hero: "She" or "He", the pronoun of the story's hero.
        mood: The weather's pleasantness (-1, 0 or 1), which the choice of words follows.
    """

    text: str
    hero: str
    mood: int


@dataclass(frozen=True)
class Continuation:
    """The rest of a story, which is the response.

    Attributes:
        text: The sentences, with the space that follows the opening.
        pleasantness: Sum of the pleasantness of its words, from -8 to 8; minus infinity if it repeats itself.
    """

    text: str
    pleasantness: float


def draw_opening(rng: random.Random) -> Opening:
    """Draw the first sentence of a story."""
    hero = rng.choice(list(HEROES))
    weather = rng.choice(list(WEATHER))
    text = OPENING.format(
        weather=weather,
        daytime=rng.choice(DAYTIMES),
        name=rng.choice(HEROES[hero]),
        animal=rng.choice(ANIMALS),
        place=rng.choice(PLACES),
    )
    return Opening(text, hero, WEATHER[weather])


def draw_continuation(opening: Opening, rng: random.Random) -> Continuation:
    """Draw one to three different events and, two times in three, an ending.

    A word of pleasantness `v` is drawn with weight `exp(mood * v / 2)`, where the mood is the weather's with normal
    noise added: most stories about a sunny day are pleasant, and any day may turn out well.
    """
    sentences = _draw_sentences(opening, _draw_templates(rng), rng)
    return Continuation("".join(text for text, _ in sentences), sum(valence for _, valence in sentences))


def draw_repetitive_continuation(opening: Opening, rng: random.Random) -> Continuation:
    """Draw a story that says one of its sentences again in other words, which no reader likes."""
    templates = _draw_templates(rng)
    templates.insert(rng.randint(0, len(templates)), rng.choice(templates))
    sentences = _draw_sentences(opening, templates, rng)
    return Continuation("".join(text for text, _ in sentences), -math.inf)


def _draw_templates(rng: random.Random) -> list[str]:
    return rng.sample(EVENTS, rng.randint(1, 3)) + [ENDING] * (rng.random() < 2 / 3)


def _draw_sentences(opening: Opening, templates: list[str], rng: random.Random) -> list[tuple[str, int]]:
    mood = opening.mood + rng.gauss(0, 1)
    return [_fill(template, opening.hero, mood, rng) for template in templates]


def _fill(template: str, hero: str, mood: float, rng: random.Random) -> tuple[str, int]:
    words = {slot: _draw_word(WORDS[slot], mood, rng) for slot in slots_of(template) if slot != "hero"}
    text = template.format(hero=hero.lower() if template == ENDING else hero, **words)
    return f" {text}", sum(WORDS[slot][word] for slot, word in words.items())


def _draw_word(choices: dict[str, int], mood: float, rng: random.Random) -> str:
    return rng.choices(list(choices), [math.exp(mood * valence / 2) for valence in choices.values()])[0]


def slots_of(template: str) -> list[str]:
    """List the names in a template's braces, in order."""
    return [slot for _, slot, _, _ in Formatter().parse(template) if slot]


def stories(num_stories: int, seed: int) -> Dataset:
    """Draw stories to learn the language from.

    Args:
        num_stories: Number of rows.
        seed: The same seed gives the same stories.

    Returns:
        A data set with the columns `prompt` and `completion`.
    """
    rng = random.Random(f"stories {seed}")
    openings = [draw_opening(rng) for _ in range(num_stories)]
    return Dataset.from_list([{"prompt": o.text, "completion": draw_continuation(o, rng).text} for o in openings])


def preference_pairs(num_pairs: int, seed: int) -> Dataset:
    """Draw pairs of continuations of the same opening, the one that a reader liked better first.

    The reader is human: between pleasantness `p` and `q` the first is chosen with probability
    `sigmoid(DECISIVENESS * (p - q))` (Bradley-Terry), so that close calls are often "wrong". In one pair of three
    one story repeats itself.

    Args:
        num_pairs: Number of rows.
        seed: The same seed gives the same pairs.

    Returns:
        A data set with the columns `prompt`, `chosen` and `rejected`.
    """
    rng = random.Random(f"pairs {seed}")
    rows = []
    for _ in range(num_pairs):
        opening = draw_opening(rng)
        first = draw_continuation(opening, rng)
        second = (draw_repetitive_continuation if rng.random() < 1 / 3 else draw_continuation)(opening, rng)
        likes_first = 1 / (1 + math.exp(-DECISIVENESS * (first.pleasantness - second.pleasantness)))
        chosen, rejected = (first, second) if rng.random() < likes_first else (second, first)
        rows.append({"prompt": opening.text, "chosen": chosen.text, "rejected": rejected.text})
    return Dataset.from_list(rows)


def openings(num_openings: int, seed: int) -> Dataset:
    """Draw prompts for PPO.

    Args:
        num_openings: Number of rows.
        seed: The same seed gives the same openings.

    Returns:
        A data set with the columns `prompt` and `hero`.
    """
    rng = random.Random(f"openings {seed}")
    drawn = [draw_opening(rng) for _ in range(num_openings)]
    return Dataset.from_list([{"prompt": opening.text, "hero": opening.hero} for opening in drawn])


# ---- Judge ----


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


def compare(responses: Sequence[str], others: Sequence[str], heroes: Sequence[str]) -> WinRate:
    """Judge two policies' responses to the same openings.

    Args:
        responses: One response per opening.
        others: The other policy's responses, in the same order.
        heroes: "She" or "He" for each opening.

    Returns:
        The numbers of wins, losses and ties of `responses`.
    """
    return WinRate.of([_better(a, b, hero) for a, b, hero in zip(responses, others, heroes, strict=True)])


def _better(response: str, other: str, hero: str) -> int:
    first, second = pleasantness(response, hero), pleasantness(other, hero)
    return (first > second) - (first < second)
