"""Prepare `gsm8k.yaml`: school maths problems as prompts, with the answers that the reward reads.

python examples/gsm8k.py openai/gsm8k gsm8k
rlhf-ppo pipeline examples/gsm8k.yaml

The data set is a name on the hub, or a file with the columns `question` and `answer`. The script writes
`prompts.jsonl`, and `held_out.jsonl` for the judge: the split `test`, or the last rows if there is none.
"""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset

from rlhf_ppo.cli.errors import CommandParser, user_errors
from rlhf_ppo.data.sources import choose_split, hold_out, load_splits

TASK = "{question}\nThink step by step, and end with the answer alone on the last line, after ####."


def prepare(name: str, folder: Path, plain: bool = False) -> None:
    """Write the prompts.

    Args:
        name: The data set.
        folder: Directory of the files.
        plain: Write texts, for a model without a chat template, instead of conversations.

    Raises:
        ValueError: There is no such data set, or it lacks a column.
    """
    splits = load_splits(name, config="main" if not Path(name).exists() else None)
    train = choose_split(splits, "train", "the data set's split")
    if missing := sorted({"question", "answer"} - {*train.column_names}):
        raise ValueError(f"{name} has no column {', '.join(missing)}, but {train.column_names}")
    train, test = (train, splits["test"]) if "test" in splits else hold_out(train, num_rows=1319)
    folder.mkdir(parents=True, exist_ok=True)
    for rows, file in ((train, "prompts.jsonl"), (test, "held_out.jsonl")):
        write(rows, folder / file, plain)


def write(rows: Dataset, path: Path, plain: bool) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            record: Any = row
            task = TASK.format(question=record["question"])
            prompt = f"{task}\n" if plain else [{"role": "user", "content": task}]
            file.write(f"{json.dumps({'prompt': prompt, 'answer': record['answer']})}\n")


if __name__ == "__main__":
    parser = CommandParser(description="Prepare examples/gsm8k.yaml.")
    parser.add_argument("dataset", help="name on the hub, such as openai/gsm8k, or a file")
    parser.add_argument("folder", type=Path, help="where the prompts are written")
    parser.add_argument("--plain", action="store_true", help="texts instead of conversations")
    options = parser.parse_args()
    with user_errors(parser.prog):
        prepare(options.dataset, options.folder, options.plain)
    print(f"The prompts are in {options.folder}; next: rlhf-ppo pipeline examples/gsm8k.yaml")
