"""From a row's prompt to token ids, and from sampled ids back to what reward functions read.

Ids are made once and used for the engine and for the loss alike; text is made only for rewards and logs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from colocate_rl.errors import DataError
from colocate_rl.rollout import dialogue
from colocate_rl.rollout.dialogue import Message


def is_conversational(prompt: Any) -> bool:
    """True for a list of messages with a role, False for anything else."""
    return bool(isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping) and "role" in prompt[0])


class PromptCodec:
    """Encodes prompts and decodes completions with one tokenizer.

    Args:
        tokenizer: of the policy.
        chat_template_kwargs: passed to ``apply_chat_template`` for conversational prompts.
        schemas: of the tools that the model may call; prompts must be conversational then.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        schemas: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.schemas = list(schemas)
        tools = {"tools": self.schemas} if self.schemas else {}
        self._template_kwargs = {**tools, **(chat_template_kwargs or {})}

    def encode(self, prompt: Any) -> tuple[int, ...]:
        """Token ids of a prompt: a string with the tokenizer's own special tokens, messages by the chat template.

        Raises:
            DataError: when the prompt is neither, or comes out empty.
        """
        if isinstance(prompt, str):
            if self.schemas:
                raise DataError(
                    f"With tools a prompt must be a list of messages {{'role', 'content'}}, got the text "
                    f"{prompt[:80]!r}: only a chat template tells the model of its tools."
                )
            ids = self.tokenizer(prompt)["input_ids"]
        elif is_conversational(prompt):
            ids = self._apply_template(prompt)
        else:
            raise DataError(
                f"A prompt must be a string or a list of messages {{'role', 'content'}}, got {type(prompt).__name__}: "
                f"{str(prompt)[:80]!r}. Change the data set's `prompt` column."
            )
        if not ids:
            raise DataError(
                f"The prompt {str(prompt)[:80]!r} becomes 0 tokens with {type(self.tokenizer).__name__}, and an engine "
                "needs at least one. Remove the row, or check that this is the model's tokenizer."
            )
        return tuple(int(token) for token in ids)

    def _apply_template(self, messages: list[Message]) -> Sequence[int]:
        if self.tokenizer.chat_template is None:
            raise DataError(
                f"The prompts are conversational but {type(self.tokenizer).__name__} has no chat template. Use a chat "
                "model's tokenizer, set tokenizer.chat_template, or give prompts as plain strings."
            )
        try:
            encoded: Any = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=True, **self._template_kwargs
            )
        except Exception as error:  # jinja2's errors, the template's own refusals, and Python's from within it
            raise DataError(
                f"The chat template cannot write the messages {str(messages)[:80]!r}: {error}. Change them, or set "
                "tokenizer.chat_template."
            ) from error
        return list(encoded["input_ids"])

    def decode(self, prompt: Any, token_ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> Any:
        """What a reward function gets: a string, or one assistant message for a conversational prompt."""
        return [self.message(token_ids, prompt_ids)] if is_conversational(prompt) else self.text(token_ids)

    def message(self, token_ids: Sequence[int], prompt_ids: Sequence[int]) -> Message:
        """One turn of the assistant as a message; see :func:`colocate_rl.rollout.dialogue.parse`."""
        return dialogue.parse(self.tokenizer, token_ids, prompt_ids, self.schemas)

    def text(self, token_ids: Sequence[int]) -> str:
        """Readable text without special tokens; ids beyond the tokenizer's range become nothing."""
        known = dialogue.known_ids(self.tokenizer, token_ids)
        return str(self.tokenizer.decode(known, skip_special_tokens=True))

    def prompt_text(self, prompt: Any) -> str:
        """A prompt as one string, for tables."""
        if isinstance(prompt, str):
            return prompt
        return "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in prompt)


def check_prompt_length(length: int, *, limit: int | None, where: str) -> None:
    """Refuses a prompt that leaves no room for a single new token.

    Args:
        length: of the prompt in tokens.
        limit: the engines' context window in tokens; None when unknown.
        where: names the prompt in the message.

    Raises:
        DataError: with both numbers.
    """
    if limit is not None and length >= limit:
        raise DataError(
            f"{where} has {length} tokens, but the engines' context window holds {limit} for prompt and completion "
            "together, so not one token could be generated. Remove or shorten the prompt, or raise "
            "vllm_max_model_length."
        )
