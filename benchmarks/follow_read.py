"""Read the greedy answers that follow.py wrote: how many talk about the constraint, repeat a word, or miss the topic.

    python benchmarks/follow_read.py ANSWERS.jsonl ...    # files beside --results: LABEL-SEED-MINUTES.jsonl

An answer *talks about the constraint* if it contains a word of `ABOUT_FORM` that its question lacks. It *repeats* if a
word comes twice in a row or a content word three times. It *misses the topic* without a content word of the question.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections import Counter
from pathlib import Path

import pandas as pd

EXAMPLE = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "follow_instructions.py"))
ABOUT_FORM = set(
    "comma commas capital capitals case uppercase lowercase word words letter letters sentence sentences".split()
)


def question_of(query: str) -> str:
    """Return the user's question without its instructions, in the held-out wording."""
    text = query.partition("\nuser\n")[2].rpartition("\nassistant\n")[0]
    for wordings in EXAMPLE["WORDINGS"].values():
        text = text.replace(wordings[2].format(EXAMPLE["WORDS"][-1]), "")
    return text.strip()


def faults(query: str, response: str) -> set[str]:
    """Return what is wrong with an answer: "talks", "repeats", "misses"."""
    question = question_of(query).lower()
    answer = re.sub(r"<\|.*?\|>", "", response).lower()
    asked, words = EXAMPLE["find_words"](question), EXAMPLE["find_words"](answer)
    content = [word for word in words if word not in EXAMPLE["COMMON"]]
    found = set()
    if ABOUT_FORM.intersection(words).difference(asked):
        found.add("talks")
    if any(map(str.__eq__, words, words[1:])) or max(Counter(content).values(), default=0) >= 3:
        found.add("repeats")
    topic = EXAMPLE["stems"]({*asked}.difference(EXAMPLE["COMMON"]))
    if topic and not topic & EXAMPLE["stems"](words):
        found.add("misses")
    return found


def main() -> None:
    """Print a line for each file."""
    print("| answers | of | talk about the constraint | repeat a word | miss the topic |\n|---|---|---|---|---|")
    for path in map(Path, sys.argv[1:]):
        table = pd.read_json(path, lines=True)
        each = [
            faults(query, response) for query, response in zip(table["query"], table["model response"], strict=True)
        ]
        counts = [sum(fault in found for found in each) for fault in ("talks", "repeats", "misses")]
        print(f"| {path.stem} | {len(table)} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()
