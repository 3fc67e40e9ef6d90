"""Teach a chat model to follow one or two instructions that a program verifies: at most eight words, no capitals...

pip install "rlhf-ppo[peft]"
python examples/follow_instructions.py  # SmolLM2-135M-Instruct, from `make chat-model` or the hub
accelerate launch examples/follow_instructions.py --model_name_or_path Qwen/Qwen3-0.6B --dtype bfloat16 \
    --chat_template_kwargs '{"enable_thinking": false}' --per_device_train_batch_size 64 --output_dir runs/qwen

Reward: 1 if the answer satisfies all constraints, plus half the mean degree (0 to 1) to which it satisfies them.
`--reward_weights 1 0` removes the second term. An answer needs four or more words, two of them new, a content word of
the question, and a final mark; other answers get 0. Some questions, wordings and pairs are held out. `--dataset_name`,
a hub name or JSON lines with `prompt`, adds questions.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false

import os
import random
import re

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from rlhf_ppo import PPOConfig, PPOTrainer, preset

TOPICS = """
bread winter trains coffee gardens bicycles music mountains letters markets dreams lighthouses rivers honey deserts
clocks bridges snow farmers shoes libraries storms horses candles islands
""".split()
FORMS = ["Tell me about {}.", "What do you think of {}?", "Describe {}.", "Why do people like {}?"]
NUM_HELD_OUT = 16
"""Number of questions that are held out."""

WORDINGS = {  # the last of each is held out
    "short": ["Use at most eight words.", "Do not write more than eight words.", "Answer in eight words or fewer."],
    "lower": ["Write only in lower case letters.", "Do not use any capital letters.", "Use no upper case."],
    "no_comma": ["Do not use any commas.", "Write without commas.", "Commas are forbidden."],
    "word": ["Use the word '{}'.", "Your answer must contain the word '{}'.", "Mention the word '{}'."],
    "opening": ["Begin with 'I think'.", "Your first words must be 'I think'.", "Start with the words 'I think'."],
    "question": ["Answer with a question.", "Reply only with a question.", "Your whole answer must be one question."],
}
WORDS = "silver friend morning window never small older green summer begin golden".split()
"""Words for the constraint `word`; the last is held out."""

PAIRS = [["short", "no_comma"], ["opening", "no_comma"], ["lower", "short"], ["no_comma", "question"]]
HELD_OUT_PAIRS = [["opening", "short"], ["lower", "no_comma"], ["no_comma", "word"], ["opening", "word"]]


# ---- Data ----


def questions(source):
    """Return all questions in random order: a topic in each form, and short prompts of a data set."""
    texts = [form.format(topic) for topic in TOPICS for form in FORMS]
    if source:
        rows = load_dataset("json", data_files=source) if source.endswith("jsonl") else load_dataset(source)
        prompts = [prompt["text"] if isinstance(prompt, dict) else prompt for prompt in rows["train"]["prompt"]]
        texts += [prompt.strip() for prompt in prompts if len(prompt) <= 110]
    return random.Random(0).sample(texts, len(texts))


def row(question, constraints, wording, word):
    """Return a row of the data set; `wording` is the index of each constraint's wording."""
    instructions = [WORDINGS[name][wording].format(word) for name in constraints]
    prompt = [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": " ".join([question, *instructions])},
    ]
    return {"prompt": prompt, "question": question, "constraints": "+".join(constraints), "word": word}


def rows_to_train_on(trained_questions, seed):
    draw = random.Random(seed).choice
    constraints = [[name] for name in WORDINGS] + PAIRS
    rows = []
    for _ in range(4096):
        rows.append(row(draw(trained_questions), draw(constraints), draw([0, 1]), draw(WORDS[:-1])))
    return rows


def rows_to_test_on(held_out_questions):
    """Return each question without constraint, with each one, and with each pair, in the held-out wording."""
    constraints = [[], *([name] for name in WORDINGS), *HELD_OUT_PAIRS]
    return [row(question, names, 2, WORDS[-1]) for question in held_out_questions for names in constraints]


# ---- Rewards ----

find_words = re.compile(r"[a-z0-9']+", re.IGNORECASE).findall
COMMON = """
a about an and are be can describe do does for from have how i in is it like make me my of on people please so some
tell that the think this to what when where which who why will with you your
""".split()
"""Words without content."""


def at_most_eight_words(text, word):
    return min(1, 8 / len(text.split()))


def lower_case(text, word):
    parts = text.split()
    return sum(part == part.lower() for part in parts) / len(parts)


