"""Uploads to the hub: only the policy's files, and only after they are on the disk."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress

from rlhf_ppo.checkpoints.files import replacing
from rlhf_ppo.config import PPOConfig
from rlhf_ppo.config.ppo_config import output_directory
from rlhf_ppo.terminal import hide_secrets, redact_text, visible_logger
from rlhf_ppo.training.run_state import RunState

logger = visible_logger(__name__)

_HTTPError: Any = HfHubHTTPError.__bases__[0]
"""Base error of the HTTP library that huggingface_hub uses."""

POLICY_FILES = (
    *("config.json", "generation_config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("adapter_model.bin", "pytorch_model*.bin", "pytorch_model.bin.index.json", "*.py"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model"),
    *("*.tiktoken", "chat_template*", "additional_chat_templates/*", "preprocessor_config.json"),
    *("processor_config.json", "README.md", "LICENSE*", "curves.png", "training_args.bin"),
)
"""Files of `save_model` and the model card. Other files are about prompts, training and machine."""


class HubError(ConnectionError):
    """The hub was not reached, failed or refused. The trained policy is on the disk."""


def published_files(directory: str | Path, also: Sequence[str] = ()) -> list[str]:
    """Return the files of a run's directory that belong to its policy.

    Args:
        directory: `output_dir`.
        also: Patterns of further paths in it, such as `completions/*`; `*` also matches slashes.

    Returns:
        Relative paths of files directly in it that match `POLICY_FILES`, and of files that match `also`.
    """
    paths = sorted(path.relative_to(directory).as_posix() for path in Path(directory).rglob("*") if path.is_file())
    return [path for path in paths if _is_policys(path) or any(fnmatch(path, pattern) for pattern in also)]


def _is_policys(path: str) -> bool:
    return any(fnmatch(path, pattern) and path.count("/") == pattern.count("/") for pattern in POLICY_FILES)


@contextmanager
def naming_hub(args: TrainingArguments, kept: str | None = None) -> Iterator[None]:
    """Turn errors of the hub into `HubError`, with the place of the policy and a fix.

    Args:
        args: Gives the repository's name.
        kept: The directory of the saved policy; None before training.

    Raises:
        HubError: The hub was not reached, failed, or does not let this user create the repository or write to it.
    """
    try:
        yield
    except (OSError, RuntimeError, HFValidationError, _HTTPError) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) else error  # a file too large for a commit
        if not isinstance(cause, HFValidationError | ConnectionError | LocalTokenNotFoundError | _HTTPError):
            raise
        response = cause.response if isinstance(cause, HfHubHTTPError) else None
        is_refusal = response is not None and response.status_code in (401, 403, 404)
        is_refusal |= isinstance(cause, HFValidationError | LocalTokenNotFoundError)
        name = args.hub_model_id or Path(output_directory(args)).absolute().name
        said = hide_secrets(redact_text(" ".join(str(cause).split())), [args.hub_token or ""]).rstrip(".")
        raise HubError(_advice(name, said, is_refusal, kept)) from error


def _advice(name: str, said: str, is_refusal: bool, kept: str | None) -> str:
    fix = (
        "log in with `hf auth login` or give a hub_token that may write there, and name a repository of yours with "
        "hub_model_id"
        if is_refusal
        else "look at the network and HF_ENDPOINT"
    )
    if kept is None:
        return f"push_to_hub=True, but the hub does not give the repository {name!r}: {said}; {fix}, or do not push"
    again = (
        f"trainer.push_to_hub(), or `hf upload {name} {shlex.quote(kept)}` with --include for each file of the policy"
    )
    return (
        f"the policy is saved in {kept} and was not uploaded to {name!r}: {said}; {fix}, then upload it with {again}"
    )


def push_policy(
    trainer: Trainer,
    run: RunState,
    commit_message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    private: bool | None,
    **card: Any,
) -> Any:
    """Save the policy with its card, and upload them; see `PPOTrainer.push_to_hub`."""
    args, directory = run.args, output_directory(run.args)
    token = args.hub_token if token is None else token
    trainer.save_model(_internal_call=True)
    with naming_hub(args, kept=directory):
        _begin_push(run)
        if trainer.hub_model_id is None:
            with run.override_args(hub_private_repo=args.hub_private_repo if private is None else private):
                trainer.init_hf_repo(token=token)
        if args.process_index != 0:
            return None
        given = [card["tags"]] if isinstance(card.get("tags"), str) else list(card.get("tags") or [])
        tags = getattr(trainer.model, "model_tags", None) or []
        card_of: Any = trainer.create_model_card
        card_of(**card | {"tags": [*given, *(tag for tag in tags if tag not in given)]})
        finish_push(trainer)
        api = HfApi(library_name="rlhf_ppo", token=token)
        files, branch = published_files(directory, args.hub_files or ()), revision or args.hub_revision
        upload = _upload(api, trainer.hub_model_id, directory, commit_message, branch, allow_patterns=files)
        return upload() if blocking else api.run_as_future(upload)


def finish_push(trainer: Trainer) -> None:
    """Wait for an upload in the background."""
    job = getattr(trainer, "push_in_progress", None)
    if job is not None and not job.is_done():
        job.wait_until_done()


def _begin_push(run: RunState) -> None:
    """Call callbacks; without a named space, Trackio's callback would publish everything, including sample tables."""
    is_unnamed = getattr(run.args, "trackio_static_space_id", "named") is None
    with run.override_args(**{"trackio_static_space_id": False} if is_unnamed else {}):
        run.fire("on_push_begin")


