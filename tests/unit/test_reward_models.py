"""Reward models give what a forward pass of each text alone gives, batched and named as in TRL."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2ForSequenceClassification

from colocate_rl.errors import ConfigError, RewardError
from colocate_rl.rollout.rewards import Rewards
from colocate_rl.scoring import models
from colocate_rl.scoring.models import ModelOptions, batches_by_length
from tests.tiny import tiny_config, tiny_tokenizer

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
PROMPTS = ["2+2=", "a much longer prompt than the others: ", "x", "2+2=", "y"]
COMPLETIONS = ["4", "yes", "", "five, or perhaps six", "z" * 60]
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if shout %}!{% endif %}{% endfor %}"


def reward_model(seed: int = 3, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = Qwen2ForSequenceClassification(tiny_config(num_labels=1, **changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.mul_(4.0)
    return model


def save(folder: Path) -> Path:
    reward_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def alone(model: PreTrainedModel, text: str) -> float:
    """The last token's logit, without padding."""
    ids = torch.tensor([tiny_tokenizer()(text, add_special_tokens=False)["input_ids"]])
    with torch.no_grad():
        hidden = model.eval().model(input_ids=ids).last_hidden_state[0, -1]
        return float(model.score(hidden))


def ask(rewards: Rewards, prompts: list[Any], completions: list[Any]) -> torch.Tensor:
    rewards.prepare(CPU)
    return rewards.score(prompts, completions, [[1]] * len(prompts), {})


@pytest.mark.parametrize("max_tokens", [16, 100, models.MAX_BATCH_TOKENS])
def test_a_folder_a_model_and_a_function_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    monkeypatch.setattr(models, "MAX_BATCH_TOKENS", max_tokens)
    folder = save(tmp_path / "owner" / "judge")
    given = reward_model(seed=5).train()
    rewards = Rewards(
        [str(folder), lambda completions, **_: [1.0] * len(completions), given],
        processing_classes=[None, None, tiny_tokenizer()],
    )
    assert rewards.names == ["judge", "<lambda>", "Qwen2ForSequenceClassification"]
    table = ask(rewards, PROMPTS, COMPLETIONS)
    texts = [prompt + completion for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    for column, model in ((0, reward_model()), (2, reward_model(seed=5))):
        expected = torch.tensor([alone(model, text) for text in texts])
        torch.testing.assert_close(table[:, column], expected, rtol=1e-4, atol=1e-4)
        assert expected.std() > 0.01, "a model that does not tell texts apart shows nothing"
    assert not given.training
    assert not table.requires_grad
    assert not any(parameter.requires_grad for parameter in given.parameters())
    assert isinstance(rewards.functions[0], PreTrainedModel), "the loaded model stands where its name stood"


def test_conversations_are_written_by_the_models_own_template(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    rewards = Rewards(
        [reward_model()],
        processing_classes=[tokenizer],
        model_options=ModelOptions({}, chat_template_kwargs={"shout": True}),
    )
    prompts = [[{"role": "user", "content": "2+2="}]] * 2
    completions = [[{"role": "assistant", "content": text}] for text in ("4", "five")]
    table = ask(rewards, prompts, completions)
    texts = ["[user]2+2=![assistant]4!", "[user]2+2=![assistant]five!"]
    expected = torch.tensor([[alone(reward_model(), text)] for text in texts])
    torch.testing.assert_close(table, expected, rtol=1e-4, atol=1e-4)


def test_the_pad_token_is_the_end_token_where_there_is_none() -> None:
    tokenizer, model = tiny_tokenizer(), reward_model()
    tokenizer.pad_token = None
    model.config.pad_token_id = None
    table = ask(Rewards([model], processing_classes=[tokenizer]), PROMPTS, COMPLETIONS)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id
    expected = [[alone(reward_model(), p + c)] for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    torch.testing.assert_close(table, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has 2 labels"):
        Rewards([Qwen2ForSequenceClassification(tiny_config(num_labels=2))], processing_classes=[tiny_tokenizer()])
    with pytest.raises(ConfigError, match="no model configuration could be read there"):
        Rewards([str(tmp_path / "nowhere")])
    with pytest.raises(ConfigError, match=r"reward_processing_classes has 2 value\(s\) but there are 1"):
        Rewards([reward_model()], processing_classes=[None, None])
    reward_model().save_pretrained(tmp_path / "bare")
    with pytest.raises(RewardError, match=r"Row 0 becomes 0 tokens with the .* of reward model 'bare'"):
        ask(Rewards([str(tmp_path / "bare")]), PROMPTS, COMPLETIONS)
    with pytest.raises(
        ConfigError, match="No tokenizer could be read for reward model 'Qwen2ForSequenceClassification'"
    ):
        Rewards([reward_model()])


@pytest.mark.parametrize("max_tokens", [1, 7, 20, 1000])
def test_batches_hold_each_row_once_and_stay_below_the_limit(max_tokens: int) -> None:
    lengths = [3, 9, 1, 1, 7, 3, 30, 2]
    batches = list(batches_by_length(lengths, max_tokens))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= max_tokens
    flat = [lengths[row] for batch in batches for row in batch]
    assert flat == sorted(flat)
    if max_tokens == 1000:
        assert len(batches) == 1
