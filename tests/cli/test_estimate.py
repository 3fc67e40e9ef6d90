"""`rlhf-ppo estimate`: the figures that a run starts with, without its weights, and what engines divide."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf_ppo import PPOConfig
from rlhf_ppo.cli import commands, main
from rlhf_ppo.cli.estimate import PURPOSES, Devices, EstimateArguments, devices_of
from rlhf_ppo.estimate.run import size
from rlhf_ppo.estimate.update import Estimate, Sharding, gathered_bytes
from tests.conftest import make_tokenizer, save_models, tiny_policy, tiny_scorer, write_rows

CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
RATES = ["--device_flops", "4e6", "--device_bandwidth", "3e5"]
OPTIONS = (
    "--sft_model_path base --dataset_name texts.jsonl --response_length 4 --output_dir out --use_cpu --report_to none "
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 2 --bf16 false"
).split()
WITH_MODEL, WITH_FUNCTION = ["--reward_model_path", "scorer"], ["--reward_funcs", "length"]
PEFT = ["--use_peft", "--lora_r", "3", "--lora_target_modules", "q_proj", "up_proj"]


@pytest.fixture(autouse=True)
def places(empty_place: Path) -> None:
    save_models(base=tiny_policy(), scorer=tiny_scorer(intermediate_size=48))
    loaded = {"adapter": AutoModelForCausalLM, "adapted_scorer": AutoModelForSequenceClassification}
    for name, kind in loaded.items():
        base = kind.from_pretrained("base" if name == "adapter" else "scorer")
        config = LoraConfig(task_type="CAUSAL_LM" if name == "adapter" else "SEQ_CLS", r=3, target_modules=["q_proj"])
        get_peft_model(base, config).save_pretrained(name)
        make_tokenizer().save_pretrained(name)
    write_rows("texts.jsonl", ({"prompt": "w4 " * (1 + number % 9)} for number in range(40)))


def estimate(*options: str) -> Estimate:
    return commands.estimate([*OPTIONS, *RATES, *options])


def figures_of_run(monkeypatch: pytest.MonkeyPatch, capsys: Any, *options: str) -> dict[str, str]:
    """Return the figures of the same run, and check the line that it prints before it trains."""
    forecasts: list[Estimate] = []

    def begin(trainer: Any, *_: Any, **__: Any) -> None:
        trainer._estimate.announce()
        forecasts.append(trainer._estimate.forecast(trainer._estimate.generation_rows))

    monkeypatch.setattr(commands, "train_and_save", begin)
    monkeypatch.setattr("rlhf_ppo.estimate.run.measure_rates", lambda *_: (1e6, 1e6))
    commands.train([*OPTIONS, *options])
    figures = {name: size(getattr(forecasts[0], name)) for name in ("peak", *PURPOSES)}
    assert f"Estimate per device: {figures['peak']}; at least " in capsys.readouterr().out
    return figures


@pytest.mark.parametrize(
    "options",
    [
        WITH_FUNCTION,
        [*WITH_FUNCTION, "--value_model_path", "scorer", "--dtype", "bfloat16"],
        [*WITH_MODEL, *PEFT, "--gradient_checkpointing", "false", "--optim", "sgd"],
        [*WITH_MODEL, "--dtype", "bfloat16", "--bf16", "true"],
        [*WITH_MODEL, "--value_loss", "hl_gauss", "--value_bins", "500", "--critic_ensemble", "3"],
        ["--sft_model_path", "adapter", "--reward_model_path", "adapted_scorer"],
    ],
    ids=" ".join,
)
def test_the_figures_are_those_of_the_run(options: list[str], monkeypatch: Any, capsys: Any) -> None:
    line = figures_of_run(monkeypatch, capsys, *options)
    for name in ("base", "scorer"):
        Path(name, "model.safetensors").unlink()  # configurations are enough
    found = estimate(*options)
    assert {name: size(getattr(found, name)) for name in line} == line
    printed = capsys.readouterr().out
    assert all(re.search(rf"│ {name} +│ {re.escape(value)} +│", printed) for name, value in line.items())


def test_an_adapter_is_estimated_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    estimate(*WITH_FUNCTION, *PEFT)
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("file", "engine", "sharding"),
    [
        ("single_gpu.yaml", "", Sharding()),
        ("multi_gpu.yaml", "DDP", Sharding(buckets=True, processes=8)),
        ("deepspeed_zero1.yaml", "DeepSpeed ZeRO-1", Sharding(1, 1, 8, processes=8)),
        ("deepspeed_zero2.yaml", "DeepSpeed ZeRO-2", Sharding(1, 8, 8, processes=8)),
        ("deepspeed_zero3.yaml", "DeepSpeed ZeRO-3", Sharding(8, 8, 8, processes=8)),
        ("fsdp2.yaml", "FSDP", Sharding(8, 8, 8, is_fsdp=True, processes=8)),
        ("multi_node.yaml", "DeepSpeed ZeRO-3", Sharding(16, 16, 16, processes=16)),
    ],
)
def test_the_devices_of_an_accelerate_configuration(file: str, engine: str, sharding: Sharding) -> None:
    given = EstimateArguments(accelerate_config=str(CONFIGS / file))
    expected = Devices(sharding.processes, engine, sharding)
    assert devices_of(given, PPOConfig(output_dir="out", use_cpu=True)) == expected


def test_the_stage_may_be_in_a_file_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    text = (CONFIGS / "deepspeed_zero3.yaml").read_text()
    settings = f"deepspeed_config:\n  deepspeed_config_file: {tmp_path}/ds.json\n"
    (tmp_path / "a.yaml").write_text(re.sub(r"deepspeed_config:\n(  .*\n)+", settings, text))
    given = EstimateArguments(accelerate_config=str(tmp_path / "a.yaml"))
    assert devices_of(given, PPOConfig(output_dir="out", use_cpu=True)).engine == "DeepSpeed ZeRO-3"
    (tmp_path / "ds.json").unlink()
    with pytest.raises(ValueError, match=r"a\.yaml' is not a configuration of accelerate: .*ds\.json"):
        devices_of(given, PPOConfig(output_dir="out", use_cpu=True))


def test_the_number_of_devices_must_be_known(tmp_path: Path) -> None:
    """Without num_processes in the file, accelerate reads -1: its launcher may be given the number."""
    text = (CONFIGS / "deepspeed_zero2.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text.replace("num_processes: 8\n", ""))
    given, args = EstimateArguments(accelerate_config=str(tmp_path / "a.yaml")), PPOConfig("out", use_cpu=True)
    with pytest.raises(ValueError, match=r"a\.yaml' has no num_processes: give num_devices"):
        devices_of(given, args)
    given.num_devices = 4
    assert devices_of(given, args).count == 4


@pytest.mark.parametrize(
    ("file", "divided"),
    [
        ("deepspeed_zero2.yaml", {"optimizer", "gradients"}),
        ("deepspeed_zero3.yaml", {"optimizer", "gradients", "weights", "frozen"}),
    ],
)
def test_two_devices_divide_what_their_engine_divides(file: str, divided: set[str], capsys: Any) -> None:
    one = estimate(*WITH_MODEL)
    two = estimate(*WITH_MODEL, "--accelerate_config", str(CONFIGS / file), "--num_devices", "2", "--max_steps", "3")
    for name in ("weights", "frozen", "gradients", "optimizer"):
        assert getattr(two, name) == getattr(one, name) // (2 if name in divided else 1)
    assert (two.flops, two.decoded) == (one.flops, one.decoded)
    is_divided = "weights" in divided
    in_pass = sum(gathered_bytes(model, None) for model in (tiny_policy(), tiny_scorer(intermediate_size=48)))
    own = two.learning - is_divided * in_pass
    assert 1.7 * one.learning < own < 2 * one.learning  # one device learns with one model after the other
    gathered = is_divided * sum(p.numel() * 4 for p in tiny_policy().parameters())
    assert two.generation == one.generation + gathered
    printed = capsys.readouterr().out
    assert "on 2 devices, DeepSpeed ZeRO-" in printed and len(re.findall(r"│ +2 +│", printed)) == len(divided)
    assert "8 episodes of 5 + 4 tokens" in printed and "All 3 updates, 24 episodes" in printed


def test_the_memory_of_a_device_gives_the_largest_micro_batch(capsys: Any) -> None:
    """Also on a single device, which sends nothing."""
    found = estimate(*WITH_MODEL, "--device_memory", "1e9")
    assert found.communication.total == 0
    printed = capsys.readouterr().out
    assert f"The largest micro-batch that fits into 954 MiB has {found.rows_per_step} rows; it has " in printed
    estimate(*WITH_MODEL, "--device_memory", "1e4")
    assert "No micro-batch fits into 9.77 KiB, not even one of a single row." in capsys.readouterr().out


def test_times_come_from_the_given_rates_and_the_number_of_updates(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("rlhf_ppo.cli.estimate.measure_rates", lambda *_: (1e6, 1e5))
    found = estimate(*WITH_MODEL, "--num_train_epochs", "2")
    seconds = found.flops / 4e6 + found.decoded / 3e5
    printed = capsys.readouterr().out
    assert f"{seconds:.2g} s at 4 MFLOP/s and 300 kB/s. Not counted in time: the fixed cost of each call" in printed
    assert "All 18 updates, 72 episodes" in printed  # of 40 rows, 4 are kept for evaluation
    main.main(["estimate", *OPTIONS, *WITH_MODEL, "--device_flops", "4e6"])
    assert "at 4 MFLOP/s and 100 kB/s" in capsys.readouterr().out


def test_no_data_is_read_where_length_and_number_are_given(capsys: Any) -> None:
    Path("texts.jsonl").unlink()
    seven, nine = (
        estimate(*WITH_MODEL, "--max_prompt_length", number, "--total_episodes", "10") for number in ("7", "9")
    )
    logits = 4 * 4 * 32
    assert (seven.generation - logits) / (nine.generation - logits) == (7 + 4) / (9 + 4)
    assert "of 7 + 4 tokens" in (printed := capsys.readouterr().out) and "All 3 updates, 12 episodes" in printed
