"""Chat models made on the spot with the templates that TRL ships, an engine that plays a script, and both trainers."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rlhf_ppo import PPOConfig, PPOTrainer
from rlhf_ppo.generation.protocol import Sampled
from tests.runs import train_and_record

ENDS: dict[str, tuple[str, ...]] = {
    "qwen3": ("<|im_end|>",),
    "qwen2_5": ("<|im_end|>",),
    "qwen3_instruct_2507": ("<|im_end|>",),
    "llama3_1": ("<|eot_id|>",),
    "glm4moe": ("<|endoftext|>", "<|observation|>", "<|user|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|end|>"),
    "gemma3": ("<eos>", "<end_of_turn>"),
    "phi3_5": ("<|endoftext|>", "<|end|>"),
}
"""Tokens that end a turn in the format of a template, EOS first."""
CALLING = [name for name in ENDS if name not in ("gemma3", "phi3_5")]
"""The templates that show tools."""


def chat_tokenizer(name: str = "qwen3") -> PreTrainedTokenizerFast:
    """Make a byte-level tokenizer with a template of TRL, whose markers are special tokens."""
    import trl

    template = Path(trl.__file__).parent.joinpath("chat_templates", f"{name}.jinja").read_text()
    markers = re.findall(
        r"<\|[a-zA-Z_]+\|>|</?(?:tool_call|tool_response|think|arg_key|arg_value|start_of_turn)>|\[gMASK\]|<sop>",
        template,
    )
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    special = list(dict.fromkeys(["<|pad|>", *ENDS[name], *markers]))
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special), special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator([], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=ENDS[name][0], pad_token="<|pad|>")
    tokenizer.chat_template, tokenizer.padding_side = template, "left"
    return tokenizer


def chat_model(tokenizer: Any, name: str = "qwen3", seed: int = 0) -> Qwen3ForCausalLM:
    """Make a tiny model for a tokenizer; its generation config names all tokens that end a turn."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **ends))
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids(list(ENDS[name]))
    return model


def turn_text(tokenizer: Any, name: str, *calls: tuple[str, Any], content: str = "") -> str:
    """Write a turn as a model of that template would: calls, or words."""
    asked = [{"role": "user", "content": "Q"}]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": called, "arguments": arguments}} for called, arguments in calls
        ]
    opening = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*asked, message], tokenize=False)
    start = len(opening) if whole.startswith(opening) else whole.index("Q") + len(opening) - opening.index("Q")
    turn = whole[start:].rstrip("\n")
    return turn if turn.endswith(ENDS[name]) else turn + ENDS[name][min(1, len(ENDS[name]) - 1) if calls else 0]


Script = Callable[[str, int], str]
"""Takes the text of the whole context and the number of the call, and returns the next turn."""


def scripted(
    tokenizer: Any, script: Sequence[str] | Script, contexts: Sequence[Sequence[int]], number: int
) -> list[Any]:
    """Return the script's next turn behind each context, as token ids."""
    texts = [script(tokenizer.decode(ids), number) if callable(script) else _next(script, number) for ids in contexts]
    return [tokenizer(text)["input_ids"] for text in texts]


def _next(script: Sequence[str], number: int) -> str:
    return script[min(number, len(script) - 1)]


class ScriptedEngine:
    """A generation engine that plays a script, from its beginning in each rollout."""

    reads_sharded = False

    def __init__(self, tokenizer: Any, script: Sequence[str] | Script) -> None:
        self.tokenizer, self.script, self.number, self.asked = tokenizer, script, 0, list[Any]()

    def sample(self, policy: Any, prompts: Any, config: Any) -> Sampled:
        rows = [ids[real].tolist() for ids, real in zip(prompts.input_ids, prompts.attention_mask, strict=True)]
        turns = [ids[: config.max_new_tokens] for ids in scripted(self.tokenizer, self.script, rows, self.number)]
        self.asked.append((rows, config.max_new_tokens))
        self.number += 1
        lengths = torch.tensor([len(ids) for ids in turns])
        width = int(lengths.max())
        padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in turns])
        return Sampled(padded, None, lengths)

    def policy_changed(self) -> None:
        self.number = 0


