"""Arguments of episodes with tools and environments."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rlhf_ppo.config.validation import LONGEST_WAIT, AtLeastOne, Count, Interval, read_json
from rlhf_ppo.config.validation import option as _option

EPISODE_OPTIONS = (
    *("max_tool_calling_iterations", "tool_timeout", "tool_isolation", "tool_memory_limit"),
    "max_tool_response_length",
)
"""Options that only tools and environments read."""


@dataclass(repr=False)
class AgentArguments:
    """Arguments of `tools` and `environment_factory`; TRL's names where TRL has them."""

    max_tool_calling_iterations: Count | None = _option(
        None,
        "Rounds of tool calls after which an episode is cut, at its next turn, whose calls are not carried out. None: "
        "any number.",
    )
    tool_timeout: Annotated[float, Interval(0, LONGEST_WAIT, open_low=True)] | None = _option(
        60.0,
        "Seconds that a call of a tool or an environment may take; then its answer is an error. None: no limit.",
    )
    tool_isolation: Literal["thread", "process"] = _option(
        "thread",
        "Where tools and environments run: in threads, which nothing can end, or each environment in a process of its "
        "own, which is killed and replaced.",
    )
    tool_memory_limit: AtLeastOne | None = _option(
        None, "With tool_isolation='process': megabytes that a process may take beside what it starts with."
    )
    max_tool_response_length: AtLeastOne | None = _option(
        None, "Characters of a tool's answer; a longer one is shortened, with a mark. None: no limit."
    )
    chat_template_kwargs: dict[str, Any] | str | None = _option(
        None,
        "Further arguments of the chat template, a dict or its JSON text, such as '{\"enable_thinking\": false}'.",
    )


def parse_template_kwargs(given: Any) -> dict[str, Any] | None:
    """Parse the chat template's arguments from Python, YAML or a command line.

    Raises:
        TypeError: It is no dict with texts for keys.
        ValueError: It is a text that is no JSON.
    """
    if isinstance(given, str):
        try:
            given = read_json(given)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"chat_template_kwargs={given!r:.80} is no JSON: {error}") from error
    if given is not None and not (isinstance(given, dict) and all(isinstance(key, str) for key in given)):
        raise TypeError(
            f"chat_template_kwargs={given!r:.80} must be a dict of the template's arguments, such as "
            """{"enable_thinking": false}"""
        )
    return given
