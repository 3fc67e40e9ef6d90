"""Models of the trainer's kinds in float64, which read unpadded rows: transformers' own code and no other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tests.fuzz import recording
from tests.fuzz.options import Configuration
from tests.fuzz.recording import TINY
from tests.oracles import Array, Episode, log_softmax


class Twins:
    """Models of the trainer's kinds, whose weights are set for each use.

    Args:
        objects: What the configuration says of models.
        shares_base: Whether value model and policy are adapters over one base.
    """

    def __init__(self, objects: Configuration, shares_base: bool) -> None:
        self.policy, self.reference = recording.stopping_policy(), recording.stopping_policy()
        self.value = recording.tiny_scorer(seed=2, **TINY)
        self.rewarding = recording.reward_model().double().eval()
        if objects["adapter"] == "lora":
            from peft import get_peft_model

            self.policy = get_peft_model(self.policy, recording.lora("CAUSAL_LM"))
            if shares_base:
                self.value = get_peft_model(self.value, recording.lora("SEQ_CLS"))
        for model in (self.policy, self.reference, self.value):
            model.double().eval()

    def put(self, weights: Mapping[str, Array]) -> None:
        """Set policy and value model."""
        for prefix, model in (("policy.", self.policy), ("value_model.", self.value)):
            for name, parameter in model.named_parameters():
                value = weights.get(prefix + name, weights.get(f"policy.{name}"))
                assert value is not None, name
                parameter.data = torch.from_numpy(value)

    def logprobs(self, model: Any, episodes: Sequence[Episode], temperature: float) -> tuple[Any, Any]:
        """Log-probabilities of the policy's tokens, and entropies, of all episodes one after the other."""
        ids, places = _right_padded(episodes)
        before = [(row, place - 1) for row, place in places]
        rows, columns = (torch.tensor(part) for part in zip(*before, strict=True))
        logits = model(input_ids=ids).logits[rows, columns] / temperature
        distribution = logits.log_softmax(dim=-1)
        chosen = torch.tensor([ids[row, place] for row, place in places])
        entropies = -(distribution.exp() * distribution).sum(dim=-1)
        return distribution.gather(1, chosen[:, None])[:, 0], entropies

    def values(self, episodes: Sequence[Episode]) -> tuple[Any, Array]:
        """Values before each token of the policy, and after the last token of all."""
        model = self.value.get_base_model() if hasattr(self.value, "get_base_model") else self.value
        ids, places = _right_padded(episodes)
        values = model.score(model.model(input_ids=ids).last_hidden_state)[..., 0]
        rows, columns = (torch.tensor(part) for part in zip(*places, strict=True))
        last = [len(episode.ids) - 1 for episode in episodes]
        return values[rows, columns - 1], values[range(len(last)), last].detach().numpy()

    def distribution(self, ids: list[int], temperature: float) -> Array:
        """Probabilities of each next token, `(L, V)`."""
        with torch.no_grad():
            return np.exp(log_softmax(self.policy(input_ids=torch.tensor([ids])).logits[0].numpy() / temperature))

    @torch.no_grad()
    def score(self, episode: Episode) -> float:
        hidden = self.rewarding.model(input_ids=torch.tensor([episode.ids])).last_hidden_state[0, -1]
        return float(self.rewarding.score(hidden))


def _right_padded(episodes: Sequence[Episode]) -> tuple[Any, list[tuple[int, int]]]:
    """Ids of all episodes, and row and column of each of the policy's tokens; nothing sees what is behind it."""
    width = max(len(episode.ids) for episode in episodes)
    ids = torch.tensor([episode.ids + [0] * (width - len(episode.ids)) for episode in episodes])
    return ids, [(row, len(e.prompt) + place) for row, e in enumerate(episodes) for place in e.own]
