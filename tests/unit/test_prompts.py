"""Prompts to ids and ids to text: one encoding for engine and loss, text for rewards only (F2, F3, F8)."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from colocate_rl.errors import DataError
from colocate_rl.rollout.prompts import PromptCodec, check_prompt_length, is_conversational
from tests.tiny import EOS, PAD, tiny_tokenizer

pytestmark = pytest.mark.unit

BOS = "<|bos|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if think %}<think>{% endif %}{% endif %}"
)
CHAT = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]


def bos_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that puts BOS before every text, with a template that writes BOS itself, and one merge (``an``)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: n for n, symbol in enumerate([*alphabet, "an", BOS, EOS, PAD])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "n")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocab[BOS])])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD)
    fast.chat_template = TEMPLATE
    return fast


def text_of(codec: PromptCodec, ids: tuple[int, ...]) -> str:
    """Everything that was encoded, special tokens included."""
    return str(codec.tokenizer.decode(list(ids), skip_special_tokens=False))


# Encoding (F2)


def test_a_string_gets_the_tokenizer_s_own_special_tokens_once() -> None:
    codec = PromptCodec(bos_tokenizer())
    ids = codec.encode("1+1")
    assert ids.count(codec.tokenizer.bos_token_id) == 1
    assert text_of(codec, ids) == f"{BOS}1+1"
    assert all(type(token) is int for token in ids)


def test_messages_get_exactly_one_bos_although_template_and_tokenizer_both_write_it() -> None:
    codec = PromptCodec(bos_tokenizer())
    ids = codec.encode(CHAT)
    assert ids.count(codec.tokenizer.bos_token_id) == 1
    assert text_of(codec, ids) == f"{BOS}[system]add[user]1+1[assistant]"


def test_template_arguments_reach_the_template() -> None:
    codec = PromptCodec(bos_tokenizer(), {"think": True})
    assert text_of(codec, codec.encode(CHAT)).endswith("[assistant]<think>")


def test_a_tokenizer_without_special_tokens_adds_none() -> None:
    codec = PromptCodec(tiny_tokenizer())
    assert len(codec.encode("1+1=")) == 4
    assert text_of(codec, codec.encode("ä€ \n")) == "ä€ \n"


@pytest.mark.parametrize("prompt", [None, 3, ["a", "b"], {"role": "user"}, [], [{"content": "x"}]])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(DataError, match=f"got {type(prompt).__name__}"):
        PromptCodec(tiny_tokenizer()).encode(prompt)


def test_an_empty_prompt_names_the_tokenizer() -> None:
    with pytest.raises(DataError, match=r"becomes 0 tokens with \w*Tokenizer"):
        PromptCodec(tiny_tokenizer()).encode("")


def test_messages_need_a_template() -> None:
    with pytest.raises(DataError, match=r"no chat template.*plain strings"):
        PromptCodec(tiny_tokenizer()).encode(CHAT)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{% for message in messages %}{{ message.content + 1 }}{% endfor %}", "can only concatenate str"),
    ],
)
def test_messages_that_the_template_does_not_take(template: str, reason: str) -> None:
    """As a data error the checks before training say which row it is."""
    tokenizer = bos_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=f"The chat template cannot write the messages .*system.*{reason}"):
        PromptCodec(tokenizer).encode(CHAT)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [(CHAT, True), ("text", False), ([], False), (["a"], False), ([{"content": "x"}], False)],
)
def test_is_conversational(prompt: Any, expected: bool) -> None:
    assert is_conversational(prompt) is expected


# Decoding (F3, F8)


def test_text_does_not_need_to_encode_to_the_same_ids() -> None:
    """The engine may spell a word in other pieces than the tokenizer would: text is the same, ids stay its own."""
    codec = PromptCodec(bos_tokenizer())
    vocab = codec.tokenizer.get_vocab()
    pieces = [vocab["a"], vocab["n"]]
    assert codec.text(pieces) == codec.text([vocab["an"]]) == "an"
    assert codec.encode("an")[1:] != tuple(pieces)


def test_special_tokens_are_left_out_wherever_they_stand() -> None:
    codec = PromptCodec(tiny_tokenizer())
    one, eos, pad = codec.encode("1")[0], codec.tokenizer.eos_token_id, codec.tokenizer.pad_token_id
    assert codec.text([one, eos, one, pad, one, eos]) == "111"


def test_broken_utf8_gives_some_text() -> None:
    codec = PromptCodec(tiny_tokenizer())
    euro = codec.encode("€")
    assert len(euro) == 3
    assert codec.text(euro[:2]) == "\ufffd"


def test_ids_beyond_the_tokenizer_become_nothing() -> None:
    codec = PromptCodec(tiny_tokenizer())
    one = codec.encode("1")[0]
    limit = len(codec.tokenizer)
    assert codec.text([limit, one, limit + 29, 10**6, one, -1]) == "11"
    assert codec.text([limit]) == codec.text([]) == ""


class StrictTokenizer:
    """A tokenizer written in Python, which fails on an id it does not know instead of leaving it out."""

    words = ("a", "b", "c")

    def __len__(self) -> int:
        return len(self.words)

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.words[number] for number in ids)


def test_ids_beyond_a_tokenizer_that_would_fail_on_them() -> None:
    codec = PromptCodec(StrictTokenizer())  # type: ignore[arg-type]
    assert codec.text([2, 3, 0, 500, -1]) == "ca"


def test_rewards_get_what_the_prompt_is_like() -> None:
    codec = PromptCodec(bos_tokenizer())
    ids = [*codec.encode("2")[1:], codec.tokenizer.eos_token_id]
    assert codec.decode("1+1", ids) == "2"
    assert codec.decode(CHAT, ids) == [{"role": "assistant", "content": "2"}]


def test_prompts_in_tables() -> None:
    codec = PromptCodec(tiny_tokenizer())
    assert codec.prompt_text("1+1") == "1+1"
    assert codec.prompt_text(CHAT) == "system: add\nuser: 1+1"


# Length


def test_a_prompt_must_leave_room_for_one_token() -> None:
    check_prompt_length(9, limit=10, where="row 3")
    check_prompt_length(10**6, limit=None, where="row 3")
    for length in (10, 11):
        with pytest.raises(DataError) as caught:
            check_prompt_length(length, limit=10, where="row 3: the prompt")
        text = str(caught.value)
        assert text.startswith(f"row 3: the prompt has {length} tokens")
        assert "holds 10" in text


def test_a_table_shows_prompts_whose_messages_only_call_tools() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    prompt = [CHAT[1], {"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "content": None}]
    assert PromptCodec(bos_tokenizer()).prompt_text(prompt) == "user: 1+1\nassistant: \nassistant: "
