"""Sample tables: prompts, responses and scores, in the terminal, in files and in the experiment trackers."""

from __future__ import annotations

import csv
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from rich.console import Console
from rich.table import Table
from transformers.image_utils import load_image
from transformers.integrations.integration_utils import TensorBoardCallback

from rlhf_ppo.data.conversation import EPISODE_COLUMN, as_json, as_lines
from rlhf_ppo.data.files import optional, write_text
from rlhf_ppo.data.images import IMAGES_COLUMN, thumbnails
from rlhf_ppo.data.prompts import written_texts
from rlhf_ppo.data.rollout import selected
from rlhf_ppo.reporting.console import beside_bars
from rlhf_ppo.reporting.metrics import named_apart
from rlhf_ppo.reporting.run_log import SAMPLES_DIR, step_of_policy
from rlhf_ppo.terminal import cell, markdown

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, Trainer

    from rlhf_ppo.data.rollout import Prompts, Responses
    from rlhf_ppo.rewards.scorer import Scores


NUM_PRINTED, MAX_CHARACTERS = 2, 300
"""Rows of a table in the terminal, and characters of a text there; files and trackers have all."""

QUERY_COLUMNS, TEXT_COLUMNS = ("query", "prompt"), ("model response", "model", "opponent")
"""Text columns in the terminal: prompts show their end, the others their beginning."""

_COLUMNS = {"query": "query", "model response": "response", "score": "score"}
"""The first columns of a table, and their keys in `sample_rows`."""


def sample_rows(
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    responses: Responses,
    scores: Scores,
    extra: Mapping[str, Sequence[Any]],
) -> list[dict[str, Any]]:
    """Decode a batch for the table.

    Args:
        tokenizer: The policy's tokenizer.
        prompts: `B` prompts.
        responses: Their responses.
        scores: Their scores.
        extra: Columns that reward functions logged, `B` values each.

    Returns:
        `B` dicts with `query` (without special tokens), `response` (with its stop token and tool output),
        `score`, the reward sources' scores under `by_source`, and the extra columns under `extra` (called
        `<name> logged` if the table has a column of that name); episodes of several turns have the column `messages`,
        as JSON, and prompts with images the column `images`, thumbnails as `data:` URLs.
    """
    columns = {*_COLUMNS, "messages", "images", *(scores.by_source if len(scores.by_source) > 1 else ())}
    extra = named_apart(extra, columns)
    if (episodes := extra.pop(EPISODE_COLUMN, None)) is not None:
        extra["messages"] = [as_json(episode["messages"]) for episode in episodes]
    if (images := prompts.columns.get(IMAGES_COLUMN)) is not None:
        extra["images"] = [" ".join(thumbnails(row)) for row in images]
    queries = selected(prompts.input_ids, prompts.attention_mask)
    answers = selected(responses.response_ids, responses.episode_mask)
    asked, answered = written_texts(tokenizer, queries, skip_special_tokens=True), written_texts(tokenizer, answers)
    by_source = {name: values.tolist() for name, values in scores.by_source.items()}
    return [
        {
            "query": query,
            "response": answer,
            "score": score,
            "by_source": {name: values[row] for name, values in by_source.items()},
            "extra": {name: values[row] for name, values in extra.items()},
        }
        for row, (query, answer, score) in enumerate(zip(asked, answered, scores.total.tolist(), strict=True))
    ]


def table_of(rows: Sequence[Mapping[str, Any]], sources: Sequence[str]) -> pd.DataFrame:
    """Make a table of the rows of `sample_rows`, gathered from all ranks.

    Args:
        rows: The rows.
        sources: Names of the reward sources, in order.

    Returns:
        The columns `query`, `model response`, `score`, with several reward sources one per source (called
        `<name> reward` if the source has one of the first three names), and those of `extra`.
    """
    columns = {name: [row[key] for row in rows] for name, key in _COLUMNS.items()}
    of_sources = {
        f"{name} reward" if name in columns else name: [row["by_source"][name] for row in rows]
        for name in (sources if len(sources) > 1 else ())
    }
    extra = {name: [row["extra"].get(name) for row in rows] for row in rows for name in row["extra"]}
    return pd.DataFrame(columns | of_sources | extra)


