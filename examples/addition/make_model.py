"""Make a tiny causal language model that adds numbers about half right, without any download.

``python -m examples.addition.make_model --out DIR --seed N``

The model imitates worked examples of mixed quality, as base models do: most of them forget to carry from the units into
the tens, and some end in a full stop that nobody asked for. It therefore knows how to add and also how to add wrongly,
and says both: reinforcement has something to choose between, and the choice carries over to problems it has not seen.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from examples.addition.task import Problem, make_splits

RECIPE_VERSION = 1
"""Part of the cache key; raise it whenever what is made here changes."""
RECIPE_FILE = "warm_start.json"

NUM_STEPS = 700
BATCH_SIZE = 96
MUON_LEARNING_RATE = 0.02
ADAMW_LEARNING_RATE = 3e-3

FORGOTTEN_CARRY = 0.75
"""Share of the carries into the tens that the worked examples forget."""
STRAY_FULL_STOP = 0.3
"""Share of the worked examples that end in a full stop, which the task does not want."""
MAX_ANSWER_TOKENS = 5
"""Three digits, a stray full stop and the end of the sequence."""

PAD, EOS = "<|pad|>", "<|end|>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level BPE tokenizer without merges: one token for each byte, hence for each digit."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_untrained(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    """Build the randomly initialised Qwen2 of a third of a million parameters."""
    config = Qwen2Config(
        vocab_size=320,  # the tokenizer's 258, rounded up to what engines pad a vocabulary to anyway
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def mixed_quality_answer(problem: Problem, generator: random.Random) -> str:
    """Write down a sum the way the warm start's imperfect authors do."""
    units = problem.left % 10 + problem.right % 10
    carry = units // 10
    if carry and generator.random() < FORGOTTEN_CARRY:
        carry = 0
    total = (problem.left // 10 + problem.right // 10 + carry) * 10 + units % 10
    return f"{total}." if generator.random() < STRAY_FULL_STOP else f"{total}"


def warm_start(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    generator: random.Random,
) -> None:
    """Train ``model`` to imitate mixed-quality answers to ``problems``."""
    optimizers = _optimizers(model)
    prompt_ids = {problem: tokenizer.encode(problem.prompt) for problem in problems}
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in "0123456789."}
    model.train()
    for step in range(NUM_STEPS):
        rows, labels = [], []
        for problem in generator.choices(problems, k=BATCH_SIZE):
            answer = [token_ids[token] for token in mixed_quality_answer(problem, generator)]
            answer.append(tokenizer.eos_token_id)
            padding = MAX_ANSWER_TOKENS - len(answer)
            rows.append(prompt_ids[problem] + answer + [tokenizer.pad_token_id] * padding)
            labels.append([-100] * len(prompt_ids[problem]) + answer + [-100] * padding)
        loss = model(input_ids=torch.tensor(rows), labels=torch.tensor(labels)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * _learning_rate_factor(step)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()


def _optimizers(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices (it learns to add in a tenth of AdamW's steps here), AdamW for the rest."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else rest).append(parameter)
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=0.1),
        torch.optim.AdamW(rest, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def _learning_rate_factor(step: int) -> float:
    """Warm up over 20 steps, then fall linearly to a fiftieth."""
    return min(1.0, (step + 1) / 20) * max(0.02, 1 - step / NUM_STEPS)


@torch.no_grad()
def sample_ids(
    model: Qwen2ForCausalLM, prompt_ids: torch.Tensor, temperature: float, num_tokens: int = MAX_ANSWER_TOKENS
) -> torch.Tensor:
    """Continue prompts of one length, [B, P] -> [B, num_tokens]; what follows the end token is meaningless."""
    ids = prompt_ids
    for _ in range(num_tokens):
        logits = model(input_ids=ids).logits[:, -1]
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            token = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
    return ids[:, prompt_ids.shape[1] :]


def measure_accuracy(
    model: Qwen2ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    temperature: float,
) -> float:
    """Share of ``problems`` answered exactly right, one attempt each; temperature 0 is greedy."""
    prompt_ids = torch.tensor([tokenizer.encode(problem.prompt) for problem in problems])
    completions = sample_ids(model, prompt_ids, temperature).tolist()
    right = 0
    for problem, completion in zip(problems, completions, strict=True):
        expected = [*tokenizer.encode(problem.answer), tokenizer.eos_token_id]
        right += completion[: len(expected)] == expected
    return right / len(problems)


def make_model(out: Path, seed: int) -> dict[str, Any]:
    """Write model and tokenizer to ``out``, or keep what an equal call left there.

    Args:
        out: Folder for the model, made if missing.
        seed: Decides the split, the initial weights and the warm start.

    Returns:
        Recipe version, seed, held-out accuracy (greedy and sampled at temperature 1), parameters and seconds.
    """
    recipe = out / RECIPE_FILE
    if recipe.exists():
        facts: dict[str, Any] = json.loads(recipe.read_text("utf-8"))
        if (facts["recipe_version"], facts["seed"]) == (RECIPE_VERSION, seed):
            return facts
    start = time.perf_counter()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small matrices gain nothing from more, and lose much on a busy machine
    torch.manual_seed(seed)
    splits = make_splits(seed)
    tokenizer = make_tokenizer()
    model = make_untrained(tokenizer)
    warm_start(model, tokenizer, splits.warm_start, random.Random(f"warm-start-{seed}"))
    facts = {
        "recipe_version": RECIPE_VERSION,
        "seed": seed,
        "accuracy_greedy": measure_accuracy(model, tokenizer, splits.held_out, temperature=0.0),
        "accuracy_sampled": measure_accuracy(model, tokenizer, splits.held_out, temperature=1.0),
        "num_parameters": model.num_parameters(),
        "seconds": round(time.perf_counter() - start, 1),
    }
    torch.set_num_threads(num_threads)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    recipe.write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    return facts


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make a tiny model that adds two numbers about half right.")
    parser.add_argument("--out", type=Path, required=True, help="Folder for the model.")
    parser.add_argument("--seed", type=int, default=1, help="Decides weights, warm start and split.")
    arguments = parser.parse_args()
    print(json.dumps(make_model(arguments.out, arguments.seed), indent=2))


if __name__ == "__main__":
    main()
