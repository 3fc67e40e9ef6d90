"""Teach a vision-language model to look: which color has the first, second, third or fourth shape.

python examples/vision.py  # nothing is downloaded
accelerate launch examples/vision.py --model_name_or_path Qwen/Qwen3-VL-2B-Instruct --dtype bfloat16 --use_peft \
    --lora_target_modules all-linear --share_base_model --learning_rate 1e-4 --output_dir runs/qwen

The second command needs `pip install "rlhf-ppo[peft]" torchvision`.

The reward is 1 for the right word. A shape and a wording are held out. Without `--model_name_or_path` the script makes
a LLaVA of 0.2M parameters and trains it with SFT: four captions for each answer. It prints the accuracy on held-out
rows, and on the same questions with the images of other rows, where a model that looks falls to chance.
"""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportCallIssue=false

import random

import transformers
from datasets import Dataset
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config

from rlhf_ppo import PPOConfig, PPOTrainer

COLORS = {"red": "#e02020", "green": "#10a030", "blue": "#2040f0", "yellow": "#f0d010"}
SQUARE = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
DIAMOND = [(0, -1), (1, 0), (0, 1), (-1, 0)]
TRIANGLE = [(0, -1), (1, 1), (-1, 1)]
CROSS = [
    (-1, -0.4), (-0.4, -0.4), (-0.4, -1), (0.4, -1), (0.4, -0.4), (1, -0.4),
    (1, 0.4), (0.4, 0.4), (0.4, 1), (-0.4, 1), (-0.4, 0.4), (-1, 0.4),
]  # fmt: skip
SHAPES = [SQUARE, DIAMOND, TRIANGLE]
HELD_OUT_SHAPES = [CROSS]
"""Corners of each shape, as (right, down) from its center."""

PLACES = ["first", "second", "third", "fourth"]
WORDINGS = ["what color is the {} shape ?", "name the color of the {} shape .", "which color has the {} shape ?"]
"""Questions; the last wording is held out."""

SIZE = 32
"""Width and height of an image in pixels; each shape stands in a quarter of it."""


# ---- Data ----