class Seen:
    """What a run has shown: what reward functions got, and the episodes' tokens and masks."""

    def __init__(self) -> None:
        self.rewarded: list[dict[str, Any]] = []
        self.rows: list[tuple[list[int], list[int], list[bool]]] = []
        self.metrics: dict[str, float] = {}

    def reward(self, prompts: Any, completions: Any, completion_ids: Any, **others: Any) -> list[float]:
        given = {"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **others}
        self.rewarded.append(json.loads(json.dumps(given, default=lambda value: type(value).__name__)))
        return [1.0] * len(prompts)


def ppo_config(directory: Any, **options: Any) -> PPOConfig:
    """Make the arguments of a run of few tokens."""
    usual: dict[str, Any] = {
        **{"per_device_train_batch_size": 2, "num_generations": 2, "response_length": 600, "stop_token": "eos"},
        **{"use_cpu": True, "report_to": "none", "num_sample_generations": 0, "save_strategy": "no"},
        **{"logging_steps": 1, "max_steps": 1, "num_ppo_epochs": 1, "log_console": "none", "disable_tqdm": True},
        **{"gradient_checkpointing": False, "overwrite_output_dir": True, "temperature": 1.0},
    }
    return PPOConfig(str(directory), **(usual | options))


def run_ours(directory: Any, name: str, script: Any, options: dict[str, Any] | None = None, **given: Any) -> Seen:
    """Train with `PPOTrainer` and a script."""
    tokenizer, seen = chat_tokenizer(name), Seen()
    if "reward_funcs" not in given:
        given["reward_funcs"] = [seen.reward]
    trainer = PPOTrainer(
        ppo_config(directory, **(options or {})),
        tokenizer,
        chat_model(tokenizer, name),
        engine=ScriptedEngine(tokenizer, script),
        **given,
    )
    rollouts = train_and_record(trainer)
    for responses in (rollout.responses for rollout in rollouts):
        context = responses.context_length
        prompts, masks = responses.query_responses[:, :context], responses.attention_mask[:, :context]
        for row, behind in enumerate(responses.episode_mask):
            ids, written = responses.response_ids[row][behind].tolist(), responses.response_mask[row][behind].tolist()
            seen.rows.append((prompts[row][masks[row]].tolist(), ids, written))
    seen.metrics = next(log for log in trainer.state.log_history if "objective/kl" in log)
    return seen


def run_trl(directory: Any, name: str, script: Any, options: dict[str, Any] | None = None, **given: Any) -> Seen:
    """Train with TRL's `GRPOTrainer` and a script."""
    from trl import GRPOConfig, GRPOTrainer

    tokenizer, seen, number = chat_tokenizer(name), Seen(), [0]
    usual: dict[str, Any] = {
        **{"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 600, "max_steps": 1},
        **{"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "disable_tqdm": True},
        **{"logging_steps": 1, "gradient_checkpointing": False},
    }
    options = {("max_completion_length" if key == "response_length" else key): v for key, v in (options or {}).items()}
    if "reward_funcs" not in given:
        given["reward_funcs"] = [seen.reward]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer: Any = GRPOTrainer(
            chat_model(tokenizer, name),
            args=GRPOConfig(str(directory), **(usual | options)),
            processing_class=tokenizer,
            **given,
        )

        def turn(prompt_ids: Any, *_: Any, **__: Any) -> Any:
            turns = scripted(tokenizer, script, prompt_ids, number[0])
            number[0] += 1
            return [ids[: trainer.max_completion_length] for ids in turns], None

        generate = trainer._generate

        def keep(prompts: Any) -> Any:
            number[0] = 0
            result = generate(prompts)
            mask = result[2] or [[1] * len(ids) for ids in result[1]]
            for before, ids, written in zip(result[0], result[1], mask, strict=True):
                seen.rows.append((list(before), list(ids), [bool(value) for value in written]))
            return result

        trainer._generate_single_turn, trainer._generate = turn, keep
        trainer.train()
    seen.metrics = next(log for log in trainer.state.log_history if "completions/mean_length" in log)
    return seen
