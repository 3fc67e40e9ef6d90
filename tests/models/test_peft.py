"""LoRA policies: what trains, what the reference is, what is saved, and that a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from transformers import AutoModelForCausalLM

from rlhf_ppo.models import adapters
from rlhf_ppo.models.adapters import EXACT_KINDS, INEXACT_OPTIONS
from rlhf_ppo.models.loading import make_value_model, without_adapters
from rlhf_ppo.models.unwrapping import backbone
from tests.conftest import tiny_policy, tiny_scorer
from tests.models.test_logprobs import ragged_batch
from tests.runs import QUICK, MakeTrainer, die_and_resume, parameters

peft = pytest.importorskip("peft")

IDS = torch.arange(3, 15)[None]


def lora(**overrides: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], **overrides})


def trained_adapter(policy: nn.Module | None = None, name: str = "default", seed: int = 5) -> Any:
    """A PeftModel whose adapter changes the base clearly, as one does that SFT has trained."""
    torch.manual_seed(seed)
    return peft.get_peft_model(policy or tiny_policy(), lora(init_lora_weights=False), adapter_name=name)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def changed(before: dict[str, Tensor], model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if not torch.equal(before[name], value)}


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def first(trainer: Any, metric: str) -> float:
    return next(entry[metric] for entry in trainer.state.log_history if metric in entry)


def test_a_new_adapter_follows_the_seed_whatever_was_drawn_before(make_trainer: MakeTrainer) -> None:
    drawn = []
    for seed, before in ((0, 1), (0, 2), (1, 1)):
        torch.manual_seed(before)
        policy = make_trainer(**QUICK, seed=seed, peft_config=lora()).policy_model
        drawn.append(torch.cat([value.flatten() for name, value in weights(policy).items() if "lora_A" in name]))

    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("modules", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head"]])
@pytest.mark.parametrize("option", ["target_modules", "modules_to_save"])
def test_an_adapter_of_tied_embeddings_is_merged_into_two_matrices(option: str, modules: list[str], tmp_path: Path):
    config = lora(init_lora_weights=False, **{option: modules})
    torch.manual_seed(5)
    policy: Any = peft.get_peft_model(tiny_policy(tie_word_embeddings=True), config)
    for weight in policy.parameters():
        weight.data += 0.1 * torch.randn_like(weight) * weight.requires_grad
    expected, states = logits(policy), backbone(policy)(IDS)[0]
    torch.testing.assert_close(backbone(make_value_model(policy).eval())(IDS)[0], states, rtol=1e-4, atol=1e-5)

    merged: Any = without_adapters(policy)
    merged.save_pretrained(tmp_path)

    for model in (merged, AutoModelForCausalLM.from_pretrained(tmp_path)):
        torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)


# ---- An adapter that is already trained ----


def save_adapter(folder: Path) -> Any:
    """Write a base and a trained adapter over it; return the PeftModel."""
    tiny_policy().save_pretrained(folder / "base")
    policy = trained_adapter(AutoModelForCausalLM.from_pretrained(folder / "base"))
    policy.save_pretrained(folder / "adapter")
    return policy


@pytest.mark.parametrize("given", ["directory", "loaded for inference"])
def test_a_saved_adapter_is_trained_further(given: str, make_trainer: MakeTrainer, tmp_path: Path):
    start, adapter = logits(save_adapter(tmp_path)), tmp_path / "adapter"
    model = str(adapter) if given == "directory" else peft.PeftModel.from_pretrained(tiny_policy(), adapter)
    trainer = make_trainer(model=model, **QUICK)
    before = weights(trainer.policy_model)
    assert torch.equal(logits(trainer.policy_model), start)

    trainer.train()

    assert first(trainer, "objective/kl") == 0.0
    moved = changed(before, trainer.policy_model)
    assert moved and all(".lora_" in name and ".default." in name for name in moved)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
        {"trainable_token_indices": [3, 33]},
    ],
    ids=["plain", "saved modules", "on embeddings", "tokens"],
)
@pytest.mark.parametrize("is_tied", [False, True], ids=["two matrices", "tied"])
def test_an_adapter_over_a_vocabulary_that_has_grown_is_trained_further(
    make_trained: MakeTrainer, make_trainer: MakeTrainer, tmp_path: Path, options: dict[str, Any], is_tied: bool
):
    """The base's directory has fewer tokens; PEFT saves the embeddings with the adapter."""
    tiny_policy(tie_word_embeddings=is_tied).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    base.resize_token_embeddings(36)
    config, run = lora(task_type="CAUSAL_LM", **options), QUICK | {"learning_rate": 0.01, "value_model": None}
    trained = make_trained(model=base, peft_config=config, **run)
    trained.save_model(str(tmp_path / "adapter"))
    for value_model in (None, str(tmp_path / "adapter")):
        again = make_trainer(model=str(tmp_path / "adapter"), **run | {"value_model": value_model})
        assert torch.equal(logits(again.policy_model), logits(trained.policy_model))
        assert again.value_model.get_input_embeddings().num_embeddings == 36