def _upload(
    api: HfApi, repository: str | None, directory: str, message: str | None, revision: str | None, **how: Any
) -> Callable[[], Any]:
    commit = {"commit_message": message, "revision": revision}
    return partial(api.upload_folder, repo_id=str(repository), folder_path=directory, **commit, **how)


def upload_directory(args: TrainingArguments) -> None:
    """Upload the model in the `output_dir` of any training arguments."""
    directory = output_directory(args)
    with naming_hub(args, kept=directory):
        api = HfApi(library_name="rlhf_ppo", token=args.hub_token)
        name = args.hub_model_id or Path(directory).absolute().name
        repository = api.create_repo(name, private=args.hub_private_repo, exist_ok=True)
        files = published_files(directory, getattr(args, "hub_files", None) or ())
        api.upload_folder(repo_id=repository.repo_id, folder_path=directory, allow_patterns=files)


def push_checkpoint(trainer: Trainer, run: RunState, checkpoint: str) -> None:
    """Upload the policy of a checkpoint in the background; with `hub_strategy="checkpoint"` the whole checkpoint too.

    Args:
        trainer: The trainer.
        run: Its run.
        checkpoint: The checkpoint's directory; its policy is copied to `output_dir`.
    """
    args, directory = run.args, output_directory(run.args)
    is_busy = trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
    if args.process_index != 0 or args.hub_strategy == HubStrategy.END:
        return
    if is_busy:
        if not args.hub_always_push:
            return
        finish_push(trainer)  # it reads files that are overwritten below
    _begin_push(run)
    for name in published_files(checkpoint):
        Path(directory, name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(Path(directory, name)) as temporary:
            shutil.copyfile(Path(checkpoint, name), temporary)
    moment = f"step {run.state.global_step}" if args.save_strategy == "steps" else f"epoch {int(run.state.epoch)}"
    message = f"Training in progress, {moment}"
    api = HfApi(library_name="rlhf_ppo", token=args.hub_token)
    to, branch, files = trainer.hub_model_id, args.hub_revision, published_files(directory, args.hub_files or ())
    uploads = [_upload(api, to, directory, message, branch, allow_patterns=files)]
    if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
        name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else Path(checkpoint).name
        uploads.append(_upload(api, to, checkpoint, f"{message}, checkpoint", branch, path_in_repo=name))
    jobs = [api.run_as_future(_upload_or_warn, args, directory, upload) for upload in uploads]
    trainer.push_in_progress = PushInProgress(jobs)  # pyright: ignore[reportArgumentType]


def _upload_or_warn(args: PPOConfig, kept: str, upload: Callable[[], Any]) -> None:
    """Upload, and log a failure before the job counts as done: the end of the run waits for the job."""
    try:
        with naming_hub(args, kept):
            upload()
    except Exception as error:
        logger.warning(f"{error}; the run continues and uploads again with its next checkpoint")
