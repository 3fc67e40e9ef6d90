"""Prepare `human_text.yaml`: preferences of people about short texts, from a file of pairs.

python examples/human_text.py train_pairs.jsonl human_text
rlhf-ppo pipeline examples/human_text.yaml

Each line of the file has one pair, such as `{"prompt": "I wore my mask when I visited the", "chosen": " pet store.",
"rejected": " nursing home."}`: people find the first continuation more pleasant. ETHICS' utilitarianism pairs
(Hendrycks et al., 2008.02275) give such pairs. Reward model, judge and comparison share no prompt;
`texts.jsonl` has all prompts except the held-out ones. The script writes:

- `base/`: a tokenizer trained on the texts, and a Llama of four layers with random weights;
- `texts.jsonl`: prompts with either continuation, for the language model;
- `pairs.jsonl` and `judge_pairs.jsonl`: the pairs in two halves, one for the reward model, one for the judge;
- `prompts.jsonl`: the prompts of `pairs.jsonl`, for PPO;
- `held_out.jsonl`: prompts that no model has seen, for the judge's comparison.
"""

import argparse
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 2048
Row = dict[str, str]


def prepare(pairs: Path, folder: Path, num_held_out: int) -> None:
    """Write the parts.

    Args:
        pairs: Rows with `prompt`, `chosen` and `rejected`.
        folder: Directory of the parts.
        num_held_out: Prompts that no model sees.
    """
    rows = read_pairs(pairs)
    prompts = sorted({row["prompt"] for row in rows if row["prompt"].strip()})
    if len(prompts) < num_held_out + 2:
        raise ValueError(f"num_held_out={num_held_out}, but {pairs} has {len(prompts)} prompts: lower it")
    random.Random(0).shuffle(prompts)
    held_out, first = set(prompts[:num_held_out]), set(prompts[num_held_out::2])
    seen = [row for row in rows if row["prompt"] not in held_out]
    own = [row for row in seen if row["prompt"] in first]
    texts = [row["prompt"] + row[side] for row in seen for side in ("chosen", "rejected") if row[side].strip()]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "texts.jsonl", ({"text": text} for text in dict.fromkeys(texts)))
    write(folder / "pairs.jsonl", own)
    write(folder / "judge_pairs.jsonl", (row for row in seen if row["prompt"] not in first))
    write(folder / "prompts.jsonl", ({"prompt": prompt} for prompt in dict.fromkeys(row["prompt"] for row in own)))
    write(folder / "held_out.jsonl", ({"prompt": prompt} for prompt in prompts[:num_held_out]))
    make_base(texts, folder / "base")


def read_pairs(path: Path) -> list[Row]:
    """Return the pairs whose sides differ, from JSON lines."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    for number, row in enumerate(rows, 1):
        if missing := {"prompt", "chosen", "rejected"} - row.keys():
            raise ValueError(f"line {number} of {path} has no {sorted(missing)[0]!r}: see the top of this script")
    return [
        {name: row[name] for name in ("prompt", "chosen", "rejected")}
        for row in rows
        if row["chosen"] != row["rejected"]
    ]


def make_base(texts: Sequence[str], folder: Path) -> None:
    """Train a byte-pair tokenizer, and save it with an untrained language model.

    Args:
        texts: Texts for the tokenizer.
        folder: Directory of both.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    pairs: Any = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<pad>", "<eos>"], show_progress=False)
    pairs.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pairs, pad_token="<pad>", eos_token="<eos>")
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write(path: Path, rows: Iterable[Row]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare examples/human_text.yaml.")
    parser.add_argument("pairs", type=Path, help="JSON lines with prompt, chosen and rejected")
    parser.add_argument("folder", type=Path, help="where the parts are written")
    parser.add_argument("--num_held_out", type=int, default=512, help="prompts that no model sees")
    options = parser.parse_args()
    try:
        prepare(options.pairs, options.folder, options.num_held_out)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"The parts are in {options.folder}; next: rlhf-ppo pipeline examples/human_text.yaml")
