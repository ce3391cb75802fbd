"""Two real ranks with real engines: tools and rollout functions, and the policy as its own engine."""

import re
from typing import Any

import pytest
import torch

from tests.engine.dialogue_ranks import CALL, LIMIT, WINDOW
from tests.tiny import chat_tokenizer, tiny_model
from tests.torchrun import run_two_ranks

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(420)]

Results = list[dict[str, Any]]
TOKENIZER = chat_tokenizer()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run_two_ranks("tests.engine.dialogue_ranks", tmp_path_factory.mktemp("dialogue_ranks"), OMP_NUM_THREADS="1")


def rows_of(ranks: Results, scenario: str, number: int = 0) -> list[list[Any]]:
    """All ranks' rows of one rollout: ids, learned from or not, log-probabilities, advantage."""
    return sorted(row for rank in ranks for row in rank[scenario]["rows"][number])


def spoken(row: list[Any]) -> str:
    ids, mask, *_ = row
    return str(TOKENIZER.decode(ids[mask.index(True) :]))


def test_dialogues_have_the_form_that_expression_and_template_give_them(ranks: Results) -> None:
    turn = rf"(?:{CALL}<\|eos\|>\ntool:(\d+|{{'error': 'seven is not for sale'}})<\|eos\|>\nassistant:)"
    texts = [spoken(row) for number in range(2) for row in rows_of(ranks, "tools K=2", number)]
    for text in texts:
        whole = re.fullmatch(rf"{turn}*([07]|{CALL})<\|eos\|>", text)
        cut_off = len(TOKENIZER(text)["input_ids"]) == LIMIT and re.match(rf"{turn}+<tool_c", text)
        assert whole or cut_off, text
        for asked, answer in re.findall(r'"x": (\d)\}\}</tool_call><\|eos\|>\ntool:(\d+)', text):
            assert int(answer) == 2 * int(asked)
        assert len(TOKENIZER(text)["input_ids"]) <= LIMIT
    counts = [text.count("tool:") for text in texts]
    assert max(counts) >= 2
    assert min(counts) == 0


def test_only_what_engines_sampled_is_learned_from(ranks: Results) -> None:
    for ids, mask, logprobs, _ in rows_of(ranks, "tools K=2") + rows_of(ranks, "custom"):
        start = mask.index(True)
        text = "".join(
            TOKENIZER.decode([token]) if own else "·" for token, own in zip(ids[start:], mask[start:], strict=True)
        )
        assert "tool:" not in text
        assert "assistant:" not in text
        assert " and?" not in text
        assert [value for value, own in zip(logprobs, mask, strict=True) if not own] == [0.0] * mask.count(False)
        assert all(value <= 0 for value in logprobs)


def test_dialogues_do_not_depend_on_the_number_of_engines(ranks: Results) -> None:
    for number in range(2):
        assert rows_of(ranks, "tools K=1", number) == rows_of(ranks, "tools K=2", number)
    assert rows_of(ranks, "tools ahead") == rows_of(ranks, "tools K=2")
    texts = {spoken(row) for row in rows_of(ranks, "tools K=2")}
    assert len(texts) > 4


@pytest.mark.parametrize(("scenario", "temperature"), [("tools K=2", 2.0), ("custom", 1.0), ("policy", 2.0)])
def test_the_first_gradient_is_that_of_the_sampled_tokens_alone(
    ranks: Results, scenario: str, temperature: float
) -> None:
    """Against the gradient of -sum(advantage * log-probability) / tokens, with plain autograd."""
    model = tiny_model(max_position_embeddings=WINDOW)
    rows = rows_of(ranks, scenario)
    num_tokens = sum(sum(mask) for _, mask, _, _ in rows)
    for ids, mask, _, advantage in rows:
        logprobs = (model(torch.tensor([ids])).logits[0, :-1] / temperature).log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
        (-(advantage * chosen[torch.tensor(mask)[1:]]).sum() / num_tokens).backward()
    wanted = {name: parameter.grad.flatten() for name, parameter in model.named_parameters()}  # type: ignore[union-attr]
    scale = min(1.0, 1.0 / float(torch.cat(list(wanted.values())).norm()))  # the trainer clips
    for rank in ranks:
        for name, gradient in rank[scenario]["gradients"].items():
            torch.testing.assert_close(torch.tensor(gradient), scale * wanted[name], rtol=1e-3, atol=2e-6)
    assert max(float(gradient.abs().max()) for gradient in wanted.values()) > 1e-2


def test_an_extra_field_of_the_rollout_function_is_the_reward(ranks: Results) -> None:
    rows = rows_of(ranks, "custom")
    on = [False in row[1][row[1].index(True) :] for row in rows]
    assert 0 < sum(on) < len(rows)
    assert ranks[0]["custom"]["logs"][0]["reward"] == pytest.approx(sum(on) / len(rows))
    # Each rank asked for its rows once, and for some of them again.
    log = ranks[0]["custom"]["logs"][0]
    assert log["engine/0/prompts"] + log["engine/1/prompts"] == len(rows) + sum(on)
    for row, went_on in zip(rows, on, strict=True):
        assert (" and?" in spoken(row)) is went_on


def test_figures_say_how_often_tools_were_called(ranks: Results) -> None:
    texts = [spoken(row) for row in rows_of(ranks, "tools K=2")]
    log = ranks[0]["tools K=2"]["logs"][0]
    calls = [x for text in texts for x in re.findall(r'"x": (\d)\}\}</tool_call><\|eos\|>', text)]  # answered or not
    failures = calls.count("7")
    assert log["tools/call_frequency"] == pytest.approx(len(calls) / len(texts))
    assert log["tools/failure_frequency"] == pytest.approx(failures / len(calls))
    assert log["reward"] == pytest.approx(sum(text.count("tool:") for text in texts) / len(texts))


def test_every_rank_generates_for_itself_without_vllm(ranks: Results) -> None:
    log = ranks[0]["policy"]["logs"][0]
    assert log["engine/0/prompts"] == log["engine/1/prompts"] == 2
    for log in ranks[0]["policy"]["logs"]:
        assert log["sampling/sampling_logp_difference/max"] < 1e-4
    for scenario in ranks[0]:
        assert ranks[0][scenario]["weights"] == ranks[1][scenario]["weights"], scenario
