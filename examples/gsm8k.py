"""Prepare `gsm8k.yaml`: school maths problems as prompts, with the answers that the reward reads.

python examples/gsm8k.py openai/gsm8k gsm8k
rlhf-ppo pipeline examples/gsm8k.yaml

The data set is a name on the hub, or a JSON-lines file with the columns `question` and `answer`. The script writes
`prompts.jsonl`, and `held_out.jsonl` for the judge: the split `test`, or the last rows if there is none.
"""

import argparse
import json
from pathlib import Path

from datasets import Dataset, load_dataset

TASK = "{question}\nThink step by step, and end with the answer alone on the last line, after ####."


def prepare(name: str, folder: Path, plain: bool = False) -> None:
    """Write the prompts.

    Args:
        name: The data set.
        folder: Directory of the files.
        plain: Write texts, for a model without a chat template, instead of conversations.
    """
    splits = load_dataset("json", data_files=name) if Path(name).is_file() else load_dataset(name, "main")
    if "test" not in splits:
        splits = splits["train"].train_test_split(test_size=min(1319, len(splits["train"]) // 10), shuffle=False)
    folder.mkdir(parents=True, exist_ok=True)
    for split, file in (("train", "prompts.jsonl"), ("test", "held_out.jsonl")):
        write(splits[split], folder / file, plain)


def write(rows: Dataset, path: Path, plain: bool) -> None:
    with path.open("w", encoding="utf-8") as file:
        for question, answer in zip(rows["question"], rows["answer"], strict=True):
            task = TASK.format(question=question)
            prompt = f"{task}\n" if plain else [{"role": "user", "content": task}]
            file.write(f"{json.dumps({'prompt': prompt, 'answer': answer})}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare examples/gsm8k.yaml.")
    parser.add_argument("dataset", help="name on the hub, such as openai/gsm8k, or a file")
    parser.add_argument("folder", type=Path, help="where the prompts are written")
    parser.add_argument("--plain", action="store_true", help="texts instead of conversations")
    options = parser.parse_args()
    prepare(options.dataset, options.folder, options.plain)
    print(f"The prompts are in {options.folder}; next: rlhf-ppo pipeline examples/gsm8k.yaml")