def draw_image(shapes, colors, dice):
    """Draw four shapes in reading order, each at a random position and size in its quarter."""
    image = Image.new("RGB", (SIZE, SIZE), "white")
    canvas = ImageDraw.Draw(image)
    quarter = SIZE // 2
    for place, (shape, color) in enumerate(zip(shapes, colors, strict=True)):
        half = dice.randint(quarter // 2 - 3, quarter // 2 - 1)  # of the shape's width
        x = place % 2 * quarter + dice.randint(half, quarter - 1 - half)
        y = place // 2 * quarter + dice.randint(half, quarter - 1 - half)
        corners = [(x + half * right, y + half * down) for right, down in shape]
        canvas.polygon(corners, COLORS[color])
    return image


def row(is_held_out, dice):
    """Return a question about an image, its answer, and the colors of all shapes."""
    shapes = dice.choices(HELD_OUT_SHAPES if is_held_out else SHAPES, k=4)
    colors = dice.choices([*COLORS], k=4)
    place = dice.randrange(4)
    wording = WORDINGS[-1] if is_held_out else dice.choice(WORDINGS[:-1])
    question = wording.format(PLACES[place])
    return {
        "prompt": [{"role": "user", "content": f"{question} answer in one word ."}],
        "images": [draw_image(shapes, colors, dice)],
        "answer": colors[place],
        "colors": " ".join(colors),
        "shown": "own",
    }


def with_images_of_others(rows):
    """Return the rows, each with the image of the next."""
    following = rows[1:] + rows[:1]
    return [
        {**asked, "images": other["images"], "shown": "other"} for asked, other in zip(rows, following, strict=True)
    ]


# ---- Reward ----


def correct(completions, answer, shown, log_extra, **_):
    """1 for the right word, else 0."""
    log_extra("image", shown)
    words = [completion[-1]["content"].strip(" .\n").lower() for completion in completions]
    return [float(word == right) for word, right in zip(words, answer, strict=True)]


# ---- A small model ----

TEMPLATE = """{% for message in messages %}{{ message['role'] }} {% for part in message['content'] %}{%
if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %} </s> {% endfor %}{%
if add_generation_prompt %}assistant{% endif %}"""


def make_processor():
    """Make a processor whose vocabulary is the words of the task; `<image>` is its id 2."""
    texts = [*WORDINGS, *PLACES, *COLORS, "name all colors . user assistant answer in one word ."]
    words = ["<pad>", "</s>", "<image>", *dict.fromkeys(" ".join(texts).split())]
    vocabulary = {word: index for index, word in enumerate(words)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )
    return transformers.LlavaProcessor(
        transformers.CLIPImageProcessor(do_resize=False, do_center_crop=False),
        tokenizer,
        chat_template=TEMPLATE,
        patch_size=8,
        num_additional_image_tokens=1,
        vision_feature_select_strategy="default",
    )


def make_model(vocab_size):
    """Make a LLaVA with random weights, of two layers for images and two for text."""
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision = {"model_type": "clip_vision_model", "image_size": SIZE, "patch_size": 8}
    text = {"model_type": "qwen2", "vocab_size": vocab_size, "num_key_value_heads": 4, "eos_token_id": 1}
    config = transformers.LlavaConfig(
        vision_config={**vision, **layers, "initializer_range": 0.1},
        text_config={**text, **layers, "initializer_range": 0.1},
        vision_feature_layer=-1,
        image_token_id=2,
    )
    return transformers.LlavaForConditionalGeneration(config)


def captions_and_answers(rows):
    """Return examples for SFT: one row in five answers its question, the others name all colors."""
    examples = []
    for number, asked in enumerate(rows):
        if number % 5 == 0:
            prompt, completion = asked["prompt"], asked["answer"]
        else:
            prompt, completion = [{"role": "user", "content": "name all colors ."}], asked["colors"]
        examples.append({**asked, "prompt": prompt, "completion": [{"role": "assistant", "content": completion}]})
    return examples


def make_policy(rows, seed, steps=45):
    """Make a small processor and model, and train the model with SFT."""
    processor = make_processor()
    transformers.set_seed(seed)
    model = make_model(len(processor.tokenizer))
    args = SFTConfig(
        output_dir="runs/vision-sft",
        max_steps=steps,
        per_device_train_batch_size=64,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        max_length=None,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=seed,
        save_strategy="no",
        logging_steps=15,
        report_to="none",
        disable_tqdm=True,
    )
    dataset = Dataset.from_list(captions_and_answers(rows))
    SFTTrainer(model, args, train_dataset=dataset, processing_class=processor).train()
    return processor, model


# ---- Training ----


def report(trainer, when):
    """Print the accuracy of greedy answers to the held-out questions, with their own and with other images."""
    table = trainer.generate_completions()
    if trainer.is_world_process_zero():
        accuracy = table.groupby("image")["score"].mean().round(3)
        print(f"Accuracy {when}:", accuracy.to_dict(), flush=True)


if __name__ == "__main__":
    parser = TrlParser((PPOConfig, ModelConfig))
    parser.set_defaults(
        model_name_or_path="",
        # Rollout
        per_device_train_batch_size=128,
        per_device_eval_batch_size=100,
        response_length=4,
        stop_token="eos",
        temperature=1.0,
        # Optimization
        max_steps=200,
        kl_coef=0.0,
        num_ppo_epochs=2,
        num_mini_batches=2,
        learning_rate=1e-3,
        gradient_checkpointing=False,
        # Results
        output_dir="runs/vision",
        logging_steps=1,
        num_sample_generations=0,
        save_strategy="no",
    )
    args, model_args = parser.parse_args_and_config()
    dice = random.Random(args.seed)
    train_rows = [row(False, dice) for _ in range(4096)]
    test_rows = [row(True, dice) for _ in range(300)]
    path = model_args.model_name_or_path
    if path:
        processor = transformers.AutoProcessor.from_pretrained(path)
        model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=model_args.dtype)
    else:
        processor, model = make_policy(train_rows, args.seed)
    trainer = PPOTrainer(
        args,
        processing_class=processor,
        model=model,
        reward_funcs=correct,
        train_dataset=train_rows,
        eval_dataset=test_rows + with_images_of_others(test_rows),
        peft_config=get_peft_config(model_args),
    )
    report(trainer, "before")
    trainer.train()
    trainer.save_model()
    report(trainer, "after")
