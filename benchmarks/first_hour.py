"""The first hour of a user: two data sets made into texts, pairs and prompts, then `rlhf-ppo init` and `pipeline`.

python benchmarks/first_hour.py ../shared/data runs/first_hour            # both
python benchmarks/first_hour.py ../shared/data runs/first_hour goemotions # one
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POSITIVE = {"admiration", "amusement", "approval", "caring", "excitement", "gratitude", "joy", "love", "optimism",
            "pride", "relief"}  # fmt: skip
NEGATIVE = {"anger", "annoyance", "disappointment", "disapproval", "disgust", "embarrassment", "fear", "grief",
            "nervousness", "remorse", "sadness"}  # fmt: skip
MAX_PAIRS = 6000


def goemotions(source: Path) -> dict[str, list[dict[str, Any]]]:
    """Make comments with one emotion into pairs that begin with the same word; a positive emotion is better."""
    labels = (source / "labels.txt").read_text().split()
    with open(source / "train.tsv", newline="", encoding="utf-8") as file:
        comments = [(text, labels[int(label)]) for text, label, _ in csv.reader(file, delimiter="\t", quoting=3)
                    if label.isdecimal() and "[" not in text]  # fmt: skip
    chance = random.Random(0)
    by_word: dict[str, tuple[list[str], list[str]]] = {}
    for text, emotion in comments:
        word, _, rest = text.partition(" ")
        if rest and emotion in POSITIVE | NEGATIVE:
            by_word.setdefault(word, ([], []))[emotion in NEGATIVE].append(f" {rest}")
    pairs = [
        {"prompt": word, "chosen": better, "rejected": worse}
        for word, (good, bad) in by_word.items()
        for better, worse in zip(good, bad, strict=False)
    ]
    chance.shuffle(pairs)
    texts = [text for text, _ in comments]
    prompts = sorted({" ".join(text.split()[:3]) for text, emotion in comments if emotion == "neutral"})
    return {
        "texts": [{"text": text} for text in texts],
        "pairs": pairs[:MAX_PAIRS],
        "prompts": [{"prompt": prompt} for prompt in chance.sample(prompts, 3000)],
    }


def oasst(source: Path) -> dict[str, list[dict[str, Any]]]:
    """Make conversations into pairs of sibling replies, the one of the better rank chosen."""
    trees = [json.loads(line) for line in (source / "en_100_tree.jsonl").read_text(encoding="utf-8").splitlines()]
    texts, pairs, prompts = [], [], []
    for tree in trees:
        for prompt, replies in _questions(tree["prompt"], ()):
            prompts.append({"prompt": prompt})
            texts += [{"prompt": prompt, "completion": reply["text"]} for reply in replies]
            ranked = sorted((each for each in replies if each.get("rank") is not None), key=lambda each: each["rank"])
            pairs += [
                {"prompt": prompt, "chosen": better["text"], "rejected": worse["text"]}
                for better, worse in itertools.combinations(ranked, 2)
            ]
    return {"texts": texts, "pairs": pairs, "prompts": prompts}


def _questions(message: dict[str, Any], before: tuple[str, ...]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield each of a person's messages with its replies; the text of a prompt is the last two turns."""
    replies = message["replies"]
    said = (*before, message["text"])
    if message["role"] == "prompter" and replies:
        yield "".join(f"{text}\n\n" for text in said[-1:]), replies
    for reply in replies:
        yield from _questions(reply, said)


SOURCES = {"goemotions": ("goemotions", goemotions), "oasst": ("oasst_100_trees", oasst)}


def main() -> None:
    """Make the files of each data set, and run `init` and `pipeline` on them with the stories model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="the folder that holds the data sets and stories260K")
    parser.add_argument("place", help="the folder that the runs are written into")
    parser.add_argument("names", nargs="*", metavar="data_set", help=f"one of {', '.join(SOURCES)}; by default all")
    arguments = parser.parse_args()
    data, place, names = arguments.data, arguments.place, arguments.names or list(SOURCES)
    if unknown := sorted(set(names) - set(SOURCES)):
        parser.error(f"unknown data set {unknown[0]!r}: choose from {', '.join(SOURCES)}")
    for name in names:
        folder, make = SOURCES[name]
        here = Path(place, name)
        here.mkdir(parents=True)
        for kind, rows in make(Path(data, folder)).items():
            lines = (json.dumps(row, ensure_ascii=False) for row in rows)
            (here / f"{kind}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        model = Path(data, "stories260K").resolve()
        run(here, "init", "--model", str(model), "--texts", "texts.jsonl", "--preferences", "pairs.jsonl",
            "--prompts", "prompts.jsonl", "--output_dir", "run")  # fmt: skip
        run(here, "pipeline", "run.yaml")


def run(place: Path, *words: str) -> None:
    """Run a command of `rlhf-ppo`, and print its seconds."""
    print("$ rlhf-ppo", *words, flush=True)
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    code = subprocess.call([sys.executable, "-m", "rlhf_ppo", *words], cwd=place)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"[{words[0]}: exit code {code}, {time.monotonic() - start:.0f} s, {cpu:.0f} CPU seconds]", flush=True)
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main()
