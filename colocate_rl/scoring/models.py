"""Reward models: sequence classifiers with one label, whose logit is the reward."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerBase

from colocate_rl.errors import ConfigError, RewardError
from colocate_rl.paths import local_or_hub
from colocate_rl.scoring.contract import OnDemand, RewardRequest, Scores

MAX_BATCH_TOKENS = 16_384
"""Most tokens, padding included, in one forward pass of a reward model; a longer row passes alone."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How reward models named by a string are loaded, and how conversations become text."""

    init_kwargs: Mapping[str, Any]
    """Keyword arguments of ``from_pretrained``."""
    trust_remote_code: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None


class ModelSource:
    """A reward model on the rank's device, in eval mode and without gradients.

    The model reads prompt and completion as one text; a conversation is written by the chat template of the model's
    own tokenizer. Rows are passed by length, so that padding stays small.

    Args:
        name: for logs and messages.
        model: folder or hub name, or the model itself; its configuration is read at once, weights by :meth:`load`.
        tokenizer: of the reward model; None: the one that lies beside it.
        options: see :class:`ModelOptions`.

    Raises:
        ConfigError: when there is no such model or tokenizer, or the model has more than one label.
    """

    def __init__(
        self, name: str, model: str | Path | nn.Module, tokenizer: PreTrainedTokenizerBase | None, options: ModelOptions
    ) -> None:
        self.name = name
        self._options = options
        self._model = model if isinstance(model, nn.Module) else local_or_hub(str(model))
        self._device = torch.device("cpu")
        config = self._config()
        if config.num_labels != 1:
            raise ConfigError(
                f"Reward model {name!r} has {config.num_labels} labels, so no logit is its reward. Give a "
                "sequence-classification model with num_labels=1."
            )
        self.tokenizer = tokenizer if tokenizer is not None else self._load_tokenizer(config)
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if self.tokenizer.pad_token_id is None:
            raise ConfigError(
                f"The tokenizer of reward model {name!r} has neither a pad nor an end token, so rows cannot be "
                "batched. Set its pad_token and give it in reward_processing_classes."
            )

    def _config(self) -> Any:
        if isinstance(self._model, nn.Module):
            return self._model.config
        known = {k: v for k, v in self._options.init_kwargs.items() if k in ("revision", "token", "cache_dir")}
        try:
            return AutoConfig.from_pretrained(
                self._model, num_labels=1, trust_remote_code=self._options.trust_remote_code, **known
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"reward_funcs names {self._model!r}, but no model configuration could be read there "
                f"({str(error).splitlines()[0]}). A name of a reward function is resolved on the command line only; in "
                "Python give the function itself."
            ) from error

    def _load_tokenizer(self, config: Any) -> PreTrainedTokenizerBase:
        where = self._model if isinstance(self._model, str) else config._name_or_path
        try:
            found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                where,
                revision=self._options.init_kwargs.get("revision"),
                trust_remote_code=self._options.trust_remote_code,
            )
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"No tokenizer could be read for reward model {self.name!r} from {where!r} "
                f"({str(error).splitlines()[0]}). Give one in reward_processing_classes."
            ) from error
        return found

    def load(self, device: torch.device) -> nn.Module:
        """Reads the weights, if they are not there yet, and moves the model to ``device``."""
        if not isinstance(self._model, nn.Module):
            self._model = AutoModelForSequenceClassification.from_pretrained(
                self._model,
                num_labels=1,
                trust_remote_code=self._options.trust_remote_code,
                **self._options.init_kwargs,
            )
        assert isinstance(self._model, nn.Module)
        config: Any = self._model.config
        config.get_text_config().pad_token_id = self.tokenizer.pad_token_id
        self._model.requires_grad_(False).eval().to(device)
        self._device = device
        return self._model

    in_background = False

    def begin(self, request: RewardRequest) -> OnDemand:
        """See :class:`colocate_rl.scoring.contract.RewardSource`."""
        return OnDemand(lambda: Scores(self.score(request)))

    @torch.no_grad()
    def score(self, request: RewardRequest) -> list[float]:
        """The model's logit for each row."""
        model = self._model
        assert isinstance(model, nn.Module), "load() comes first"
        texts = [self._text(p, c) for p, c in zip(request.prompts, request.completions, strict=True)]
        rows: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        if [] in rows:
            raise RewardError(
                f"Row {rows.index([])} becomes 0 tokens with the {type(self.tokenizer).__name__} of reward model "
                f"{self.name!r}. Check that this is its tokenizer, or give another in reward_processing_classes."
            )
        pad = self.tokenizer.pad_token_id
        values = [0.0] * len(rows)
        for batch in batches_by_length([len(ids) for ids in rows], MAX_BATCH_TOKENS):
            width = max(len(rows[row]) for row in batch)
            ids = torch.tensor([rows[row] + [pad] * (width - len(rows[row])) for row in batch])
            mask = torch.tensor([[1] * len(rows[row]) + [0] * (width - len(rows[row])) for row in batch])
            logits = model(input_ids=ids.to(self._device), attention_mask=mask.to(self._device)).logits
            for row, value in zip(batch, logits[:, 0].float().tolist(), strict=True):
                values[row] = value
        return values

    def _text(self, prompt: Any, completion: Any) -> str:
        if isinstance(prompt, str):
            return prompt + str(completion)
        kwargs = dict(self._options.chat_template_kwargs or {})
        return str(self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False, **kwargs))


def batches_by_length(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Cuts rows, sorted by length, into batches of at most ``max_tokens`` tokens including padding.

    Args:
        lengths: of the rows.
        max_tokens: of a batch; a row that is longer is a batch of its own.

    Yields:
        Positions in ``lengths``, each once.
    """
    batch: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and lengths[row] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch
