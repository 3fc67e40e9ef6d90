"""Teach a chat model to follow one or two instructions that a program verifies: at most eight words, no capitals...

python examples/follow_instructions.py  # SmolLM2-135M-Instruct, of `make chat-model` or the hub
accelerate launch examples/follow_instructions.py --model_name_or_path Qwen/Qwen3-0.6B --dtype bfloat16 \
    --chat_template_kwargs '{"enable_thinking": false}' --per_device_train_batch_size 64 --output_dir runs/qwen

An answer that follows all gets 1, plus half the mean degree to which it follows each (`--reward_weights 1 0`: no
partial credit). It has at least four words, two new, a content word of the question, and an end; all else gets 0. Held
out are questions, wordings and pairs. `--dataset_name`, a hub name or JSON lines with `prompt`, adds questions.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false

import os
import random
import re

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from rlhf_ppo import PPOConfig, PPOTrainer

words = re.compile(r"[a-z0-9']+", re.IGNORECASE).findall
TOPICS = """bread winter trains coffee gardens bicycles music mountains letters markets dreams lighthouses rivers honey
deserts clocks bridges snow farmers shoes libraries storms horses candles islands"""
FORMS = ["Tell me about {}.", "What do you think of {}?", "Describe {}.", "Why do people like {}?"]
COMMON = """a about an and are be can describe do does for from have how i in is it like make me my of on people please
so some tell that the think this to what when where which who why will with you your""".split()  # no content words
WORDS = "silver friend morning window never small older green summer begin golden".split()  # the last is held out
WORDINGS = {  # the last is held out
    "short": ["Use at most eight words.", "Do not write more than eight words.", "Answer in eight words or fewer."],
    "lower": ["Write only in lower case letters.", "Do not use any capital letters.", "Use no upper case."],
    "no_comma": ["Do not use any commas.", "Write without commas.", "Commas are forbidden."],
    "word": ["Use the word '{}'.", "Your answer must contain the word '{}'.", "Mention the word '{}'."],
    "opening": ["Begin with 'I think'.", "Your first words must be 'I think'.", "Start with the words 'I think'."],
    "question": ["Answer with a question.", "Reply only with a question.", "Your whole answer must be one question."],
}
DEGREES = {  # to which a text holds each constraint, from 0 to 1
    "short": lambda text, word: min(1, 8 / len(text.split())),
    "lower": lambda text, word: sum(part == part.lower() for part in text.split()) / len(text.split()),
    "no_comma": lambda text, word: 1 / (1 + text.count(",")),
    "word": lambda text, word: float(word in words(text.lower())),
    "opening": lambda text, word: sum(a == b for a, b in zip(words(text), ("I", "think"), strict=False)) / 2,
    "question": lambda text, word: text.endswith("?") and 1 / len(re.findall(r"[.!?](?=\s|$)", text)),
}
PAIRS = [["short", "no_comma"], ["opening", "no_comma"], ["lower", "short"], ["no_comma", "question"]]
HELD_OUT_PAIRS = [["opening", "short"], ["lower", "no_comma"], ["no_comma", "word"], ["opening", "word"]]


def questions(source):
    texts = [form.format(topic) for topic in TOPICS.split() for form in FORMS]
    if source:
        rows = load_dataset("json", data_files=source) if source.endswith("jsonl") else load_dataset(source)
        prompts = [row["text"] if isinstance(row, dict) else row for row in rows["train"]["prompt"]]
        texts += [prompt.strip() for prompt in prompts if len(prompt) <= 110]
    return random.Random(0).sample(texts, len(texts))


def row(question, names, wording, word):
    asked = " ".join([question, *(WORDINGS[name][wording].format(word) for name in names)])
    messages = [{"role": "system", "content": "Answer in one short sentence."}, {"role": "user", "content": asked}]
    return {"prompt": messages, "question": question, "constraints": "+".join(names), "word": word}


def degrees(prompts, completions, question, constraints, word, **_):
    """Yield the degrees to which each completion holds its constraints, or 0 if it is no answer."""
    for prompt, completion, asked, names, w in zip(prompts, completions, question, constraints, word, strict=True):
        text, told = completion[-1]["content"].strip(), words(prompt[-1]["content"].lower())
        said, content = words(text.lower()), {part[:4] for part in words(asked.lower()) if part not in COMMON}
        is_about = not content or content & {part[:4] for part in said}
        is_answer = len(said) >= 4 and len({*said} - {*told, *COMMON}) >= 2 and is_about and text[-1] in ".!?\"')"
        yield [DEGREES[name](text, w) for name in names.split("+") if name] or [1.0] if is_answer else [0.0]


def strict(log_extra, **columns):
    log_extra("constraints", columns["constraints"])
    return [float(min(held) == 1) for held in degrees(**columns)]


def partial(**columns):
    return [sum(held) / len(held) for held in degrees(**columns)]


class _AccuracyBefore(TrainerCallback):  # a part of train(), which first refuses an output_dir in use
    def on_train_begin(self, args, state, control, **_):
        if state.global_step == 0:
            report(trainer, "before")


def report(trainer, when):
    table = trainer.generate_completions()  # greedy answers to all held-out prompts
    if trainer.is_world_process_zero():
        print(table[::17][["query", "model response", "strict"]].to_json(orient="records", lines=True), flush=True)
        print(f"Strict accuracy {when}:", table.groupby("constraints")["strict"].mean().round(3).to_dict(), flush=True)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PPOConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="chat-model" if os.path.isdir("chat-model") else "HuggingFaceTB/SmolLM2-135M-Instruct",
        use_peft=True, lora_target_modules=["all-linear"], share_base_model=True, gradient_checkpointing=False,
        output_dir="runs/follow", max_steps=60, per_device_train_batch_size=16, per_device_eval_batch_size=32,
        response_length=32, stop_token="eos", missing_eos_penalty=0.5, kl_coef=0.02, learning_rate=3e-4,
        critic_learning_rate=1e-3, num_ppo_epochs=2, num_mini_batches=4,
        num_sample_generations=0, logging_steps=1, save_steps=5, save_total_limit=1, reward_weights=[1.0, 0.5],
    )  # fmt: skip
    script, args, model_args = parser.parse_args_and_config()
    asked, kinds, draw = questions(script.dataset_name), [[name] for name in WORDINGS], random.Random(args.seed).choice
    drawn = [(draw(asked[16:]), draw(kinds + PAIRS), draw([0, 1]), draw(WORDS[:-1])) for _ in range(4096)]
    tested = [(question, names, 2, WORDS[-1]) for question in asked[:16] for names in [[], *kinds, *HELD_OUT_PAIRS]]
    path = model_args.model_name_or_path
    trainer = PPOTrainer(
        args, AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=model_args.dtype),
        train_dataset=[row(*each) for each in drawn], eval_dataset=[row(*each) for each in tested],
        peft_config=get_peft_config(model_args), reward_funcs=[strict, partial], callbacks=[_AccuracyBefore()],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, "after")