def two_adapters() -> Any:
    """A base with the adapters "sft" and "policy", two different ones."""
    policy = trained_adapter(name="sft", seed=5)
    torch.manual_seed(6)
    policy.add_adapter("policy", lora(init_lora_weights=False))
    return policy


FROZEN = "layers.0.self_attn.q_proj.lora_A"


def frozen_in_part(policy: Any) -> Any:
    """Freeze a tensor of each adapter."""
    for name, weight in policy.named_parameters():
        weight.requires_grad_(weight.requires_grad and FROZEN not in name)
    return policy


@pytest.mark.parametrize(
    "policy",
    [
        lambda: {"model": frozen_in_part(trained_adapter()), "kl_coef": 0.0},
        lambda: {"model": frozen_in_part(trained_adapter())},
        lambda: {"model": frozen_in_part(two_adapters()), "model_adapter_name": "sft", "ref_adapter_name": "policy"},
        lambda: {"model": frozen_in_part(trained_adapter()), "share_base_model": True, "value_model": None},
        lambda: {"model": frozen_in_part(trained_adapter()), "value_model": "policy"},
    ],
    ids=["no reference", "reference", "named adapters", "one base", "one body"],
)
def test_what_the_user_froze_stays(make_trainer: MakeTrainer, tmp_path: Path, policy: Any):
    def arguments() -> Any:
        torch.manual_seed(11)
        return policy()

    start = arguments()["model"]
    before, trained = weights(start), {name for name, value in start.named_parameters() if value.requires_grad}
    for trainer in die_and_resume(make_trainer, tmp_path, arguments):
        model = trainer.policy_model
        assert {name for name in before if not torch.equal(before[name], model.get_parameter(name))} == trained
        held = {id(weight) for group in trainer.optimizer.param_groups for weight in group["params"]}
        assert {name for name, weight in model.named_parameters() if id(weight) in held} == trained


# ---- A value model with an adapter ----


def test_of_the_value_model_only_adapter_and_head_train(make_trainer: MakeTrainer):
    trainer = make_trainer(value_peft_config=lora(), **QUICK)
    before = weights(trainer.value_model)

    trainer.train()

    moved = changed(before, trainer.value_model)
    assert moved == {name for name in before if ".lora_" in name or "modules_to_save" in name}
    assert len(moved) == 9 and any(name.endswith("score.modules_to_save.default.weight") for name in moved)


# ---- Saving and resuming ----


@pytest.mark.parametrize("model", [trained_adapter, lambda: trained_adapter(name="mine")], ids=["default", "named"])
def test_weights_that_a_backend_has_gathered_are_all_saved(model: Any, tmp_path: Path):
    """FSDP wraps layers that recompute activations: the names of modules are not those of the gathered weights."""
    policy = model()
    gathered = policy.state_dict()
    adapters.save_adapter(policy, str(tmp_path / "plain"))
    layers = policy.get_base_model().model.layers
    for index, layer in enumerate(layers):
        layers[index] = offload_wrapper(checkpoint_wrapper(layer))
    modules = [*policy.modules()]

    adapters.save_adapter(policy, str(tmp_path / "wrapped"), gathered)

    plain, wrapped = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "wrapped"))
    assert len(plain) == 8 and wrapped.keys() == plain.keys()
    assert all(torch.equal(wrapped[name], value) for name, value in plain.items())
    assert [*policy.modules()] == modules


