"""Measure how often a judge prefers a model's summaries to people's, with the command line of TRL's script.

```bash
python examples/judge_tldr.py \
    --model_name_or_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr \
    --judge_model gpt-4o-mini \
    --num_examples 1000
```

The key of OpenAI's API is read from the environment variable OPENAI_API_KEY; another server (--judge_url) gets the key
in RLHF_PPO_JUDGE_TOKEN. `rlhf-ppo judge` has all options.
"""

from dataclasses import dataclass, field
from typing import Any, cast

from transformers import HfArgumentParser

from rlhf_ppo.cli.errors import user_errors
from rlhf_ppo.cli.judge import JudgeArguments, judge_responses


@dataclass
class ScriptArguments:
    """The model, the data and the judge."""

    model_name_or_path: str = field(metadata={"help": "Directory or hub name of the model."})
    judge_model: str = field(
        metadata={"help": "A model at OpenAI's API or at judge_url, or a reward model's directory or hub name."}
    )
    judge_url: str | None = field(default=None, metadata={"help": "Address of another server with OpenAI's API."})
    num_examples: int = field(default=1000, metadata={"help": "Number of posts, from the first."})
    dataset_name: str = field(default="trl-lib/tldr", metadata={"help": "Posts (`prompt`) and summaries."})
    dataset_split: str = field(default="validation", metadata={"help": "Split of the data set."})
    output_dir: str = field(default="judged", metadata={"help": "Directory of the judged table."})


if __name__ == "__main__":
    (args,) = HfArgumentParser(cast(Any, ScriptArguments)).parse_args_into_dataclasses()
    with user_errors("judge_tldr.py"):
        judge_responses(
            JudgeArguments(
                dataset_name=args.dataset_name,
                split=args.dataset_split,
                model=args.model_name_or_path,
                opponent_column="completion",
                judge_model=args.judge_model,
                judge_url=args.judge_url,
                num_prompts=args.num_examples,
                max_new_tokens=200,
                temperature=0.0,
                output_dir=args.output_dir,
            )
        )
