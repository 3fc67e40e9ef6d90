"""The demo: its corpus of stories, and its steps: SFT, reward model, PPO, and a judge who knows the grammar."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    set_seed,
)
from trl.trainer.reward_config import RewardConfig
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from rlhf_ppo.config import PPOConfig
from rlhf_ppo.data.prompts import eos_id, pad_id
from rlhf_ppo.reporting.console import use_console
from rlhf_ppo.reporting.plots import plot_metrics
from rlhf_ppo.reporting.win_rate import WinRate
from rlhf_ppo.terminal import cell
from rlhf_ppo.trainer import PPOTrainer

TRAINING_SEED, HELD_OUT_SEED = 0, 1
RESPONSE_LENGTH = 40
TEMPERATURE = 0.7


@dataclass(frozen=True)
class DemoSize:
    """Size of the demo's data and training.

    Attributes:
        num_stories: Number of stories that the language model learns from, in two passes.
        num_pairs: Number of preference pairs that the reward model learns from.
        num_updates: Number of PPO updates.
        num_episodes: Number of stories sampled in each update.
        num_held_out: Number of openings, and of preference pairs, that no model trains on.
    """

    num_stories: int = 6000
    num_pairs: int = 8000
    num_updates: int = 40
    num_episodes: int = 64
    num_held_out: int = 256


def train_language_model(output_dir: Path, size: DemoSize) -> None:
    """Step 1, SFT from scratch: a tokenizer and a Llama of two layers learn to write like the corpus.

    Args:
        output_dir: Where the model and the tokenizer are saved.
        size: Gives `num_stories`.
    """
    corpus = stories(size.num_stories, TRAINING_SEED)
    tokenizer = _train_tokenizer([row["prompt"] + row["completion"] for row in corpus])  # pyright: ignore
    set_seed(TRAINING_SEED)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=pad_id(tokenizer),
            bos_token_id=None,
            eos_token_id=eos_id(tokenizer),
        )
    )
    settings = _settings(output_dir, learning_rate=3e-3)
    args = SFTConfig(**settings, num_train_epochs=2, completion_only_loss=False, max_length=None)
    trainer = SFTTrainer(model, args, train_dataset=corpus, processing_class=tokenizer)
    use_console(trainer, "line")
    trainer.train()
    trainer.save_model()


def train_reward_model(sft_dir: Path, output_dir: Path, size: DemoSize) -> float:
    """Step 2: a copy of the language model with a scalar head learns which of two stories readers like better.

    Args:
        sft_dir: The language model of step 1.
        output_dir: Where the reward model is saved.
        size: Gives `num_pairs` and `num_held_out`.

    Returns:
        Share of held-out pairs whose preferred story scores higher, in [0, 1].
    """
    settings = _settings(output_dir, learning_rate=1e-3)
    args = RewardConfig(**settings, num_train_epochs=1, max_length=None, center_rewards_coefficient=0.01)
    trainer = RewardTrainer(
        str(sft_dir),
        args,
        train_dataset=preference_pairs(size.num_pairs, TRAINING_SEED),
        eval_dataset=preference_pairs(size.num_held_out, HELD_OUT_SEED),
    )
    use_console(trainer, "line")
    trainer.train()
    trainer.save_model()
    return trainer.evaluate()["eval_accuracy"]


def train_policy(
    sft_dir: Path, reward_model_dir: Path, output_dir: Path, size: DemoSize
) -> tuple[dict[str, float], dict[str, float]]:
    """Step 3, PPO: the language model learns to tell stories that the reward model scores high.

    Args:
        sft_dir: The language model of step 1: the policy's start and the reference.
        reward_model_dir: The reward model of step 2.
        output_dir: Where the policy and `trainer_state.json` are saved.
        size: Gives `num_updates`, `num_episodes` and `num_held_out`.

    Returns:
        Evaluation metrics on held-out openings, before and after training.
    """
    args = PPOConfig(
        **_settings(output_dir, learning_rate=3e-4, batch_size=size.num_episodes),
        logging_steps=1,
        total_episodes=size.num_updates * size.num_episodes,
        response_length=RESPONSE_LENGTH,
        temperature=TEMPERATURE,
        stop_token="eos",
        missing_eos_penalty=1.0,
        kl_coef=0.1,  # at the default of 0.05 the policy tells fewer different stories
        num_sample_generations=0,
    )
    trainer = PPOTrainer(
        args,
        AutoTokenizer.from_pretrained(sft_dir),
        model=AutoModelForCausalLM.from_pretrained(sft_dir),
        reward_model=AutoModelForSequenceClassification.from_pretrained(reward_model_dir),
        train_dataset=openings(size.num_updates * size.num_episodes, TRAINING_SEED),
        eval_dataset=openings(size.num_held_out, HELD_OUT_SEED),
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    return before, after


@torch.no_grad()
def tell_stories(model_dir: Path, prompts: Sequence[str]) -> list[str]:
    """Continue each opening with a saved model.

    Args:
        model_dir: The directory that step 1 or step 3 wrote.
        prompts: The openings.

    Returns:
        One response for each opening, without special tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_dir, padding_side="left")
    model: Any = LlamaForCausalLM.from_pretrained(model_dir)
    inputs = tokenizer(list(prompts), return_tensors="pt", padding=True)
    torch.manual_seed(HELD_OUT_SEED)
    sequences = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=RESPONSE_LENGTH,
        do_sample=True,
        temperature=TEMPERATURE,
        top_k=0,
    )
    return tokenizer.batch_decode(sequences[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def _train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(vocab_size=1024, special_tokens=["<pad>", "<eos>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _settings(output_dir: Path, learning_rate: float, batch_size: int = 32) -> dict[str, Any]:
    return {
        "output_dir": str(output_dir),
        "learning_rate": learning_rate,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": 64,
        "seed": TRAINING_SEED,
        "use_cpu": True,  # such a small model is no faster on a GPU, and its numbers are the same everywhere
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
        "save_strategy": "no",
        "report_to": "none",
    }


# ---- Output ----

METRICS = {
    "eval_score": "reward model's score",
    "eval_kl": "KL to the SFT model, nats",
    "eval_response_length_mean": "response length, tokens",
    "eval_ended_frac": "share of responses that end",
}


def metrics_table(before: dict[str, float], after: dict[str, float]) -> Table:
    """Tabulate evaluation metrics.

    Args:
        before: Metrics of the SFT model.
        after: Metrics of the PPO policy.

    Returns:
        One row for each of `METRICS`.
    """
    table = Table("", "before PPO", "after PPO", title="On held-out openings")
    for key, meaning in METRICS.items():
        form = "{:.0%}" if "share" in meaning else "{:.2f}"
        table.add_row(meaning, form.format(before[key]), form.format(after[key]))
    return table


def stories_table(prompts: Sequence[str], heroes: Sequence[str], before: Sequence[str], after: Sequence[str]) -> Table:
    """Tabulate the first five stories side by side, each with its pleasantness as the judge reads it.

    Args:
        prompts: The openings.
        heroes: "She" or "He" for each opening.
        before: The SFT model's continuations.
        after: The PPO policy's.

    Returns:
        One row for each of the five openings.
    """
    table = Table("opening", "before PPO", "after PPO", title="Stories (pleasantness)", show_lines=True)
    for prompt, hero, first, second in list(zip(prompts, heroes, before, after, strict=True))[:5]:
        table.add_row(cell(prompt), cell(_judged(first, hero)), cell(_judged(second, hero)))
    return table


def _judged(response: str, hero: str) -> str:
    valence = pleasantness(response, hero)
    return f"{response.strip()} ({'not a story' if valence == -math.inf else f'{valence:+.0f}'})"


# ---- From end to end ----


@dataclass(frozen=True)
class DemoResult:
    """Measurements of the demo on held-out data.

    Attributes:
        reward_accuracy: Share of preference pairs that the reward model orders as the reader did, in [0, 1].
        before: Evaluation metrics of the SFT model, under the keys of `PPOTrainer.evaluate`.
        after: The same for the PPO policy.
        verdicts: The judge's verdicts on PPO against SFT.
    """

    reward_accuracy: float
    before: dict[str, float]
    after: dict[str, float]
    verdicts: WinRate

    @property
    def is_clear(self) -> bool:
        """Whether PPO's win rate is above one half by more than three standard errors.

        If both are equally good, `wins - losses` has variance `wins + losses`.
        """
        return self.verdicts.wins - self.verdicts.losses > 3 * (self.verdicts.wins + self.verdicts.losses) ** 0.5


def run_demo(output_dir: Path, size: DemoSize | None = None, console: Console | None = None) -> DemoResult:
    """Train a language model, a reward model and a PPO policy, and ask the judge whether PPO helped.

    Sets torch to one thread: more threads are no faster for such small models, and sums round the same way everywhere.

    Args:
        output_dir: Gets `sft/`, `reward_model/`, `ppo/` (each loads with `from_pretrained`) and `curves.png`.
        size: How much data and training; `DemoSize()` by default.
        console: Where results are printed; the terminal by default.

    Returns:
        The measurements that were printed.
    """
    disable_progress_bars()
    torch.set_num_threads(1)
    size, console = size or DemoSize(), console or Console()
    sft_dir, reward_model_dir, ppo_dir = (output_dir / name for name in ("sft", "reward_model", "ppo"))

    console.rule("1. A language model learns to tell stories (SFT)")
    train_language_model(sft_dir, size)

    console.rule("2. A reward model learns which stories readers like")
    accuracy = train_reward_model(sft_dir, reward_model_dir, size)
    console.print(f"It prefers the story that the reader preferred in {accuracy:.1%} of held-out pairs")

    console.rule("3. The language model learns to tell stories that score high (PPO)")
    before, after = train_policy(sft_dir, reward_model_dir, ppo_dir, size)
    plot_metrics([ppo_dir], output_dir / "curves.png")

    console.rule("4. The judge, who knows the grammar, compares")
    held_out = openings(size.num_held_out, HELD_OUT_SEED)
    prompts, heroes = list(held_out["prompt"]), list(held_out["hero"])
    sft_stories, ppo_stories = tell_stories(sft_dir, prompts), tell_stories(ppo_dir, prompts)
    verdicts = compare(ppo_stories, sft_stories, heroes)
    console.print(stories_table(prompts, heroes, sft_stories, ppo_stories))
    console.print(metrics_table(before, after))
    console.print(cell(f"Curves: {output_dir / 'curves.png'}"))
    low, high = verdicts.interval()
    console.print(
        f"Judge prefers PPO over SFT: {verdicts.rate:.2%} (95% interval {100 * low:.1f} to {100 * high:.1f})"
    )
    return DemoResult(accuracy, before, after, verdicts)


# ---- Corpus: stories from a seeded grammar ----


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
    """Draw a story that repeats one of its sentences in other words, which no reader likes."""
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
        Sum of the pleasantness of the words, from -8 to 8; minus infinity where the response is not a story.
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