def is_due(update: int, num_updates: int, num_tables: int) -> bool:
    """Return whether a table is printed after an update.

    Table `i` of `0 ... k - 1`, with `k <= N + 1`, is printed after update `floor(i N / (k - 1))`, thus before the
    first update and after the last; a single table is printed after the last.

    Args:
        update: Number of finished updates.
        num_updates: `N`, the updates of the run.
        num_tables: Number of tables.
    """
    last = min(num_tables - 1, num_updates)
    if last < 1:
        return num_tables > 0 and update == num_updates
    return update in {table * num_updates // last for table in range(last + 1)}


def show_table(df: pd.DataFrame, trainer: Trainer, held_out: bool, printed: str = "") -> str:
    """Print the samples with a title, save them and send them to the trackers.

    The file is `output_dir/_samples/update-<step>.csv`; `push_to_hub` does not upload this directory.

    Args:
        df: The samples.
        trainer: The trainer, for its step, output directory and trackers.
        held_out: Whether the prompts are from an evaluation data set rather than the training set.
        printed: The result for the previous table; an equal table is not printed again.

    Returns:
        The printed text.
    """
    prompts = "held-out" if held_out else "training"
    step = step_of_policy(trainer)
    title = f"{f'After update {step}' if step else 'Before the first update'}: {prompts} prompts"
    shown = f"{title}\n{df.head(NUM_PRINTED).to_csv(index=False)}"
    if shown != printed:
        with beside_bars():
            print_table(df, title=title)
    path = Path(str(trainer.args.output_dir), SAMPLES_DIR, f"update-{step:05d}.csv")
    with optional("A sample table"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, df.to_csv(index=False, quoting=csv.QUOTE_NONNUMERIC))  # else not texts with a lone \r
    report_table(df, trainer)
    return shown


def print_table(df: pd.DataFrame, title: str | None = None, num_rows: int = NUM_PRINTED) -> None:
    """Print the first samples in the terminal, with shortened texts; conversations have a line for each message.

    The lines with which all prompts begin, such as the default system prompt of a chat template, are left out.
    Columns that hold neither prompts nor responses share the last column, so that texts stay wide enough to read.
    """
    df = df.head(num_rows).drop(columns="images", errors="ignore")
    if "messages" in df:
        pairs = zip(df["messages"], df["model response"], strict=True)
        shown = [as_lines(messages) if isinstance(messages, str) else text for messages, text in pairs]
        df = df.assign(**{"model response": shown}).drop(columns="messages")
    for column in {*QUERY_COLUMNS} & {*df.columns}:
        prompts = [str(prompt) for prompt in df[column]]
        start = os.path.commonprefix(prompts).rfind("\n") + 1  # noqa: RUF071 - of characters, no paths
        if start and len({*prompts}) > 1:
            df = df.assign(**{column: [f"...{prompt[start:]}" for prompt in prompts]})
    texts = [column for column in df.columns if column in (*QUERY_COLUMNS, *TEXT_COLUMNS)]
    first, *others = (column for column in df.columns if column not in texts)
    table = Table(show_lines=True, title=None if title is None else cell(title), title_justify="left")
    for column in (*texts, first):
        table.add_column(cell(column))
    for row in df.to_dict("records"):
        shown = {name: _shortened(_figure(value), name) for name, value in row.items()}
        figures = [shown[first], *(f"{name}: {shown[name]}" for name in others)]
        table.add_row(*(cell(shown[name]) for name in texts), cell("\n".join(figures)))
    Console().print(table)


def _shortened(text: str, column: str) -> str:
    is_prompt = column in QUERY_COLUMNS
    text = re.sub(r"\n\s*\n", "\n\n", text.strip() if is_prompt else text)
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"...{text[-MAX_CHARACTERS:]}" if is_prompt else f"{text[:MAX_CHARACTERS]}..."


def _with_pictures(df: pd.DataFrame, image: Callable[[Image], object]) -> pd.DataFrame:
    """Replace the `data:` URLs of thumbnails by a tracker's images, as TRL's tables hold them."""
    if "images" not in df:
        return df
    return df.assign(images=[[image(load_image(url)) for url in str(cell).split()] for cell in df["images"]])


def report_table(df: pd.DataFrame, trainer: Trainer) -> None:
    """Send the samples to the experiment trackers in `args.report_to` that have an active run.

    Their name is `completions` in W&B and Trackio (a table, with images) and TensorBoard (a text), `completions.csv`
    in Comet. Trackers without an active run are skipped, as on ranks other than 0 and before training.

    Args:
        df: The samples.
        trainer: The trainer, for its arguments, step and callbacks.
    """
    step, trackers = trainer.state.global_step, trainer.args.report_to or ()
    if "wandb" in trackers:
        import wandb

        if wandb.run is not None:
            shown = wandb.Table(dataframe=_with_pictures(df, wandb.Image))
            wandb.log({"completions": shown, "train/global_step": step})
    if "trackio" in trackers:
        import trackio  # pyright: ignore[reportMissingImports]

        if trackio.context_vars.current_run.get() is not None:  # pyright: ignore[reportPrivateImportUsage]
            shown = trackio.Table(dataframe=_with_pictures(df, trackio.Image))
            trackio.log({"completions": shown, "train/global_step": step})
    if "comet_ml" in trackers:
        import comet_ml  # pyright: ignore[reportMissingImports]

        if (experiment := comet_ml.get_running_experiment()) is not None:
            experiment.set_step(step)  # the update's metrics, which also set it, are logged later
            experiment.log_table("completions.csv", tabular_data=df)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TensorBoardCallback) and callback.tb_writer is not None:
            callback.tb_writer.add_text("completions", _markdown(df), step)
            callback.tb_writer.flush()


def _markdown(df: pd.DataFrame) -> str:
    rows = [df.columns, ["---"] * len(df.columns), *df.itertuples(index=False)]
    return "\n".join(f"| {' | '.join(markdown(_figure(value)) for value in row)} |" for row in rows)


def _figure(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return "not scored" if math.isnan(value) else f"{value:.3f}"
