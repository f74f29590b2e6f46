"""Texts through any Hugging Face encoder: one token of the store for each piece of the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from convexformer.embedding.base import Encoded, Encoder, Options, autocast, need, pick_layers, quiet


@final
class TextEncoder(Encoder):
    """``AutoModel`` and ``AutoTokenizer`` of a local folder or an id; of an encoder-decoder the encoder alone.

    Samples are padded with a mask to the longest text of the source, at most ``max_length`` pieces. ``class_token="drop"``
    drops all special pieces ([CLS], [SEP], ...).
    """

    kind = "text"

    def __init__(self, model: str, options: Options, *, attentions: bool = False) -> None:
        transformers = need("transformers", "text")
        local = Path(model).is_dir()  # then nothing is asked of a network
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model, local_files_only=local)
            eager = {"attn_implementation": "eager"} if attentions else {}  # other kernels do not return attention maps
            with quiet(transformers):
                loaded = transformers.AutoModel.from_pretrained(
                    model, local_files_only=local, dtype=torch.float32, **eager
                )
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise ValueError(f"{model} cannot be read as a Hugging Face model of texts: {error}") from error
        if getattr(loaded.config, "is_encoder_decoder", False):
            loaded = loaded.get_encoder()
        self.model = loaded.eval().to(options.device)
        self.options = options
        self.length: int | None = None
        """Positions of a sample; set by :meth:`prepare`."""

    def facts(self) -> dict[str, Any]:
        """The vocabulary; what it is called does not matter."""
        return {"vocabulary": len(self.tokenizer), "length": self.length}

    def prepare(self, texts: Sequence[str], *, pad: bool = False) -> None:
        """Find how many pieces the longest text has: every sample of the store has as many places, or ``max_length``."""
        self.length = 0
        for i in range(0, len(texts), 1024):
            kept = [self._kept(ids, special) for ids, special in self.tokenized(texts[i : i + 1024])]
            short = [k for k, own in enumerate(kept) if not own]
            if short:
                raise ValueError(
                    f"text {i + short[0]} ({texts[i + short[0]]!r}) has no pieces besides special ones; drop it, or keep "
                    "the class token."
                )
            self.length = max(self.length, *map(len, kept))
        if pad:
            self.length = self.options.max_length

    def pieces(self, items: Sequence[str]) -> list[list[str]]:
        """The pieces of the tokenizer that tokens belong to."""
        found = []
        for ids, special in self.tokenized(items):
            names = self.tokenizer.convert_ids_to_tokens(ids)
            found.append([names[k] for k in self._kept(ids, special)])
        return found

    @torch.inference_mode()
    def encode(self, items: Sequence[str]) -> Encoded:
        """Run the model on a batch, padded to its longest text, and place what is kept in the positions of the store."""
        tokenized = self.tokenized(items)
        outputs, _ = self.run([ids for ids, _ in tokenized], output_hidden_states=True)
        chosen = pick_layers(outputs.hidden_states, outputs.last_hidden_state, self.options.layers)
        assert self.length is not None, "prepare() comes first"
        mask = torch.zeros((len(items), self.length), dtype=torch.bool)
        out = [X.new_zeros((len(items), self.length, X.shape[2]), dtype=torch.float32) for X in chosen]
        for i, (ids, special) in enumerate(tokenized):
            kept = self._kept(ids, special)
            mask[i, : len(kept)] = True
            for target, X in zip(out, chosen, strict=True):
                target[i, : len(kept)] = X[i, torch.tensor(kept, device=X.device)]
        first = self.tokenizer.cls_token_id
        has_class = first is not None and all(ids[0] == first for ids, _ in tokenized)
        position = 0 if has_class and self.options.class_token != "drop" else None
        return Encoded(tuple(X.cpu() for X in out), mask, None, position)

    def run(self, ids: Sequence[Sequence[int]], **asked: bool) -> tuple[Any, Tensor]:
        """Return the model's outputs for padded pieces, and the mask ``(n, longest)`` of real ones."""
        longest = max(map(len, ids))
        table = torch.full((len(ids), longest), self.tokenizer.pad_token_id or 0, device=self.options.device)
        mask = torch.zeros_like(table)
        for i, own in enumerate(ids):
            table[i, : len(own)] = torch.tensor(own, device=table.device)
            mask[i, : len(own)] = 1
        with autocast(self.options):
            return self.model(input_ids=table, attention_mask=mask, **asked), mask

    def tokenized(self, texts: Sequence[str]) -> list[tuple[list[int], list[int]]]:
        """Return the pieces of each text by number, and which of them are special."""
        found = self.tokenizer(
            list(texts), truncation=True, max_length=self.options.max_length, return_special_tokens_mask=True
        )
        return list(zip(found["input_ids"], found["special_tokens_mask"], strict=True))

    def _kept(self, ids: list[int], special: list[int]) -> list[int]:
        """Return the positions of the pieces that are kept."""
        if self.options.class_token != "drop":
            return list(range(len(ids)))
        return [k for k, flag in enumerate(special) if not flag]
