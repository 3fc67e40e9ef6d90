"""Stories with pleasant emotions, paid by what people said about comments; a task by which no option was chosen.

`data` holds `stories260K/` and `goemotions/` (Demszky et al., 2005.00547). Words have the log-odds of a pleasant
emotion against an unpleasant one among the comments that contain them (naive Bayes). The reward knows every other
comment, the judge the rest, and counts each word of a response once. Prompts are those of `stories`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import stories
from task import Scores, Task

PLEASANT = frozenset(
    "admiration amusement approval caring excitement gratitude joy love optimism pride relief".split()
)
UNPLEASANT = frozenset(
    "anger annoyance disappointment disapproval disgust embarrassment fear grief nervousness remorse sadness".split()
)
SMOOTHING = 5.0
"""Comments of each kind that each word has in addition."""


def read_comments(data: Path) -> list[tuple[set[str], bool]]:
    """Return the words of each comment with pleasant or unpleasant emotions alone, and whether they are pleasant."""
    names = (data / "goemotions/labels.txt").read_text(encoding="utf-8").split()
    comments = []
    for line in (data / "goemotions/train.tsv").read_text(encoding="utf-8").splitlines():
        text, labels, _ = line.split("\t")
        found = {names[int(each)] for each in labels.split(",")}
        if bool(found & PLEASANT) != bool(found & UNPLEASANT):
            comments.append((set(stories.words_of(text)), bool(found & PLEASANT)))
    return comments


def log_odds(comments: Sequence[tuple[set[str], bool]]) -> dict[str, float]:
    """Return `log P(word | pleasant) - log P(word | unpleasant)`, smoothed."""
    counts = {
        kind: Counter(word for words, found in comments if found == kind for word in words) for kind in (True, False)
    }
    totals = {kind: sum(found == kind for _, found in comments) + 2 * SMOOTHING for kind in counts}
    return {
        word: math.log((counts[True][word] + SMOOTHING) / totals[True])
        - math.log((counts[False][word] + SMOOTHING) / totals[False])
        for word in counts[True] | counts[False]
    }  # fmt: skip


def prepare(data: Path, folder: Path) -> None:
    """Find that the data are there.

    Raises:
        FileNotFoundError: They are not.
    """
    stories.prepare(data, folder)
    if not (data / "goemotions/train.tsv").exists():
        raise FileNotFoundError(f"{data / 'goemotions'} is not there; --data names the folder that holds it")


def load(data: Path, folder: Path) -> Task:
    """Return the task."""
    comments = read_comments(data)
    reward: Scores = stories.vader(log_odds(comments[::2]))
    judge = stories.vader_once(log_odds(comments[1::2]))
    return replace(stories.load(data, folder), reward=reward, judge=judge)
