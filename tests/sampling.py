"""What is asked of a function that draws tokens, whichever it is."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

Draw = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def chi_square(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """How far counts are from what is expected of them, in standard deviations of the chi-square distribution.

    Args:
        tokens: [draws] ids.
        probabilities: [vocabulary] float64.
    """
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    often = expected >= 5
    expected = torch.cat([expected[often], expected[~often].sum()[None]])
    counts = torch.cat([counts[often], counts[~often].sum()[None]])
    kept = expected > 0
    freedom = max(int(kept.sum()) - 1, 1)
    statistic = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    return float((statistic - freedom) / (2 * freedom) ** 0.5)


@dataclass(frozen=True)
class KernelCase:
    """Rows of the same logits, with two temperatures in turn."""

    rows: int
    vocabulary: int
    dtype: torch.dtype = torch.bfloat16
    scale: float = 4.0
    ruled_out: tuple[int, int] = (0, 0)
    temperatures: tuple[float, float] = (1.0, 0.7)

    def __str__(self) -> str:
        return f"{self.vocabulary}-{self.dtype}-{self.scale}-{self.ruled_out}"

    def arguments(self, device: torch.device) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(self.vocabulary)
        logits = self.scale * torch.randn(self.vocabulary, generator=generator)
        logits[slice(*self.ruled_out)] = -torch.inf
        table = logits.to(self.dtype).to(device).repeat(self.rows + 1, 1)[1:]  # a view of a larger tensor
        requests = torch.randperm(self.rows, generator=generator).int()
        temperatures = torch.tensor(self.temperatures)[torch.arange(self.rows) % 2]
        seeds = torch.randint(-(2**63), 2**63 - 1, (self.rows,), generator=generator)
        tokens = torch.randperm(2 * self.rows, generator=generator)
        positions = torch.randint(0, 4096, (2 * self.rows,), generator=generator)
        others = (requests, temperatures, seeds, positions, tokens[: self.rows])
        return [table, *(tensor.to(device) for tensor in others)]

    def check(self, draw: Draw, device: torch.device) -> None:
        arguments = self.arguments(device)
        logits, requests, temperatures = arguments[:3]
        before = logits[0].clone()
        found = draw(*arguments)
        assert torch.equal(logits[0], before)
        tokens, logprobs = (tensor.cpu() for tensor in found)
        assert (tokens.dtype, logprobs.dtype) == (torch.int64, torch.float32)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary
        rows = temperatures[requests.long()].cpu()
        for temperature in self.temperatures:
            of_it = rows == torch.tensor(temperature)
            expected = (before.double().cpu() / float(torch.tensor(temperature))).log_softmax(-1)
            assert (expected[tokens[of_it]] - logprobs[of_it]).abs().max() < 1e-4
            assert chi_square(tokens[of_it], expected.exp()) < 6
        again = draw(*arguments)
        assert torch.equal(again[0].cpu(), tokens)
        order = torch.randperm(self.rows, device=device)[: self.rows // 2]  # the rest of the batch decides nothing
        part = draw(logits[order], requests[order], *arguments[2:5], arguments[5][order])
        assert torch.equal(part[0].cpu(), tokens[order.cpu()])
        later = draw(*arguments[:4], arguments[4] + 1, arguments[5])
        assert not torch.equal(later[0].cpu(), tokens)


def kernel_cases(rows: int) -> list[KernelCase]:
    return [
        KernelCase(rows, 151_936 if rows >= 20_000 else 9_000, scale=3.0),
        KernelCase(rows, 4096),
        KernelCase(rows, 4097, torch.float32),
        KernelCase(rows, 50, torch.float16, scale=1.0),
        KernelCase(rows, 13_000, ruled_out=(100, 12_500)),
        KernelCase(rows, 8192, torch.float32, scale=7.0),
        KernelCase(rows, 300, scale=0.0),
    ]
