"""Load a model, encode prompts, decode completions, and save the trained model.

A task's stop texts end a completion.  A row stops early at any token whose own text holds one of them (for
"\\n" that is every token with a line break in it), and the text is cut at the first stop, however it was
tokenised.  A task of token numbers needs no tokenizer.

Training changes the decoder's products, which are views of the model's own parameters: the model is saved as
it is, in the dtype of the run, and tied weights are saved once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flatout.engines.evolution.tasks.task import Prompt, text_of_ids
from flatout.engines.run import models
from flatout.engines.run.tensor_files import file_errors
from flatout.ground.atomic_files import whole_folder
from flatout.ground.errors import BadInput

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flatout.engines.run.models import DType

EXTRA = "evolution"


class Texts:
    """Encodes the prompts of one task for one model and reads its completions."""

    def __init__(
        self, tokenizer: Any, *, stop: Sequence[str] = (), chat: bool | None = None, ends: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self._stop = tuple(stop)
        has_template = models.has_chat_template(tokenizer)
        if chat and not has_template:
            raise BadInput("the tokenizer has no chat template", hint="omit chat, or set it to false")
        self._chat = has_template if chat is None else chat
        self.ends = tuple(sorted({*ends, *self._stopping_tokens()}))

    def ids(self, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
        """Encode prompts as the model reads them, in one call of the tokenizer."""
        encoded = iter(self._encoded([prompt.text for prompt in prompts if prompt.text is not None]))
        return [next(encoded) if prompt.token_ids is None else prompt.token_ids for prompt in prompts]

    def texts(self, completions: Sequence[Sequence[int]]) -> list[str]:
        """Decode completions as the reward reads them, in one call of the tokenizer."""
        if self.tokenizer is None:
            return [text_of_ids(tokens) for tokens in completions]
        return [self._cut(text) for text in models.decode_rows(self.tokenizer, completions, extra=EXTRA)]

    def _encoded(self, texts: list[str]) -> list[tuple[int, ...]]:
        if not texts:
            return []
        if self._chat:
            texts = models.write_chats(texts, self.tokenizer)
        found = self.tokenizer(texts, add_special_tokens=not self._chat, return_attention_mask=False)
        return [tuple(ids) for ids in found["input_ids"]]

    def _cut(self, text: str) -> str:
        places = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        return text[: min(places)] if places else text

    def _stopping_tokens(self) -> set[int]:
        if self.tokenizer is None:
            return set()
        own = self.tokenizer.eos_token_id
        found = set() if own is None else {own}
        if self._stop:
            texts = self.tokenizer.batch_decode([[token] for token in range(len(self.tokenizer))])
            found |= {token for token, text in enumerate(texts) if any(stop in text for stop in self._stop)}
        return found


def open_model(folder: Path, *, device: torch.device, dtype: DType) -> nn.Module:
    """Load the causal language model of a folder, ready to run."""
    what = "causal language model"
    model: nn.Module = models.load_pretrained(
        "AutoModelForCausalLM", folder, what=what, extra=EXTRA, dtype=getattr(torch, dtype)
    )
    return model.to(device)


def open_tokenizer(folder: Path, *, prompts: Sequence[Prompt]) -> Any:
    """Load the tokenizer of a model's folder; None if every prompt is token numbers."""
    if all(prompt.token_ids is not None for prompt in prompts):
        return None
    return models.open_tokenizer(folder, extra=EXTRA)


def save_model(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write the trained model as transformers loads it, whole or not at all."""
    state = _own_copies(model.state_dict())
    try:
        with whole_folder(folder, replace=True) as partial, models.quietly(extra=EXTRA):
            model.save_pretrained(partial, state_dict=state)  # type: ignore[operator]
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)
    except file_errors(EXTRA) as error:
        raise BadInput(
            f"the trained model {folder} cannot be written: {error}",
            hint="free some space; --resume writes it from the last checkpoint",
        ) from error


def _own_copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy every tensor to its own storage; tied ones, which are the same values, stay one tensor.

    Parts of a stacked weight share a storage, which a safetensors file cannot say.
    """
    copies: dict[tuple[object, ...], Tensor] = {}
    kept = {}
    for name, tensor in state.items():
        values = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if values not in copies:
            copies[values] = tensor.detach().cpu().clone()
        kept[name] = copies[values]
    return kept
