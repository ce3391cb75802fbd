"""The benchmarks run on a machine without a GPU, and what they write says what it should."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import logprob_memory, timeline, train_packed
from benchmarks.compare_splits import figures
from benchmarks.planning import Law, Plan
from benchmarks.processes import REPOSITORY
from benchmarks.work import Work, WorkError, make_prompts, make_tokenizer

pytestmark = pytest.mark.e2e

ROW_KEYS = {
    "system", "num_vllm_gpus", "overlap", "step_s", "generate_s", "score_s", "train_s", "sync_s", "idle_train",
    "idle_generate", "tokens_per_s", "samples_per_s_per_gpu", "logprob_gap", "memory",
}  # fmt: skip


def compare_splits(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "benchmarks/compare_splits.py", "--model", "tiny", "--num-processes", "2"]
    command += ["--output", str(folder / "out"), "--models", str(folder / "models"), *flags]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=420)


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_compare_splits_measures_two_splits_and_survives_a_third(tmp_path):
    sizes = shlex.split("--prompts 4 --generations 4 --prompt-tokens 8 --new-tokens 8 --steps 3 --warmup-steps 1")
    done = compare_splits(tmp_path, "--num-vllm-gpus", "1", "2", "3", *sizes)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"machine", "versions", "command", "work", "rows"} <= results.keys()
    first, second, third = results["rows"]
    for row, engines in ((first, 1), (second, 2)):
        assert row["error"] is None
        assert row.keys() >= ROW_KEYS
        assert (row["system"], row["num_vllm_gpus"], row["overlap"]) == ("colocate_rl", engines, "none")
        assert row["step_s"] > row["generate_s"] > 0
        assert row["logprob_gap"] < 1e-3
        assert [record["sampled_tokens"] for record in row["records"]] == [4 * 4 * 8] * 3
        assert len(row["records"][0]["engine_generate_s"]) == engines
    assert "num_vllm_gpus=3" in third["error"]
    assert "failed [1]" in done.stdout
    assert "num_vllm_gpus=3" in done.stdout
    assert (tmp_path / "out" / "splits.png").stat().st_size > 10_000


def test_compare_splits_fails_only_when_every_split_failed(tmp_path):
    done = compare_splits(tmp_path, "--prompts", "3", "--generations", "3")
    assert done.returncode == 1
    assert "3 prompts x 3 completions = 9 cannot be shared evenly by 2 training ranks" in done.stdout


def test_logprob_memory_grows_with_the_chunk_not_with_the_tokens(tmp_path, capfd):
    sizes = shlex.split("--device cpu --hidden 16 --vocab 2048 8192 --tokens 512 2048 --chunks 64 256")
    assert logprob_memory.main([*sizes, "--output", str(tmp_path)]) == 0
    points = json.loads((tmp_path / "results.json").read_text())["points"]
    peak = {(point["tokens"], point["vocab"], point["chunk"]): point["peak_mib"] for point in points}
    assert peak[2048, 8192, None] > 3.5 * peak[512, 8192, None]  # full logits grow with the tokens
    for chunk in (64, 256):
        assert peak[2048, 8192, chunk] < 1.2 * peak[512, 8192, chunk]  # these do not
    assert peak[2048, 8192, 256] > 3 * peak[2048, 8192, 64]  # they grow with the chunk
    assert peak[2048, 8192, 64] < peak[2048, 8192, None] / 20
    assert (tmp_path / "logprob_memory.png").stat().st_size > 10_000
    assert "chunk 256" in capfd.readouterr().out


def test_train_packed_computes_less_for_the_same_loss(tmp_path, capfd):
    sizes = shlex.split("--device cpu --tokens 1500 --shortest 8 --longest 256 --rows 4 --one 512 --repeats 1")
    assert train_packed.main([*sizes, "--output", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    first, *others = results["ways"]
    for way in others:
        assert way["loss"] == pytest.approx(first["loss"], rel=1e-5)
        if way["name"].startswith("packed"):
            assert way["computed_tokens"] == results["tokens"] < 0.7 * first["computed_tokens"]
    assert others[-1]["passes"] == -(-results["tokens"] // 1024)
    assert results["one_micro_batch"]["tokens"] == 512
    assert "packed, 1,024 tokens" in capfd.readouterr().out


def test_generation_measures_every_way_and_takes_steps_apart(tmp_path):
    sizes = shlex.split("--model tiny --cases 2x2x6 3x2x6 --prompt-tokens 8 --rounds 1")
    command = [sys.executable, "benchmarks/generation.py", *sizes, "--output", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["obstacle"] is None
    assert [row["sequences"] for row in results["rows"]] == [4, 6]
    for row in results["rows"]:
        assert row["seconds"].keys() == {"lean", "usual", "LLM.generate"}
        assert row["speedup"] == row["seconds"]["LLM.generate"] / row["seconds"]["lean"]
        for parts in row["parts_ms"].values():
            assert parts["steps"] == 6
            assert 0 < parts["update"] + parts["launch"] < parts["step"]
        assert row["parts_ms"]["lean"]["outputs"] == 0 < row["parts_ms"]["usual"]["outputs"]
    assert "ms per step" in done.stdout


def test_a_timeline_has_a_row_for_each_rank_and_engine(tmp_path):
    spans = [("sync", 10, 11), ("generate", 11, 14), ("train", 14, 16), ("sync", 16, 17), ("generate", 17, 20)]
    events = [{"rank": r, "phase": p, "start": s, "end": e} for r in (0, 1) for p, s, e in spans]
    events += [{"engine": 0, "phase": "generate", "start": s, "end": e} for s, e in ((11.5, 13), (17, 19))]
    path = tmp_path / "timeline.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    rows = timeline.lanes(timeline.load(path))
    assert list(rows) == ["rank 0", "rank 1", "engine 0"]
    assert [(e["phase"], e["start"], e["end"]) for e in rows["rank 1"]][:2] == [("sync", 0, 1), ("wait", 1, 4)]
    assert sorted((e["phase"], e["start"]) for e in rows["engine 0"]) == [
        ("generate", 1.5), ("generate", 7), ("sync", 0), ("sync", 6),
    ]  # fmt: skip
    last = timeline.load(path, num_steps=1)
    assert min(event["start"] for event in last) == 0
    assert {event["phase"] for event in last} == {"sync", "generate"}
    timeline.draw(last, tmp_path / "timeline.png", "the last step")
    assert (tmp_path / "timeline.png").stat().st_size > 5_000


def test_a_step_uses_exactly_the_asked_completions():
    work = Work(prompts=6, generations=4, micro_batch=5)
    assert work.rows(1) == (4, 6)
    assert work.rows(2) == (4, 3)
    assert work.rows(3) == (4, 2)
    assert work.rows(8) == (3, 1)
    with pytest.raises(WorkError, match="24 cannot be shared evenly by 5"):
        work.rows(5)


def test_completions_end_by_chance_where_a_mean_is_given():
    fixed, varied = Work(), Work(model="tiny", new_tokens=100, mean_tokens=10)
    assert fixed.sampling() == {"ignore_eos": True, "stop_token_ids": []}
    ends = varied.sampling()["stop_token_ids"]
    assert len(ends) == 300 // 10
    assert max(ends) < 300  # ids that the model can sample
    with pytest.raises(WorkError, match="mean_tokens=10 needs random weights"):
        Work(model="some/folder", mean_tokens=10)


def figures_of(work: Work, *sampled: int) -> dict[str, Any]:
    times = dict.fromkeys(("step_s", "generate_s", "score_s", "train_s", "sync_s"), 2.0)
    records = [{"step": step, **times, "sampled_tokens": tokens} for step, tokens in enumerate(sampled, start=1)]
    others = dict.fromkeys(("micro_batch", "micro_batches", "memory", "versions"), 0)
    return figures({"records": records, **others}, work, num_devices=1)


def test_speeds_count_the_tokens_that_were_sampled():
    work = Work(model="tiny", prompts=2, generations=2, prompt_tokens=5, new_tokens=100, steps=4, warmup_steps=1)
    found = figures_of(replace(work, mean_tokens=10), 999, 30, 50, 40)
    assert (found["sampled_tokens"], found["tokens_per_s"], found["train_tokens_per_s"]) == (40, 20, (40 + 4 * 5) / 2)
    assert figures_of(work, 999, 400, 400, 400)["tokens_per_s"] == 200
    with pytest.raises(WorkError, match="Step 3 sampled 399 of 400 tokens"):
        figures_of(work, 400, 400, 399, 400)


def test_prompts_have_exactly_the_asked_tokens_and_differ():
    tokenizer = make_tokenizer()
    prompts = make_prompts(tokenizer, 20, 33, seed=0)
    assert len(set(prompts)) == 20
    assert {len(tokenizer(prompt)["input_ids"]) for prompt in prompts} == {33}


def test_the_fit_finds_the_parts_that_do_not_scale():
    law = Law.fit([(1, 9.0), (2, 5.0), (4, 3.0)])
    assert (law.fixed, law.per_gpu) == pytest.approx((1.0, 8.0))
    assert Law.fit([(2, 3.0)]) == Law(0.0, 6.0)
    assert Law.fit([(1, 2.0), (2, 3.0)]) == Law(2.5, 0.0)  # more GPUs did not help


def test_the_choice_of_k_follows_the_formula_up_to_half_of_the_devices():
    assert Plan(Law(0, 4.0), Law(0, 36.0), 0.0).formula(8) == pytest.approx(2.0)
    assert Plan(Law(0, 4.0), Law(0, 36.0), 0.0).best(8) == 2
    assert Plan(Law(0, 90.0), Law(0, 10.0), 0.0).best(8) == 4
    assert Plan(Law(5.0, 0.0), Law(0, 10.0), 0.0).best(8) == 1  # a second engine would not shorten generation
