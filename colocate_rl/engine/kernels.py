"""Kernels that draw one token per row of logits and give its log-probability, reading the logits once.

Inverse transform sampling in two stages: the row's mass is summed block by block, one random number chooses the block,
and only this block is read again to choose the token. A Gumbel maximum, which vLLM's sampler takes, needs a random
number and two logarithms per entry of the vocabulary instead, and its log-probabilities two more readings.

Imported where there is a GPU only: triton does not come with CPU builds of torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Entries of the vocabulary that are summed together."""


@triton.jit
def _sum_blocks(  # type: ignore[no-untyped-def]
    logits, stride, places, temperatures, maxima, sums, num_blocks, vocabulary, BLOCK: tl.constexpr
):
    """The largest scaled logit of each block of each row, and the sum of exp(logit - largest)."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + tl.load(places + row))
    column = number * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + row * stride + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32)
    values = values / temperature
    largest = tl.max(values, axis=0)
    reference = tl.where(largest == float("-inf"), 0.0, largest)  # a block that a grammar rules out weighs nothing
    tl.store(maxima + row * num_blocks + number, largest)
    tl.store(sums + row * num_blocks + number, tl.sum(tl.exp(values - reference), axis=0))


@triton.jit
def _draw(  # type: ignore[no-untyped-def]
    logits,
    stride,
    places,
    temperatures,
    seeds,
    positions,
    rows,
    maxima,
    sums,
    num_blocks,
    vocabulary,
    tokens,
    logprobs,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """A token of each row by its block's mass, then by its own. Masses are float64: many small ones add up."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    temperature = tl.load(temperatures + place)

    number = tl.arange(0, BLOCKS)
    inside = number < num_blocks
    largest = tl.load(maxima + row * num_blocks + number, mask=inside, other=float("-inf"))
    reference = tl.max(largest, axis=0)
    masses = tl.load(sums + row * num_blocks + number, mask=inside, other=0.0).to(tl.float64)
    masses *= tl.exp((largest - reference).to(tl.float64))
    total = tl.sum(masses, axis=0)

    # 53 random bits, from Philox keyed by the request's seed and counted by the token's position.
    high, low, _, _ = tl.randint4x(tl.load(seeds + place), tl.load(positions + tl.load(rows + row)))
    high, low = high.to(tl.uint32, bitcast=True) >> 5, low.to(tl.uint32, bitcast=True) >> 6
    share = (high.to(tl.float64) * 67108864.0 + low.to(tl.float64)) * (1.0 / 9007199254740992.0)

    target = share * total
    chosen = tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)
    chosen = tl.minimum(chosen, tl.max(tl.where(masses > 0.0, number, 0), axis=0))  # sums are rounded
    target -= tl.sum(tl.where(number < chosen, masses, 0.0), axis=0)
    target = tl.maximum(target, 0.0) / tl.sum(tl.where(number == chosen, masses, 0.0), axis=0)  # a share of the block

    column = tl.arange(0, BLOCK)
    entry = chosen * BLOCK + column
    values = tl.load(logits + row * stride + entry, mask=entry < vocabulary, other=float("-inf")).to(tl.float32)
    values = values / temperature
    weights = tl.exp((values - reference).to(tl.float64))
    target *= tl.sum(weights, axis=0)  # not its mass, which was summed in float32: the last entry would get the rest
    found = tl.sum((tl.cumsum(weights, axis=0) <= target).to(tl.int32), axis=0)
    found = tl.minimum(found, tl.max(tl.where(weights > 0.0, column, 0), axis=0))
    value = tl.sum(tl.where(column == found, values, 0.0), axis=0)
    tl.store(tokens + row, (chosen * BLOCK + found).to(tl.int64))
    tl.store(logprobs + row, ((value - reference).to(tl.float64) - tl.log(total)).to(tl.float32))


def draw(
    logits: torch.Tensor,
    places: torch.Tensor,
    temperatures: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    rows: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each row, sampled from softmax(logits / temperature).

    Args:
        logits: [rows, vocabulary], any floating type; -inf is never drawn. Not changed.
        places: [rows], each row's request as an index into the next two.
        temperatures: [requests] float32, above 0.
        seeds: [requests] int64; with the position it decides the draw, whatever else is in the batch.
        positions: [tokens] position of each token in its sequence.
        rows: [rows], each row's token as an index into ``positions``.

    Returns:
        token ids [rows] int64, and their log-probabilities [rows] float32, in nats.
    """
    num_rows, vocabulary = logits.shape
    num_blocks = triton.cdiv(vocabulary, BLOCK)
    maxima, sums = logits.new_empty(2, num_rows, num_blocks, dtype=torch.float32).unbind()
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    scaled: tuple[Any, ...] = (logits, logits.stride(0), places, temperatures)
    _sum_blocks[(num_rows, num_blocks)](*scaled, maxima, sums, num_blocks, vocabulary, BLOCK=BLOCK)
    _draw[(num_rows,)](
        *scaled,
        seeds,
        positions,
        rows,
        maxima,
        sums,
        num_blocks,
        vocabulary,
        tokens,
        logprobs,
        BLOCK=BLOCK,
        BLOCKS=triton.next_power_of_2(num_blocks),
    )
    return tokens, logprobs