@pytest.mark.parametrize("argument", ["peft_config", "value_peft_config"])
def test_an_adapter_that_is_not_saved_removes_no_earlier_model(
    argument: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    trainer = make_trainer(**QUICK, **{argument: lora()}, save_critic=True)
    trainer._save(str(tmp_path), trainer.model.state_dict())
    saved = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    others = {name.replace(".layers.1.", ".blocks.1."): value for name, value in trainer.model.state_dict().items()}

    with pytest.raises(RuntimeError, match=r"PEFT does not find the trained base_model\S*\.layers\.1\.self_attn"):
        trainer._save(str(tmp_path), others)

    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == saved


def test_resuming_equals_a_run_that_was_never_stopped(make_trainer: MakeTrainer, tmp_path: Path):
    def arguments() -> Any:
        torch.manual_seed(11)
        return {"peft_config": lora(init_lora_weights=False, modules_to_save=["lm_head"]), "value_peft_config": lora()}

    die_and_resume(make_trainer, tmp_path, arguments)


@pytest.mark.parametrize(
    ("start", "later", "difference"),
    [
        ({"peft_config": lora()}, {"peft_config": lora(lora_alpha=32)}, r"model: lora_alpha=8, now 32"),
        ({"peft_config": lora()}, {"peft_config": lora(use_rslora=True)}, "model: use_rslora=False, now True"),
        (
            {"peft_config": lora()},
            {"peft_config": lora(target_modules=["o_proj", "q_proj"])},
            r"model: target_modules=\['q_proj', 'v_proj'\], now \['o_proj', 'q_proj'\]",
        ),
        (
            {"value_peft_config": lora()},
            {"value_peft_config": lora(layers_to_transform=[1])},
            r"value_model: layers_to_transform=None, now \[1\]",
        ),
        ({"peft_config": lora()}, {"model": lambda: tiny_policy(num_hidden_layers=1)}, r"layers\.1\..*lora_A"),
        ({"peft_config": lora()}, {"model": lambda: tiny_policy(num_hidden_layers=3)}, r"layers\.2\..*lora_A"),
    ],
)
def test_a_checkpoint_of_another_adapter_is_refused(
    make_trainer: MakeTrainer, start: dict[str, Any], later: dict[str, Any], difference: str
) -> None:
    saving = {**QUICK, "save_strategy": "steps", "save_steps": 1}
    make_trainer(**saving | {"total_episodes": 2} | start).train()
    trainer = make_trainer(
        **saving | {name: value() if name == "model" else value for name, value in (start | later).items()}
    )

    with pytest.raises(
        ValueError, match=rf"the checkpoint is of another model, which differs in \[.*{difference}.*pass"
    ):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_is_resumed_with_settings_that_change_no_output(make_trainer: MakeTrainer) -> None:
    saving = {**QUICK, "save_strategy": "steps", "save_steps": 1}
    make_trainer(**saving | {"total_episodes": 2}, peft_config=lora()).train()
    trainer = make_trainer(**saving, peft_config=lora(lora_dropout=0.5, target_modules={"v_proj", "q_proj"}))
    trainer.train(resume_from_checkpoint=True)

    assert trainer._initial_global_step == 1


def test_each_trainer_of_a_model_compares_with_the_adapter_as_it_was_at_its_start(
    make_trained: MakeTrainer, tmp_path: Path
) -> None:
    policy = trained_adapter()
    for number in range(2):
        start = logits(policy)
        trainer = make_trained(model=policy, learning_rate=0.01, output_dir=str(tmp_path / str(number)), **QUICK)
        assert first(trainer, "objective/kl") == 0.0 and not torch.equal(logits(policy), start)
        with trainer.reference.generating(trainer.model, trainer.policy_model) as reference:
            assert torch.equal(logits(reference.policy), start)


# ---- What cannot work ----

VALUE_ADAPTER: dict[str, Any] = {"value_model": None, "value_peft_config": lora()}


def adapted_scorer() -> Any:
    return peft.get_peft_model(tiny_scorer(), lora(task_type="SEQ_CLS"))


PISSA = lora(init_lora_weights="pissa")


def with_trained_norm() -> Any:
    policy = trained_adapter()
    policy.get_base_model().model.norm.requires_grad_(True)
    return policy


def with_scorers_adapter(active: str) -> Any:
    """A policy with its own adapter, "default", and one of a reward model, "scorer"."""
    policy = trained_adapter()
    policy.add_adapter("scorer", lora(task_type="SEQ_CLS"))
    policy.set_adapter(active)
    return policy


def both_active() -> Any:
    policy = two_adapters()
    policy.base_model.set_adapter(["sft", "policy"])
    return policy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda: {"model": trained_adapter(), "model_adapter_name": "other"}, "'other' is not an adapter"),
        (lambda: {"ref_adapter_name": "sft"}, "'sft' is not an adapter"),
        (
            lambda: {"model": with_scorers_adapter("scorer")},
            r"model has an adapter of a reward model \(task_type SEQ_",
        ),
        (
            lambda: {"model": with_scorers_adapter("default"), "model_adapter_name": "scorer"},
            "model has an adapter of a reward model",
        ),
        (
            lambda: {"model": with_scorers_adapter("default"), "ref_adapter_name": "scorer"},
            "ref_adapter_name='scorer' is an adapter of a reward model .*, and an SFT model as ref_model",
        ),
        (lambda: {"peft_config": lora(init_lora_weights="pissa")}, "pass ref_model"),
        (lambda: {"model": tiny_policy(attention_bias=True), "peft_config": lora(bias="all")}, "pass ref_model"),
        (lambda: {"model": tiny_policy().requires_grad_(False)}, "model has no trainable parameter"),
        (
            lambda: {"model": trained_adapter(), "peft_config": lora()},
            r"^model starts from an adapter.* merge_and_unl",
        ),
        (lambda: {"model": trained_adapter(), **VALUE_ADAPTER}, "value_model starts from an adapter"),
        (lambda: {"reward_model": adapted_scorer(), **VALUE_ADAPTER}, "value_model starts from an adapter"),
        (lambda: {"model": with_trained_norm()}, r"model trains .*\.norm\.weight, which PEFT does not save"),
        (lambda: {"model": both_active()}, "model_adapter_name=None does not name one of the active"),
        (
            lambda: {"model": trained_adapter(), "share_base_model": True, "value_peft_config": PISSA},
            "value_peft_config has init_lora_weights='pissa'",
        ),
    ],
)
def test_what_cannot_work(make_trainer: MakeTrainer, arguments: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make_trainer(**arguments())


def test_a_policy_may_hold_a_reward_models_adapter_beside_its_own(make_trainer: MakeTrainer) -> None:
    policy = with_scorers_adapter("scorer")
    trainer = make_trainer(model=policy, model_adapter_name="default", **QUICK)
    assert trainer.policy_model.active_adapter == "default"


@pytest.mark.parametrize(
    ("argument", "model", "more"),
    [
        ("model", tiny_policy, {}),
        ("model", tiny_policy, {"peft_config": lora()}),
        ("model", tiny_policy, {"peft_config": lora(target_modules=["o_proj"]), "share_base_model": True}),
        ("ref_model", tiny_policy, {}),
        ("value_model", tiny_scorer, {}),
        ("reward_model", tiny_scorer, {}),
    ],
)
def test_a_model_with_the_adapter_layers_of_an_earlier_trainer_is_refused(
    make_trainer: MakeTrainer, argument: str, model: Any, more: dict[str, Any]
):
    """PEFT puts its layers into the model: the policy would be saved with names of weights that no one can load."""
    used = model()
    peft.get_peft_model(used, lora())

    with pytest.raises(
        ValueError, match=f"^{argument} is a Llama.* of an earlier trainer .*: pass that trainer's Peft"
    ):
        make_trainer(**{argument: used}, **more)


def test_an_adapter_that_transformers_has_loaded_is_refused(make_trainer: MakeTrainer, tmp_path: Path):
    """Such a model is not a PeftModel: nothing of it would train, and the reference could not be told from it."""
    save_adapter(tmp_path)

    with pytest.raises(ValueError, match=r"model holds an adapter.*is_trainable=True"):
        make_trainer(model=AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"))


# ---- Every kind of adapter that PEFT has ----

LAYERS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
NEEDED: dict[str, dict[str, Any]] = {
    "ADALORA": {**LAYERS, "total_step": 10, "init_r": 4, "target_r": 2},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2, "task_type": "CAUSAL_LM"},
    "BOFT": {**LAYERS, "boft_block_size": 4},
    "C3A": {**LAYERS, "block_size": 8},
    "FOURIERFT": {**LAYERS, "n_frequency": 20},
    "IA3": {"target_modules": ["q_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
    "MISS": {**LAYERS, "r": 4},
    "OFT": {**LAYERS, "r": 0, "oft_block_size": 4},
    "PSOFT": {**LAYERS, "r": 4},
    "ROAD": {**LAYERS, "group_size": 8},
    "SHIRA": {**LAYERS, "r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 4, 5], "target_modules": ["embed_tokens"]},
    "VBLORA": {**LAYERS, "r": 4, "vector_length": 16, "num_vectors": 10},
    "WAVEFT": {**LAYERS, "n_frequency": 20},
}
"""Options without which a kind does not fit the tiny model."""


def of_peft(name: str, **options: Any) -> Any:
    """A part of LoRA's configuration; None where the installed PEFT does not have it."""
    part = getattr(peft.tuners.lora.config, name, None)
    return part and part(**options)


LORAS: dict[str, dict[str, Any]] = {
    "bias": {"bias": "all"},
    "bias of the layers": {"bias": "lora_only"},
    "block diagonal": {
        "use_bdlora": of_peft(
            "BdLoraConfig", nblocks=2, target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"]
        )
    },
    "dora": {"use_dora": True, "target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "dropout": {"lora_dropout": 0.5},
    "embeddings and head": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "eva": {"init_lora_weights": "eva", "eva_config": of_peft("EvaConfig")},
    "gradients": {"init_lora_weights": "lora_ga", "lora_ga_config": of_peft("LoraGAConfig")},
    "kasa": {"kasa_config": of_peft("KasaConfig")},
    "layer twice": {"layer_replication": [[0, 2], [0, 2]]},
    "layers": {"layers_to_transform": [1], "layers_pattern": "layers", "exclude_modules": ["k_proj"]},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "lm_head"]},
    "mica": {"init_lora_weights": "mica"},
    "modules_to_save": {"modules_to_save": ["embed_tokens", "norm", "lm_head"]},
    "parameters": {"target_parameters": ["mlp.down_proj.weight"]},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 3}, "use_rslora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "tokens": {"trainable_token_indices": [3, 4, 5]},
    "velora": {"velora_config": of_peft("VeloraConfig", num_groups=4)},
}
NOT_RUN = {"corda_config", "loftq_config", "fan_in_fan_out", "megatron_config", "megatron_core", "runtime_config"}
NOT_RUN |= {"qalora_group_size"}
"""First weights that need data or a quantizer, layers that no model here has, and the place of the computation."""


def adapter_of(kind: str, **options: Any) -> Any:
    return peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(kind)](**NEEDED.get(kind, LAYERS) | options)


def perturb(model: nn.Module, seed: int) -> Any:
    """Move all trained weights, so that the adapter does something."""
    torch.manual_seed(seed)
    for weight in model.parameters():
        weight.data += weight.requires_grad * 0.05 * torch.randn_like(weight)
    return model


@torch.no_grad()
def rows_alone(policy: nn.Module, critic: Any, ids: Tensor, real: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and values of the responses, by the models' own forward passes over each row alone."""
    logprobs, values = torch.zeros(2, *new.shape)
    for at, place in new.nonzero().tolist():
        row = ids[at, real[at]]
        start = len(row) - int(new[at].sum()) + place
        before, token = {"input_ids": row[None, :start], "use_cache": False}, row[start]
        logprobs[at, place] = policy.eval()(**before).logits[0, -1].log_softmax(-1)[token]
        values[at, place] = critic.eval()(**before).logits[0, 0]
    return logprobs, values


CASES = [(kind, {}) for kind in sorted(EXACT_KINDS)] + [("LORA", {"r": 4, **options}) for options in LORAS.values()]


@pytest.mark.parametrize(("kind", "options"), CASES, ids=[*sorted(EXACT_KINDS), *LORAS])
def test_each_kind_trains_and_is_what_peft_computes_of_a_row_alone(
    make_trainer: MakeTrainer, kind: str, options: dict[str, Any]
):
    fields = getattr(peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING.get(kind), "__dataclass_fields__", {})
    if not options.keys() <= fields.keys() or None in options.values() or not fields:
        pytest.skip("the installed PEFT has no such adapter")
    base = {"attention_bias": True} if "bias" in options else {}

    def model() -> Any:
        torch.manual_seed(1)
        return perturb(peft.get_peft_model(tiny_policy(**base), adapter_of(kind, **options)), seed=2)

    critic = {"value_peft_config": adapter_of(kind, **options)} if "modules_to_save" in fields else {}
    trainer = make_trainer(
        model=model(), train_dataset=[{"input_ids": [3, 4, 5, 9]}] * 2, **critic, **QUICK | {"total_episodes": 2},
        value_model=tiny_scorer(seed=2, **base), kl_coef=0.1, temperature=1.0, learning_rate=0.01, weight_decay=0.0,
    )  # fmt: skip
    both: Any = perturb(trainer.model, seed=3)
    batch = ragged_batch(3)
    batch[0].remainder_(6).add_(3)  # no PAD, which ends a text for a classifier
    expected, values = rows_alone(trainer.policy_model, trainer.value_model, *batch)
    start, _ = rows_alone(model(), trainer.value_model, *batch)

    def check_reference() -> None:
        with torch.no_grad(), trainer.reference.forward(both, trainer.policy_model) as forward:
            torch.testing.assert_close(forward(*batch)[0], start, atol=1e-5, rtol=0)

    for learning in (False, True):
        with torch.set_grad_enabled(learning):
            output = both.train(learning)(*batch)
        torch.testing.assert_close(output.logprobs, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(output.values, values, atol=1e-5, rtol=0)
    assert float((start - expected).abs().max()) > 1e-3
    check_reference()

    before = parameters(trainer)
    trained = {name for name, weight in both.named_parameters(remove_duplicate=False) if weight.requires_grad}
    trainer.train()

    assert {name for name, value in parameters(trainer).items() if not torch.equal(before[name], value)} == trained
    assert sum(name.startswith("policy.") for name in trained)
    check_reference()


@pytest.mark.parametrize("kind", sorted({kind.value for kind in peft.PeftType} - EXACT_KINDS))
def test_a_kind_that_was_not_seen_to_be_exact_is_refused(make_trainer: MakeTrainer, kind: str):
    config = lora()
    config.peft_type = peft.PeftType(kind)

    with pytest.raises(ValueError, match=f"^peft_config is of the kind {kind}, .*: use LoRA"):
        make_trainer(peft_config=config)


def alora(model: nn.Module | None = None, **options: Any) -> Any:
    config = lora(alora_invocation_tokens=[9, 4], **options)
    return config if model is None else peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("peft_config", alora),
        ("value_peft_config", alora),
        ("model", lambda: alora(tiny_policy())),
        ("ref_model", lambda: alora(tiny_policy())),
        ("value_model", lambda: alora(tiny_scorer(), task_type="SEQ_CLS")),
        ("reward_model", lambda: alora(tiny_scorer(), task_type="SEQ_CLS")),
    ],
)
def test_what_acts_in_the_forward_of_peft_is_refused(make_trainer: MakeTrainer, argument: str, value: Any):
    with pytest.raises(
        ValueError, match=rf"^{argument} (is|has an adapter) of the kind LORA with alora_invocation_tok"
    ):
        make_trainer(**{argument: value()})


def test_each_option_of_lora_is_shown_or_refused():
    shown = {name for options in LORAS.values() for name in options} | set(INEXACT_OPTIONS) | NOT_RUN
    plain = {"r", "lora_alpha", "target_modules", *peft.PeftConfig.__dataclass_fields__}
    assert set(peft.LoraConfig.__dataclass_fields__) <= shown | plain
