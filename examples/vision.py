"""Teach a vision-language model to look: which color has the first, second, third or fourth shape.

python examples/vision.py  # nothing is downloaded
accelerate launch examples/vision.py --model_name_or_path Qwen/Qwen3-VL-2B-Instruct --dtype bfloat16 --use_peft \
    --lora_target_modules all-linear --share_base_model --learning_rate 1e-4 --output_dir runs/qwen

The reward is 1 for the right word. A shape and a wording are held out. Without a model, the script makes a LLaVA of
0.2M parameters, and trains it on captions and some hundred answers. It prints the accuracy on held-out rows, and on
the same questions with the images of other rows, where a model that looks falls to chance.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false

import random

import transformers
from datasets import Dataset
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from rlhf_ppo import PPOConfig, PPOTrainer

COLORS = {"red": "#e02020", "green": "#10a030", "blue": "#2040f0", "yellow": "#f0d010"}
SHAPES = [  # corners; the last shape, a cross, and the last wording are held out
    [(-1, -1), (1, -1), (1, 1), (-1, 1)], [(0, -1), (1, 0), (0, 1), (-1, 0)], [(0, -1), (1, 1), (-1, 1)],
    [(-1, -0.4), (-0.4, -0.4), (-0.4, -1), (0.4, -1), (0.4, -0.4), (1, -0.4),
     (1, 0.4), (0.4, 0.4), (0.4, 1), (-0.4, 1), (-0.4, 0.4), (-1, 0.4)],
]  # fmt: skip
SIZE, PLACES = 32, ["first", "second", "third", "fourth"]
WORDINGS = ["what color is the {} shape ?", "name the color of the {} shape .", "which color has the {} shape ?"]
TEMPLATE = """{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}{%
if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %} </s> {% endfor %}{%
if add_generation_prompt %}assistant{% endif %}"""


def drawn(shapes, colors, dice):
    image, cell = Image.new("RGB", (SIZE, SIZE), "white"), SIZE // 2
    for place, (corners, color) in enumerate(zip(shapes, colors, strict=True)):
        half = dice.randint(cell // 2 - 3, cell // 2 - 1)
        x, y = (start * cell + dice.randint(half, cell - 1 - half) for start in (place % 2, place // 2))
        ImageDraw.Draw(image).polygon([(x + half * right, y + half * down) for right, down in corners], COLORS[color])
    return image


def row(is_held_out, dice):
    shapes, colors = dice.choices(SHAPES[3:] if is_held_out else SHAPES[:3], k=4), dice.choices([*COLORS], k=4)
    place, wording = dice.randrange(4), WORDINGS[-1] if is_held_out else dice.choice(WORDINGS[:-1])
    prompt = [{"role": "user", "content": f"{wording.format(PLACES[place])} answer in one word ."}]
    told = {"answer": colors[place], "colors": " ".join(colors), "shown": "own"}
    return {"prompt": prompt, "images": [drawn(shapes, colors, dice)], **told}


def correct(completions, answer, shown, log_extra, **_):
    log_extra("image", shown)
    said = [completion[-1]["content"].strip(" .\n").lower() for completion in completions]
    return [float(word == right) for word, right in zip(said, answer, strict=True)]


def make_policy(rows, seed, steps=45):
    texts = [*WORDINGS, *PLACES, *COLORS, "name all colors . user assistant answer in one word ."]
    words = ["<pad>", "</s>", "<image>", *dict.fromkeys(" ".join(texts).split())]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"pad_token": "<pad>", "eos_token": "</s>", "extra_special_tokens": {"image_token": "<image>"}}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core, **named)
    pixels = transformers.CLIPImageProcessor(do_resize=False, do_center_crop=False)
    patches = {"patch_size": 8, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    processor = transformers.LlavaProcessor(pixels, tokenizer, chat_template=TEMPLATE, **patches)
    transformers.set_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tower = {"model_type": "clip_vision_model", "image_size": SIZE, "patch_size": 8, "initializer_range": 0.1}
    text = {"model_type": "qwen2", "vocab_size": len(words), "num_key_value_heads": 4, "initializer_range": 0.1}
    parts = {"text_config": {**text, **sizes, "eos_token_id": 1}, "vision_config": tower | sizes}
    config = transformers.LlavaConfig(**parts, vision_feature_layer=-1, **{"image_token_id": 2})
    model, captions = transformers.LlavaForConditionalGeneration(config), []
    for number, each in enumerate(rows):
        caption = [{"role": "user", "content": "name all colors ."}], each["colors"]
        asked, told = caption if number % 5 else (each["prompt"], each["answer"])
        captions.append({**each, "prompt": asked, "completion": [{"role": "assistant", "content": told}]})
    how = SFTConfig(
        "runs/vision-sft", max_steps=steps, per_device_train_batch_size=64, learning_rate=2e-3, logging_steps=15,
        lr_scheduler_type="constant", max_length=None, save_strategy="no", report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, seed=seed, disable_tqdm=True,
    )  # fmt: skip
    SFTTrainer(model, how, train_dataset=Dataset.from_list(captions), processing_class=processor).train()
    return processor, model


def report(trainer, when):
    table = trainer.generate_completions()  # greedy answers
    if trainer.is_world_process_zero():
        print(f"Accuracy {when}:", table.groupby("image")["score"].mean().round(3).to_dict(), flush=True)


if __name__ == "__main__":
    parser = TrlParser((PPOConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="", output_dir="runs/vision", max_steps=200, per_device_train_batch_size=128,
        per_device_eval_batch_size=100, response_length=4, stop_token="eos", temperature=1.0, kl_coef=0.0,
        learning_rate=1e-3, num_ppo_epochs=2, num_mini_batches=2, gradient_checkpointing=False, logging_steps=1,
        num_sample_generations=0, save_strategy="no",
    )  # fmt: skip
    args, model_args = parser.parse_args_and_config()
    path, dice = model_args.model_name_or_path, random.Random(args.seed)
    rows, tested = [row(False, dice) for _ in range(4096)], [row(True, dice) for _ in range(300)]
    shifted = zip(tested, tested[1:] + tested[:1], strict=True)
    if path:
        processor = transformers.AutoProcessor.from_pretrained(path)
        model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=model_args.dtype)
    else:
        processor, model = make_policy(rows, args.seed)
    trainer = PPOTrainer(
        args, processor, model, train_dataset=rows, reward_funcs=correct, peft_config=get_peft_config(model_args),
        eval_dataset=tested + [{**asked, "images": other["images"], "shown": "other"} for asked, other in shifted],
    )  # fmt: skip
    report(trainer, "before")
    trainer.train()
    trainer.save_model()
    report(trainer, "after")