def without_commas(text, word):
    return 1 / (1 + text.count(","))


def contains_word(text, word):
    return float(word in find_words(text.lower()))


def opens_with_i_think(text, word):
    first, second = (*find_words(text), "", "")[:2]
    return ((first == "I") + (second == "think")) / 2


def only_a_question(text, word):
    if not text.endswith("?"):
        return 0.0
    ends_of_sentences = re.findall(r"[.!?](?=\s|$)", text)
    return 1 / len(ends_of_sentences)


DEGREES = {
    "short": at_most_eight_words,
    "lower": lower_case,
    "no_comma": without_commas,
    "word": contains_word,
    "opening": opens_with_i_think,
    "question": only_a_question,
}
"""The degree to which a text satisfies each constraint, from 0 to 1."""


def stems(words):
    """Return the first four letters of each word, so that `river` matches `rivers`."""
    return {word[:4] for word in words}


def is_answer(text, prompt, question):
    """Return whether a text is an answer: four words, two of them new, one of the question's, and a final mark."""
    words = find_words(text.lower())
    new_words = {*words}.difference(find_words(prompt.lower()), COMMON)
    topic = stems({*find_words(question.lower())}.difference(COMMON))
    is_about_topic = not topic or topic & stems(words)
    has_end = text.endswith((".", "!", "?", '"', "'", ")"))
    return len(words) >= 4 and len(new_words) >= 2 and is_about_topic and has_end


def degrees(prompts, completions, question, constraints, word, **_):
    """Return for each completion the degree to which it satisfies each constraint; [0] if it does not answer."""
    result = []
    rows = zip(prompts, completions, question, constraints, word, strict=True)
    for prompt, completion, asked, names, needed in rows:
        text = completion[-1]["content"].strip()
        if not is_answer(text, prompt[-1]["content"], asked):
            result.append([0.0])
        elif not names:
            result.append([1.0])
        else:
            result.append([DEGREES[name](text, needed) for name in names.split("+")])
    return result


def strict(log_extra, **columns):
    """1 if an answer satisfies all constraints, else 0."""
    log_extra("constraints", columns["constraints"])
    return [float(min(values) == 1) for values in degrees(**columns)]


def partial(**columns):
    """The mean degree to which an answer satisfies its constraints."""
    return [sum(values) / len(values) for values in degrees(**columns)]


# ---- Training ----


class _AccuracyBefore(TrainerCallback):  # a part of train(), which first refuses an output_dir in use
    def on_train_begin(self, args, state, control, **_):
        if state.global_step == 0:
            report(trainer, "before")


def report(trainer, when):
    """Print a sample of greedy answers to the held-out prompts, and the strict accuracy of all."""
    table = trainer.generate_completions()
    if trainer.is_world_process_zero():
        sample = table[::17][["query", "model response", "strict"]]
        accuracy = table.groupby("constraints")["strict"].mean().round(3)
        print(sample.to_json(orient="records", lines=True), flush=True)
        print(f"Strict accuracy {when}:", accuracy.to_dict(), flush=True)


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, PPOConfig, ModelConfig))
    parser.set_defaults(
        **preset("recommended-lora"),
        # Model
        model_name_or_path="chat-model" if os.path.isdir("chat-model") else "HuggingFaceTB/SmolLM2-135M-Instruct",
        use_peft=True,
        lora_target_modules=["all-linear"],
        gradient_checkpointing=False,
        # Rollout
        per_device_train_batch_size=32,
        per_device_eval_batch_size=88,
        response_length=32,
        stop_token="eos",
        # Reward
        reward_weights=[1.0, 0.5],
        missing_eos_penalty=0.5,
        # Optimization
        max_steps=36,
        # Results
        output_dir="runs/follow",
        logging_steps=1,
        num_sample_generations=0,
        save_steps=5,
        save_total_limit=1,
    )
    script, args, model_args = parser.parse_args_and_config()
    path = model_args.model_name_or_path
    all_questions = questions(script.dataset_name)
    trainer = PPOTrainer(
        args,
        AutoTokenizer.from_pretrained(path),
        AutoModelForCausalLM.from_pretrained(path, dtype=model_args.dtype),
        value_model="policy",
        reward_funcs=[strict, partial],
        train_dataset=rows_to_train_on(all_questions[NUM_HELD_OUT:], args.seed),
        eval_dataset=rows_to_test_on(all_questions[:NUM_HELD_OUT]),
        peft_config=get_peft_config(model_args),
        callbacks=[_AccuracyBefore()],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    report(trainer, "after")
