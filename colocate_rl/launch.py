"""Making one launch line work everywhere.

``accelerate launch --num_processes N`` starts N processes on a machine with several GPUs, but on a machine without a
GPU it starts a single one and drops the number. :func:`ensure_ranks` notices that and starts the N ranks itself.
"""

import os
import sys
from collections.abc import Sequence

from colocate_rl.lifeline import die_with_parent


def ensure_ranks(module: str, arguments: Sequence[str]) -> None:
    """Replaces this process by the N ranks that its launch line asked for, where the launcher started only one.

    Does nothing under any launcher that set the ranks up, nor where there is a GPU.

    Args:
        module: what to run in each rank (``python -m``).
        arguments: of the module.
    """
    # With more than one process asked for, accelerate's single-process launcher sets MASTER_PORT but no ranks.
    if "MASTER_PORT" not in os.environ or "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return
    wanted = _asked_processes()
    if wanted < 2:
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(wanted)]
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.stdout.flush()
    die_with_parent(os.getppid())  # outlasts execv
    os.execv(sys.executable, [*command, "--module", module, *arguments])


def _asked_processes() -> int:
    """``--num_processes`` of the accelerate launcher that started this process, else of accelerate's own default."""
    import psutil
    from accelerate.commands.launch import launch_command_parser

    words = psutil.Process(os.getppid()).cmdline()
    starts = [position for position, word in enumerate(words) if word in ("launch", "accelerate.commands.launch")]
    starts += [position for position, word in enumerate(words) if word.endswith("accelerate-launch")]
    if not starts:
        return 1
    parsed, _ = launch_command_parser().parse_known_args(words[starts[0] + 1 :])
    if parsed.num_processes is None:
        return _configured_processes(parsed.config_file)
    return int(parsed.num_processes)


def _configured_processes(config_file: str | None) -> int:
    from accelerate.commands.config import default_config_file, load_config_from_file

    if config_file is None and not os.path.isfile(default_config_file):
        return 1
    return int(getattr(load_config_from_file(config_file), "num_processes", 1))
