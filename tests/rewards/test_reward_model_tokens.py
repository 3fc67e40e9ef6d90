"""Reward models with a tokenizer of their own score as they do alone, on the text, one unpadded row at a time."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen2Config

from rlhf_ppo import PPOTrainer
from rlhf_ppo.data.conversation import EPISODE_COLUMN, Conversations
from rlhf_ppo.data.prompts import PromptEncoder, silent_ids, turn_end
from rlhf_ppo.data.rollout import Prompts, Responses
from rlhf_ppo.rewards import RewardModel, ScoringBatch
from rlhf_ppo.rewards.judges import RewardModelJudge
from rlhf_ppo.rewards.reward_model import reward_model_ids, shares_tokens, tokenizer_beside
from rlhf_ppo.rewards.scorer import Answer, Scores
from tests.conftest import make_tokenizer, scoring_batch, tiny_policy, tiny_scorer
from tests.runs import QUICK, MakeTrainer

EOS = 1
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def character_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token for each byte, after a BOS; nothing of it is in the policy's tokenizer."""
    vocabulary = {"<s>": 0, "</s>": 1, "<p>": 2}
    vocabulary |= {letter: index + 3 for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<p>")
    tokenizer.chat_template = chat_template
    return tokenizer


def character_model() -> Any:
    return tiny_scorer(4, vocab_size=300, max_position_embeddings=256).eval()


@torch.no_grad()
def alone(model: Any, ids: list[int]) -> float:
    """What transformers itself says of one unpadded row."""
    pad, model.config.pad_token_id = model.config.pad_token_id, -1
    score = model(input_ids=torch.tensor([ids])).logits.item()
    model.config.pad_token_id = pad
    return score


# Prompt and response in the policy's ids (w0 is 3): two that ended, two that were cut.
ROWS = [([4, 5], [6, 7, EOS]), ([8], [EOS]), ([9, 10, 11], [12, 13, 14, 15]), ([16], [17])]
PROMPTS, ANSWERS, ENDED = (
    ["w1 w2", "w5", "w6 w7 w8", "w13"],
    [" w3 w4", "", " w9 w10 w11 w12", " w14"],
    [True, True, False, False],
)


def responses(rows: list[tuple[list[int], list[int]]] = ROWS) -> Responses:
    context, length = (max(len(row[part]) for row in rows) for part in (0, 1))
    ids, mask = torch.full((len(rows), context + length), EOS), torch.zeros(len(rows), context + length).bool()
    for row, (prompt, response) in enumerate(rows):
        real = slice(context - len(prompt), context + len(response))
        ids[row, real], mask[row, real] = torch.tensor(prompt + response), True
    return Responses(ids, mask, mask[:, context:])


def batch(
    columns: dict[str, list[Any]], rows: Any = ROWS, ended: list[bool] | None = None, tokenizer: Any = None
) -> ScoringBatch:
    made = responses(rows)
    has_ended = [response[-1] == EOS for _, response in rows] if ended is None else ended
    return scoring_batch(*made.batch, columns, torch.tensor(has_ended), tokenizer=tokenizer)


def encoded(columns: dict[str, list[Any]], ended: list[bool] | None = None) -> list[list[int]]:
    answers = batch(columns, ended=ended, tokenizer=make_tokenizer()).answers
    return [reward_model_ids(answer, character_tokenizer()) for answer in answers]


def own_ids(text: str) -> list[int]:
    """<s> and one token per character, by hand."""
    vocabulary = character_tokenizer().get_vocab()
    return [0, *(vocabulary[letter.replace(" ", "Ġ").replace("\n", "Ċ")] for letter in text)]


TEXTS = [prompt + answer for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]


@pytest.mark.parametrize("columns", [{}, {"prompt": PROMPTS}], ids=["ids", "text"])
def test_a_text_goes_on_into_its_response_and_ends_in_the_other_eos(columns: dict[str, list[Any]]) -> None:
    expected = [own_ids(text) + [1] * ended for text, ended in zip(TEXTS, ENDED, strict=True)]
    assert encoded(columns) == expected
    # The same as tokenizing the text with the EOS written out, as TRL's RewardTrainer does.
    written = [text + "</s>" * ended for text, ended in zip(TEXTS, ENDED, strict=True)]
    assert character_tokenizer()(written)["input_ids"] == expected


def test_a_tokenizer_that_closes_each_text_itself_reads_an_answer_that_ended_with_its_eos_before_that() -> None:
    """RoBERTa's, for example; TRL's `RewardTrainer` tokenizes the text with the EOS written out."""
    tokenizer = make_tokenizer()
    post: Any = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", EOS)])
    tokenizer.backend_tokenizer.post_processor = post
    ended, cut, written = (Answer("w1 w2", text, text != " w4") for text in (" w3", " w4", " w3<eos>"))
    assert reward_model_ids(ended, tokenizer) == reward_model_ids(written, tokenizer) == [4, 5, 6, EOS, EOS]
    assert reward_model_ids(cut, tokenizer) == [4, 5, 7, EOS]


def test_a_response_that_ended_with_a_word_or_a_stop_string_keeps_it_and_gets_the_eos() -> None:
    assert encoded({}, ended=[True, True, True, False])[2] == [*own_ids(TEXTS[2]), 1]
    assert encoded({}, ended=[False] * 4) == [own_ids(text) for text in TEXTS]


CONVERSATIONS: list[Any] = [[{"role": "user", "content": text, "name": None}] for text in PROMPTS]


def test_a_conversation_goes_through_the_other_template_which_closes_only_what_ended() -> None:
    expected = [
        f"[user]{prompt}[end][assistant]{answer.strip()}" + "[end]" * ended
        for prompt, answer, ended in zip(PROMPTS, ANSWERS, ENDED, strict=True)
    ]
    assert encoded({"prompt": CONVERSATIONS}) == [own_ids(text)[1:] for text in expected]


def test_a_prefilled_turn_goes_on() -> None:
    prefilled = [[*CONVERSATIONS[0], {"role": "assistant", "content": "w0 "}], *CONVERSATIONS[1:]]
    assert encoded({"prompt": prefilled})[0] == own_ids("[user]w1 w2[end][assistant]w0 w3 w4[end]")[1:]


def test_of_an_episode_each_message_goes_through_the_other_template() -> None:
    """As TRL renders it: what a tool answered is no text of the policy. Only a text that was cut stays open."""
    words = [{"role": "assistant", "content": "go"}, {"role": "tool", "name": "f", "content": "5"}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    episodes = [[*words, {"role": "assistant", "content": "w"}], words, [*words, dict(words[0])], [*words, call]]
    records = [SimpleNamespace(messages=messages) for messages in episodes]
    begun = "[assistant]go[end][tool]5[end]"
    behind = [f"{begun}[assistant]w[end]", begun, f"{begun}[assistant]go", f"{begun}[assistant][end]"]
    expected = [own_ids(f"[user]{prompt}[end]{text}")[1:] for prompt, text in zip(PROMPTS, behind, strict=True)]
    assert encoded({"prompt": CONVERSATIONS, EPISODE_COLUMN: records}) == expected


def test_reasoning_that_was_cut_is_not_closed() -> None:
    from tests.agents.chat import chat_tokenizer

    tokenizer, asked = chat_tokenizer("qwen3"), [{"role": "user", "content": "Q"}]
    thought = [{"role": "assistant", "reasoning_content": "Let me", "content": ""}]
    of_policy = {"tokenizer": tokenizer, "prompt_ids": [1], "response_ids": [2], "messages": thought}
    ids = reward_model_ids(Answer(asked, "", ended=False, **of_policy), None)
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n<think>\nLet me")


def test_tokenizers_are_the_same_where_the_policys_tokens_have_the_same_ids() -> None:
    plain, eos_pads = make_tokenizer(), make_tokenizer(pad_token="<eos>")
    assert shares_tokens(plain, plain) and shares_tokens(plain, eos_pads) and shares_tokens(eos_pads, plain)
    padded = make_tokenizer(pad_token=None)
    padded.add_special_tokens({"pad_token": "[PAD]"})
    assert shares_tokens(padded, plain) and shares_tokens(plain, padded)
    more = make_tokenizer()
    more.add_tokens(["more"])
    assert shares_tokens(plain, more) and not shares_tokens(more, plain)
    assert not shares_tokens(plain, character_tokenizer())


def test_the_tokenizer_beside_a_model(tmp_path: Path) -> None:
    character_model().save_pretrained(tmp_path / "bare")
    character_model().save_pretrained(tmp_path / "model")
    character_tokenizer().save_pretrained(tmp_path / "model")
    found = tokenizer_beside(tmp_path / "model")
    assert found is not None and found.get_vocab() == character_tokenizer().get_vocab()
    assert tokenizer_beside(tmp_path / "bare") is None
    assert tokenizer_beside(tmp_path / "nowhere") is None and tokenizer_beside("") is None
    Qwen2Config(vocab_size=32).save_pretrained(tmp_path / "qwen")  # transformers makes an empty tokenizer for it
    assert tokenizer_beside(tmp_path / "qwen") is None
    peft = pytest.importorskip("peft")
    base = type(character_model()).from_pretrained(tmp_path / "model")
    peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    found = tokenizer_beside(tmp_path / "adapter")
    assert found is not None and found.get_vocab() == character_tokenizer().get_vocab()


# ---- In the trainer ----


def scored(trainer: PPOTrainer, columns: dict[str, list[Any]]) -> Scores:
    """What a trainer's rewards say of the rows."""
    made = responses()
    return trainer.score_responses(made, Prompts(made.query_responses[:, :3], made.attention_mask[:, :3], columns))


def given_as(form: str, directory: Path) -> dict[str, Any]:
    """The reward model of characters, in every way that it can be passed."""
    model, tokenizer = character_model(), character_tokenizer()
    if form == "objects":
        return {"reward_model": model, "reward_processing_classes": tokenizer}
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if form == "directory":
        return {"reward_model": str(directory)}
    return {"reward_model": [type(model).from_pretrained(directory)]}


def test_a_text_beyond_its_positions_is_refused_at_construction_or_not_scored(
    make_trainer: MakeTrainer, caplog: pytest.LogCaptureFixture
) -> None:
    def make(positions: int, **limits: int) -> PPOTrainer:
        model = tiny_scorer(vocab_size=300, max_position_embeddings=positions)
        given = {"reward_model": model, "reward_processing_classes": character_tokenizer(), "value_model": None}
        texts = ["w1 w2 w3 w4 w5 w6", "w1"]
        return make_trainer(**QUICK | limits, **given, train_dataset=[{"prompt": text} for text in texts] * 4)

    advice = r"own tokens, reads 18 for the prompt alone and has 18: set max_prompt_length=5,"
    with pytest.raises(ValueError, match=advice):
        make(18)
    make(18, max_prompt_length=5).train()
    trainer = make(19)
    trainer.train()
    assert "answers are not scored" in caplog.text
    prompts = Prompts(torch.tensor([[4, 5], [0, 4]]), torch.tensor([[1, 1], [0, 1]]).bool(), {})
    made = responses([([4, 5], [12, 13, 14, 15, 16]), ([4], [6, EOS])])
    unscored, score = trainer.score_responses(made, prompts).total.tolist()
    model = tiny_scorer(vocab_size=300, max_position_embeddings=19).eval()
    assert math.isnan(unscored) and score == pytest.approx(alone(model, [*own_ids("w1 w3"), 1]), abs=1e-5)


@pytest.mark.parametrize("form", ["objects", "directory", "loaded from a directory"])
@pytest.mark.parametrize("columns", [{}, {"prompt": PROMPTS}, {"prompt": CONVERSATIONS}], ids=["ids", "text", "chat"])
def test_it_scores_as_it_does_alone(
    form: str, columns: dict[str, list[Any]], make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(
        **QUICK, **given_as(form, tmp_path / "reward"), value_model=None, local_rollout_forward_batch_size=3
    )
    expected = [alone(character_model(), row) for row in encoded(columns)]
    assert max(expected) - min(expected) > 0.05
    scores = scored(trainer, columns)
    assert scores.total.tolist() == pytest.approx(expected, abs=1e-5)
    assert list(scores.by_source) == ["reward_model"]
    # The value model cannot be made from a model that does not read the policy's tokens.
    assert cast(Any, trainer.value_model).config.vocab_size == 32


def test_a_conversation_in_the_policys_tokens_has_the_models_own_template(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """As TRL's `GRPOTrainer` reads it; also as a judge."""
    own, policys = make_tokenizer(), make_tokenizer()
    own.chat_template = "{% for message in messages %}{{ message['content'] }} w20 {% endfor %}"
    policys.chat_template = own.chat_template.replace("w20", "w21")
    model = tiny_scorer(seed=4).eval()
    for part in (model, own):
        part.save_pretrained(tmp_path)
    trainer = make_trainer(**QUICK, reward_model=str(tmp_path), processing_class=policys)
    columns = {"prompt": CONVERSATIONS}
    texts = [
        f"{prompt} w20 {answer}" + " w20" * ended
        for prompt, answer, ended in zip(PROMPTS, ANSWERS, ENDED, strict=True)
    ]
    expected = pytest.approx([alone(model, own(text)["input_ids"]) for text in texts], abs=1e-5)
    assert scored(trainer, columns).total.tolist() == expected
    assert RewardModelJudge(str(tmp_path)).scores(batch(columns, tokenizer=policys).answers, {}) == expected


# ---- Step 1, step 2 ----


@pytest.mark.parametrize("tokenizer", ["the policy's", "its own"])
def test_a_model_from_trls_reward_trainer_scores_the_same_in_ppo(
    tokenizer: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    shared = tokenizer == "the policy's"
    processing_class = make_tokenizer() if shared else character_tokenizer()
    model = tiny_scorer(seed=4) if shared else character_model()
    pairs = [{"prompt": text, "chosen": " w3 w4", "rejected": " w9"} for text in PROMPTS]
    args = trl.RewardConfig(
        str(tmp_path / "reward"), max_steps=2, learning_rate=1e-2, per_device_train_batch_size=4, use_cpu=True,
        bf16=False, report_to="none", disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    step_1 = trl.RewardTrainer(model, args, train_dataset=Dataset.from_list(pairs), processing_class=processing_class)
    before = model.score.weight.clone()
    step_1.train()
    step_1.save_model()
    assert not torch.equal(before, model.score.weight)
    texts = [text + processing_class.eos_token * ended for text, ended in zip(TEXTS, ENDED, strict=True)]
    texts = [text.replace("w5<eos>", "w5 <eos>") for text in texts]  # the word-level tokenizer splits at spaces
    expected = [alone(model.eval(), processing_class(text)["input_ids"]) for text in texts]

    step_2 = make_trainer(**QUICK, reward_model=str(tmp_path / "reward"))
    assert scored(step_2, {}).total.tolist() == pytest.approx(expected, abs=1e-5)
    assert max(expected) - min(expected) > 0.05


ASKED = [{"role": "user", "content": "w1 w2"}]
TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
needs_templates = pytest.mark.skipif(len(TEMPLATES) < 60, reason="older TRL ships fewer templates")


@needs_templates
def test_a_conversation_is_read_as_trls_reward_trainer_read_it(tmp_path: Path) -> None:
    """With every template that TRL ships, of an answer that ended; what it writes after the stop token counts."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=True)
    args = trl.RewardConfig(
        str(tmp_path), max_length=None, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True
    )
    whole = {"input_ids": [4], "chosen_ids": [4], "rejected_ids": [5]}
    trainer = trl.RewardTrainer(
        character_model(), args, train_dataset=Dataset.from_list([whole]), processing_class=tokenizer
    )
    seen: list[list[int]] = []

    def scorer(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.extend(row[real].tolist() for row, real in zip(ids, mask, strict=True))
        return torch.zeros(len(ids))

    models = [RewardModel(cast(Any, scorer), 8, tokenizer=own) for own in (None, tokenizer)]
    num_other = 0
    for path in TEMPLATES:
        tokenizer.chat_template = path.read_text()
        texts = ["w3 w4", "<think>\nw5\n</think>\n\nw3"]
        if path.name.startswith("llava"):  # which reads blocks alone, so RewardTrainer fails on these texts
            continue
        answers = [[{"role": "assistant", "content": text}] for text in texts]
        pair = {"prompt": ASKED, "chosen": answers[0], "rejected": answers[1]}
        row: Any = trainer._prepare_dataset(Dataset.from_list([pair]), tokenizer, args, "train")[0]
        prompt = PromptEncoder(tokenizer, "prompts", None)({"prompt": ASKED}, 0)["input_ids"]
        sampled = [(prompt, [*tokenizer(text, add_special_tokens=False)["input_ids"], EOS]) for text in texts]
        seen.clear()
        for model in models:
            model(batch({"prompt": [ASKED] * 2}, sampled, [True, True], tokenizer))
        assert seen == [row["chosen_ids"], row["rejected_ids"]] * 2, path.name
        num_other += seen[0] != [*sampled[0][0], *sampled[0][1]]
    assert num_other > 30  # the tokens of the rollout would be others


@needs_templates
def test_lengths_are_decided_at_construction_with_the_models_own_template(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A limit for the longest answers, cut and ended, scores them; of one token less the advice can be followed."""
    policys, own, prompts = character_tokenizer(), character_tokenizer(), (ASKED, [{"role": "user", "content": "w"}])
    policys.chat_template = TEMPLATE.replace("[end]", "")
    given = {
        "processing_class": policys,
        "value_model": None,
        "train_dataset": [{"prompt": one} for one in prompts] * 2,
    }
    prompt = PromptEncoder(policys, "prompts", None)({"prompt": ASKED}, 0)["input_ids"]
    made = [(prompt, [*own_ids("wxyz")[1:]]), (prompt, [*own_ids("wxy")[1:], EOS])]
    scored = batch({"prompt": [ASKED] * 2}, made, tokenizer=policys)
    shown = scored.prompts
    num_longer = 0
    for path in TEMPLATES:
        own.chat_template = path.read_text()
        if path.stem.startswith(("llava", "idefics3", "smolvlm")):  # which read blocks alone
            continue
        own.save_pretrained(tmp_path)
        longest = max(len(reward_model_ids(answer, own)) for answer in scored.answers)

        def make(positions: int, **limits: Any) -> PPOTrainer:
            rewards = tiny_scorer(4, vocab_size=300, max_position_embeddings=positions)
            rewards.config._name_or_path = str(tmp_path)
            models = {"model": tiny_policy(vocab_size=300, max_position_embeddings=4096), "reward_model": rewards}
            return make_trainer(**QUICK | {"total_episodes": 2} | limits, **given, **models)

        num_longer += longest > len(prompt) + 4
        limit = max(longest, len(prompt) + 4) - 1
        assert not make(limit + 1).score_responses(responses(made), shown).total.isnan().any(), path.name
        with pytest.raises(ValueError, match=f"response_length=4 take {len(prompt) + 4} positions, but") as error:
            make(limit)
        make(limit, max_prompt_length=int(str(error.value).partition("max_prompt_length=")[2].split(",")[0])).train()
    assert num_longer > 30


class RendersInCode(PreTrainedTokenizerFast):
    """The interface of transformers' MistralCommonBackend: no template, no list of added tokens, not every role."""

    is_made = False

    def apply_chat_template(self, conversation: Any, *, tokenize: bool = True, **how: Any) -> Any:
        text = " ".join(f"w20 {message['content']} w21" for message in conversation)
        return self(text) if tokenize else text

    def __getattribute__(self, name: str) -> Any:
        if name in ("added_tokens_decoder", "sep_token_id", "get_chat_template") and self.is_made:
            raise AttributeError(name)
        return super().__getattribute__(name)


def test_a_tokenizer_that_renders_conversations_without_a_template(make_trainer: MakeTrainer) -> None:
    """A reward model reads its tokens as sampled: its text is not tokenized again."""
    core = make_tokenizer()
    tokenizer = RendersInCode(tokenizer_object=core.backend_tokenizer, pad_token="<pad>", eos_token="<eos>")
    tokenizer.is_made = True
    rows, model = [{"prompt": ASKED}] * 8, tiny_scorer(seed=4).eval()
    trainer = make_trainer(**QUICK, processing_class=tokenizer, reward_model=model, train_dataset=rows)
    assert cast(Any, trainer.train_dataset)[0]["input_ids"] == core("w20 w1 w2 w21")["input_ids"]
    trainer.train()
    expected = [alone(model, [*prompt, *response]) for prompt, response in ROWS]
    assert scored(trainer, {"prompt": [ASKED] * 4}).total.tolist() == pytest.approx(expected, abs=1e-5)
    assert Conversations(tokenizer, has_tools=False).default_prompt() == [{"role": "user", "content": ""}]
    assert (turn_end(tokenizer), silent_ids(tokenizer, [1, 5])) == (None, {0, 1})


@needs_templates
@pytest.mark.parametrize("eos", ["</s>", "<|im_end|>"])
def test_what_the_template_opens_an_answer_with_is_known(eos: str) -> None:
    """Also if the template ends the user's turn with EOS."""
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"eos_token": eos})
    opened = {"qwen3": "", "qwen3_5_think": "<think>\n", "deepseekv3": "<think>\n", "gptoss": ""}
    for name, text in opened.items():
        (path,) = [path for path in TEMPLATES if path.stem == name]
        tokenizer.chat_template = path.read_text()
        prompt = PromptEncoder(tokenizer, "prompts", None)({"prompt": ASKED}, 0)["input_ids"]
        (answer,) = batch({"prompt": [ASKED]}, [(prompt, [9, EOS])], tokenizer=tokenizer).answers
        assert answer.prefilled == text
    begun = [*ASKED, {"role": "assistant", "content": "<think>"}]
    assert Answer(begun, "x").prefilled == "<think>"
