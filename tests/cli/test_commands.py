"""The program `rlhf-ppo`: its subcommands, and AITraining's Python interface."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainingArguments

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli import main, training_commands
from rlhf_ppo.cli.arguments import PPOArgumentParser
from rlhf_ppo.models.adapters import adapter_config, base_of_adapter
from rlhf_ppo.models.heads import ValueHead
from rlhf_ppo.models.loading import load_classifier
from rlhf_ppo.reporting.judgements import read_accuracy
from tests.conftest import save_models, tiny_policy, tiny_scorer, write_rows


@pytest.fixture
def places(empty_place, plain_runs):
    save_models(base=tiny_policy(), scorer=tiny_scorer())
    texts = [{"prompt": "w4 w5", "completion": completion} for completion in [" w6"] * 15 + [" w6 w7 w8"] * 5]
    write_rows("texts.jsonl", texts)
    write_rows("pairs.jsonl", [{"prompt": "w4 w5", "chosen": " w4", "rejected": " w7"}] * 20)


QUICK = (
    "--output_dir out --max_steps 2 --per_device_train_batch_size 2 --report_to none --save_strategy no "
    "--learning_rate 1e-2"
).split()


def test_sft_and_reward_print_a_line_for_each_log_and_save_what_they_trained(places, capsys, caplog, recwarn):
    heads = []
    for command, data, auto, figures in (
        (training_commands.sft, "texts.jsonl", AutoModelForCausalLM, r"loss +\d\.\d{3} \| right tokens +\d+%"),
        *[
            (
                *(training_commands.reward, "pairs.jsonl", AutoModelForSequenceClassification),
                r"loss +\d\.\d{3} \| right pairs +\d+% \| margin +-?\d\.\d{3}",
            )
        ]
        * 2,
    ):
        torch.manual_seed(len(heads))  # the new head follows the seed that is given
        options = ["--model_name_or_path", "base", "--dataset_name", data, "--max_length", "5", "--logging_steps", "1"]
        trainer = command([*options, *QUICK])
        printed = capsys.readouterr().out
        lines = [line for line in printed.splitlines() if line.startswith("update")]
        assert len(lines) == 2 and all(re.search(rf"/2 \| {figures} \| .* left$", line) for line in lines), printed
        assert "{" not in printed and "The model is in out." in printed
        saved = auto.from_pretrained("out")
        heads.append(saved.score.weight if command is training_commands.reward else None)
        assert trainer.state.global_step == 2 and trainer.state.log_history[-1].keys() >= {"train_loss"}
        card = Path("out/README.md").read_text()
        assert "# Model Card for out\n" in card and 'model="path/to/out"' in card and "using [TRL]" in card
        assert f"is a fine-tuned version of `base` on the `{data}` dataset.\n" in card and "None" not in card
    assert torch.equal(heads[1], heads[2]) and len(heads[1]) == 1
    assert "cut 5 of 20 texts to max_length=5 tokens" in caplog.text
    assert not [warning for warning in recwarn if "pin_memory" in str(warning.message)]


LORA = ["--use_peft", "--lora_r", "2", "--lora_target_modules", "q_proj", "v_proj"]
TEXTS = ["--model_name_or_path", "base", "--dataset_name", "texts.jsonl"]
PPO = [
    *("--sft_model_path", "base", "--dataset_name", "texts.jsonl", "--response_length", "4"),
    *("--num_sample_generations", "0", *QUICK),
]


def test_train_scores_with_functions_beside_a_model(places):
    trainer = training_commands.train([*PPO, "--reward_funcs", "length", "default", "--reward_model_path", "scorer"])

    assert list(trainer.scorer.names) == ["reward_model", "length", "default"] and trainer.state.global_step == 2
    assert json.loads(Path("out/trainer_state.json").read_text())["global_step"] == 2


@pytest.mark.parametrize("kind", ["text", "conversation", "begun answer", "ids"])
def test_train_says_that_texts_do_not_get_the_chat_template_and_that_answers_are_continued(places, capsys, kind):
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained("base")
    chat = [{"role": "user", "content": "w4"}, {"role": "assistant", "content": "w5"}]
    prompt = {"text": "w4", "conversation": chat[:1], "begun answer": chat, "ids": [4]}[kind]
    write_rows("rows.jsonl", [{"input_ids" if kind == "ids" else "prompt": prompt}] * 4)

    training_commands.train([*PPO, "--dataset_name", "rows.jsonl", "--reward_funcs", "length", "--dry_run"])

    said = capsys.readouterr().out
    assert ("The prompts are texts: the model's chat template is not used." in said) == (kind == "text")
    assert ("The first prompt ends with an assistant's message" in said) == (kind == "begun answer")


def test_texts_of_exactly_max_length_tokens_are_whole_if_they_end_as_others_do(places, caplog):
    """Their ends: EOS that TRL adds, or what a chat template writes after a message. One text of 7 tokens is cut."""
    texts = ["w4 w5 w6 w7 w8 w9", "w5", *["w4 w5 w6 w7 w8"] * 3]
    write_rows("texts.jsonl", [{"text": text} for text in texts])
    write_rows("chats.jsonl", [{"messages": [{"role": "user", "content": text}]} for text in texts])
    options = ["--model_name_or_path", "base", "--dry_run"]
    training_commands.sft([*options, "--dataset_name", "texts.jsonl", "--max_length", "6"])
    assert "cut 1 of 5 texts to max_length=6 tokens" in caplog.text
    caplog.clear()
    template = "{% for m in messages %}<|im_start|>{{ m.content }} w3 w2{% endfor %}"
    tokenizer = AutoTokenizer.from_pretrained("base")
    tokenizer.chat_template = template
    tokenizer.save_pretrained("base")
    length = len(tokenizer.apply_chat_template([{"role": "user", "content": texts[2]}])["input_ids"])
    training_commands.sft([*options, "--dataset_name", "chats.jsonl", "--max_length", str(length)])
    assert f"cut 1 of 5 texts to max_length={length} tokens" in caplog.text


def test_sft_continues_from_its_newest_checkpoint_that_is_complete(places):
    """A kill leaves one without `trainer_state.json`, which Trainer writes last."""
    saving = [*TEXTS, *QUICK, "--save_strategy", "steps", "--save_steps", "1", "--max_steps", "3"]
    whole = training_commands.sft(saving).model.state_dict()
    Path("out/checkpoint-3/trainer_state.json").unlink()
    again = training_commands.sft([*saving, "--resume_from_checkpoint", "True"])
    assert again.state.global_step == 3 and Path("out/checkpoint-3/trainer_state.json").is_file()
    assert all(torch.equal(value, whole[name]) for name, value in again.model.state_dict().items())


def test_a_short_run_has_curves_samples_and_a_card_and_ends_with_one_line_that_says_where(places, capsys):
    training_commands.train(
        [*PPO, "--reward_funcs", "length", "--num_sample_generations", "2", "--logging_steps", "10"]
    )

    *printed, last = capsys.readouterr().out.strip().splitlines()
    said = "its curves: `rlhf-ppo plot out`; its report: `rlhf-ppo report out`; its samples: out/_samples."
    assert last == f"The policy is in out; {said}"
    assert not any("The policy is in" in line for line in printed)
    assert any("held-out prompts" in line for line in printed)
    assert len(list(Path("out/_samples").glob("update-*.csv"))) == 2
    card = Path("out/README.md").read_text()
    assert "| objective/scores |" in card and "None" not in card and 'model="path/to/out"' in card
    assert "is a fine-tuned version of `base` on the `texts.jsonl` dataset.\n" in card
    assert f"trained using rlhf_ppo {version('rlhf_ppo')}." in card
    main.main(["plot", "out", "--output", "out/curves.png"])
    assert Path("out/curves.png").stat().st_size > 10_000


@pytest.mark.filterwarnings("error:Accessing the data pointer")
def test_an_adapter_of_trls_reward_trainer_scores_over_the_policys_base(places, capsys):
    training_commands.reward(["--model_name_or_path", "base", "--dataset_name", "pairs.jsonl", *QUICK, *LORA])
    with pytest.raises(SystemExit):
        training_commands.sft([*TEXTS, *QUICK, "--model_name_or_path", "out"])
    assert "model_name_or_path='out' is an adapter of a reward model" in capsys.readouterr().err
    options = [*LORA, "--reward_model_path", "out", "--share_base_model", "--output_dir", "ppo"]
    trainer = training_commands.train([*PPO, *options])

    models = (trainer.policy_model, trainer.value_model, trainer.reward_model)
    held = {id(value): value.numel() for model in models for value in model.parameters()}
    own = sum(value.numel() for model in models for name, value in model.named_parameters() if ".lora_" in name)
    heads = sum(value.numel() for model in models[1:] for name, value in model.named_parameters() if "score." in name)
    assert sum(held.values()) == tiny_policy().num_parameters() + own + heads
    assert {path.name for path in Path("ppo").glob("*.safetensors")} == {"adapter_model.safetensors"}


def test_the_adapter_of_sft_is_trained_further_and_the_next_use_of_a_directory_replaces_the_last(places, capsys):
    def logits(model):
        with torch.no_grad():
            return model.eval()(torch.arange(3, 15)[None]).logits

    training_commands.sft([*TEXTS, *QUICK, "--output_dir", "sft", *LORA])
    start = logits(AutoPeftModelForCausalLM.from_pretrained("sft"))
    trainer = training_commands.train(
        [*PPO, "--sft_model_path", "sft", "--reward_model_path", "scorer", *LORA, "--lora_r", "3"]
    )

    assert "sft is an adapter: it is trained further as it is" in capsys.readouterr().out
    with trainer.reference.generating(trainer.model, trainer.policy_model) as reference:
        assert torch.equal(logits(reference.policy), start)
    trained = logits(trainer.policy_model)
    assert not torch.equal(trained, start) and trainer.policy_model.active_peft_config.r == 2
    assert torch.equal(logits(AutoPeftModelForCausalLM.from_pretrained("out")), trained)

    training_commands.sft([*TEXTS, "--model_name_or_path", "sft", *QUICK, *LORA])
    assert "sft is an adapter: it is trained further as it is" in capsys.readouterr().out
    whole = training_commands.sft([*TEXTS, *QUICK]).model
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained("out")), logits(whole))
    assert not Path("out/ppo_settings.json").exists()
    pairs = ["--model_name_or_path", "base", "--dataset_name", "pairs.jsonl"]
    scorer = training_commands.reward([*pairs, *QUICK, *LORA]).model
    assert torch.equal(logits(load_classifier("out", "reward_model", merges_adapter=False)), logits(scorer))
    assert not Path("out/model.safetensors").exists()
    with pytest.raises(SystemExit, match="2"):
        training_commands.reward([*pairs, *QUICK, *LORA, "--output_dir", "base"])
    assert "saving there would replace 'base', the base of the trained adapter" in capsys.readouterr().err


def test_the_reward_model_continues_the_adapter_of_sft_and_all_share_one_base(places):
    training_commands.sft([*TEXTS, *QUICK, *LORA, "--output_dir", "sft"])
    still = ["--dataset_name", "pairs.jsonl", *QUICK, *LORA, "--learning_rate", "0"]
    training_commands.reward(["--model_name_or_path", "sft", *still, "--output_dir", "reward"])
    start = ["--sft_model_path", "sft", "--reward_model_path", "reward", "--share_base_model"]
    trainer = training_commands.train([*PPO, *start, *LORA, "--output_dir", "ppo"])

    ids = torch.tensor([[4, 5, 6]])
    sft: Any = AutoPeftModelForCausalLM.from_pretrained("sft")
    reward: Any = AutoPeftModelForSequenceClassification.from_pretrained("reward", num_labels=1)
    states = reward(ids, output_hidden_states=True).hidden_states[-1]
    assert torch.equal(states, sft(ids, output_hidden_states=True).hidden_states[-1])
    assert adapter_config("reward").task_type == "SEQ_CLS" and base_of_adapter("reward") == "base"
    bases = [
        {id(weight) for name, weight in model.named_parameters() if ".lora_" not in name and "score" not in name}
        for model in (trainer.policy_model, trainer.value_model, trainer.reward_model)
    ]
    assert bases[0] > bases[1] == bases[2]  # the language model's head is the policy's alone


def test_merge_adapter_saves_the_model_that_the_adapter_gives(places):
    """It ends responses where training did."""
    stops = ["--stop_token_id", "9", "--stop_strings", "w3"]
    trainer = training_commands.train([*PPO, "--reward_funcs", "length", *LORA, "--merge_adapter", *stops])
    ids = torch.tensor([[4, 5, 6]])
    merged = AutoModelForCausalLM.from_pretrained("out")
    assert not Path("out/adapter_config.json").exists()
    assert torch.allclose(merged(ids).logits, trainer.policy_model.eval()(ids).logits, atol=1e-5)
    assert (merged.generation_config.eos_token_id, merged.generation_config.stop_strings) == (9, ["w3"])


def test_the_name_of_a_single_module_is_a_name_and_no_pattern_and_policy_is_no_path(places):
    lora = ["--use_peft", "--lora_target_modules", "q_proj"]
    trainer = training_commands.train([*PPO, "--reward_funcs", "length", *lora, "--value_model_path", "policy"])
    assert isinstance(trainer.value_model, ValueHead)
    adapted = {
        name.split(".lora_")[0].rpartition(".")[2]
        for name, _ in trainer.policy_model.named_parameters()
        if ".lora_" in name
    }
    assert adapted == {"q_proj"}


def test_a_reward_model_is_measured_on_pairs_that_it_has_not_seen(places, capsys, caplog):
    """Pairs above `max_length` are neither learned from nor held out; of nine, in batches of 4, each counts once."""
    rows = [
        {"prompt": f"w{row % 9} w{row}", "chosen": f" w{row % 7} w{row}", "rejected": f" w{row % 5}"}
        for row in range(90)
    ]
    rows += [{"prompt": f"d {row}", "chosen": " b", "rejected": 20 * " c"} for row in range(80)]
    write_rows("more.jsonl", rows)
    options = ["--model_name_or_path", "base", "--dataset_name", "more.jsonl", "--max_length", "16", *QUICK]
    options += ["--per_device_eval_batch_size", "4"]
    trainer = training_commands.reward(options)
    found = read_accuracy("out")
    assert found is not None and found.num_pairs == 9 and len(trainer.train_dataset) == 81
    model = AutoModelForSequenceClassification.from_pretrained("out")
    scores = {
        side: [model(torch.tensor([ids])).logits.item() for ids in trainer.eval_dataset[f"{side}_ids"]]
        for side in ("chosen", "rejected")
    }
    right = sum(chosen > rejected for chosen, rejected in zip(*scores.values(), strict=True))
    assert found.accuracy == pytest.approx(right / 9) and 0 < right < 9
    assert trainer.args.per_device_eval_batch_size == 4
    assert f"The reward model is {found}." in capsys.readouterr().out
    assert "The reward model is tested on too few pairs: give more pairs, of which a tenth is held out." in caplog.text
    write_rows("few.jsonl", rows[:9] + rows[90:])
    options[3] = "few.jsonl"
    training_commands.reward(options)
    assert read_accuracy("out") is None


@pytest.mark.parametrize(
    ("command", "shown", "hidden"),
    [
        ("report", ["rlhf-ppo report [-h]", "RUN [RUN ...]"], []),
        (
            "train",
            ["--config FILE", "preset such as recommended", "--total_episodes", "--kl_coef"],
            ["--label_smoothing_factor", "--micro_batch_size"],
        ),
        ("reward", ["--config FILE", "--label_smoothing_factor"], ["preset", "--kl_coef"]),
        ("judge", ["--config FILE", "--judge_model"], ["preset"]),
    ],
)
def test_help_shows_what_a_command_takes_and_no_option_that_it_refuses(command, shown, hidden, capsys):
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    printed = capsys.readouterr().out
    assert [word for word in shown if word not in printed] + [word for word in hidden if word in printed] == []


@pytest.mark.parametrize("command", main.COMMANDS)
def test_a_command_has_a_function_and_its_row_in_the_docs(command):
    module, _ = main.COMMANDS[command]
    assert callable(getattr(importlib.import_module(module), command))
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| `rlhf-ppo .*\b{command}\b.* \|", page, re.MULTILINE)
    assert row, f"{command} needs a row in docs/command-line.md"


def test_the_help_of_train_shows_the_options_of_ppo_in_groups_above_the_arguments_of_transformers(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--help"])
    printed = capsys.readouterr().out
    ppo, _, transformers = printed.partition("\ntransformers.TrainingArguments:\n")
    own = {field.name for field in fields(PPOConfig)} - {field.name for field in fields(TrainingArguments)}
    shown = {name for name in own if f"--{name} " in printed}
    assert len(shown) > 60 and [name for name in shown if f"--{name} " in transformers] == []
    titles = re.findall(r"^(\S.*):$", ppo, re.MULTILINE)
    assert titles == ["options", "script", "models", "PPO", *(title for title in titles if title.startswith("PPO, "))]
    assert re.search(r"^options:\n  -h, --help .*\n\nscript:$", ppo, re.MULTILINE)  # all others are in a group


def test_no_in_a_file_of_options_is_the_word(tmp_path):
    """YAML 1.1 reads it as False."""
    (tmp_path / "file.yaml").write_text("eval_strategy: no\nsave_strategy: no\nbf16: no\n")
    words = ["--config", str(tmp_path / "file.yaml"), "--output_dir", str(tmp_path)]
    (args,) = PPOArgumentParser((PPOConfig,)).parse_args_and_config(words)
    assert (args.eval_strategy, args.save_strategy, args.bf16) == ("no", "no", False)
