"""Models that are only evaluated: the reward model and the reference."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

from rlhf_ppo.models.inputs import disable_dropout, no_split_modules, transformers_model
from rlhf_ppo.models.packing import pack_rows


class Frozen(nn.Module):
    """A model in eval mode, without dropout and gradients, in the form that engines shard.

    Subclasses say with `forward` what is computed, the only way in: ZeRO-3 and FSDP2 gather parameters around it.

    Args:
        model: A transformers model, or a `PeftModel` around one; it is changed in place.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        disable_dropout(model)
        pack_rows(model)
        self.model = model.requires_grad_(False)
        self.eval()

    @property
    def config(self) -> PreTrainedConfig:
        """The model's configuration; engines that shard models read it."""
        return transformers_model(self.model).config

    @property
    def _no_split_modules(self) -> list[str]:
        return no_split_modules(self.model)
