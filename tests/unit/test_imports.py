"""What importing the package and making a configuration leave alone: a notebook must still be able to fork ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.unit, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).parents[2]

COUNTED = """
import json, sys, traceback
import torch

asked = {}


def counted(name, answer):
    def ask(*args, **kwargs):
        asked.setdefault(stage, []).append(name + " by " + traceback.extract_stack()[-2].filename)
        return answer

    setattr(torch.cuda, name, ask)


# A GPU whose driver must not be touched: a process that has done so cannot be forked any more.
for name, answer in {
    "is_available": True, "device_count": 1, "_lazy_init": None, "is_bf16_supported": True, "set_device": None
}.items():
    counted(name, answer)
stage = "import"
import colocate_rl
from colocate_rl import GRPOConfig, GRPOTrainer
import colocate_rl.report, colocate_rl.report.command, examples.addition.task
stage = "config"
args = GRPOConfig(sys.argv[1], use_cpu=True, per_device_train_batch_size=8)
assert args.device.type == "cpu"
print(json.dumps({"asked": asked, "initialized": torch.cuda.is_initialized(), "vllm": "vllm" in sys.modules}))
"""


def test_neither_import_nor_a_cpu_configuration_asks_for_a_gpu(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(tmp_path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {"asked": {}, "initialized": False, "vllm": False}
