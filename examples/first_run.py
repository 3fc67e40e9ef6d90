"""Teach an untrained language model of 28 characters to alternate vowels and consonants."""

from itertools import pairwise

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from rlhf_ppo import PPOConfig, PPOTrainer

set_seed(0)
letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate("_.abcdefghijklmnopqrstuvwxyz")}, "_"))
letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="_", eos_token=".")
model = LlamaForCausalLM(
    LlamaConfig(vocab_size=28, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
)


def takes_turns(completions, **kwargs):
    return [sum((a in "aeiou") != (b in "aeiou") for a, b in pairwise(text)) / 11 for text in completions]


args = PPOConfig("runs/first", total_episodes=1280, per_device_train_batch_size=32, logging_steps=1, use_cpu=True)
args.response_length, args.temperature, args.learning_rate, args.kl_coef = 12, 1.0, 3e-3, 0.01
prompts = [{"prompt": letter} for letter in 2 * "bcdfghjklmnpqrstvwxyz"]
trainer = PPOTrainer(args, tokenizer, model, reward_funcs=takes_turns, train_dataset=prompts)
trainer.train()
trainer.save_model()
