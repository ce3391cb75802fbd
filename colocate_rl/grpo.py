"""Command line: ``accelerate launch --num_processes N-K -m colocate_rl.grpo --num-vllm-gpus K ...``.

Nothing heavy is imported until the arguments are parsed and everything that can be checked cheaply is checked.
"""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_type_hints

from colocate_rl import peft_flags, trl_only
from colocate_rl.errors import ColocateError, ConfigError, DataError, PeerError, is_only_here
from colocate_rl.lifeline import follow_launcher
from colocate_rl.options import SECTIONS, dictionary, option_fields
from colocate_rl.paths import FILE_FORMATS, looks_like_path

if TYPE_CHECKING:
    from colocate_rl.config import GRPOConfig

DESCRIPTION = """\
Train a language model with GRPO. K vLLM engines generate inside K of the training processes, on GPUs of their own:
N GPUs, N-K processes, one launch.

  accelerate launch --num_processes 6 -m colocate_rl.grpo --num-vllm-gpus 2 \\
      --model Qwen/Qwen2.5-1.5B-Instruct --dataset problems.jsonl --reward-funcs rewards:correct
"""
EPILOG = """\
Every transformers.TrainingArguments setting is accepted too, such as --output_dir (default: MODEL-GRPO),
--per_device_train_batch_size (8 completions per rank and micro-batch), --gradient_accumulation_steps, --max_steps,
--save_steps, --resume_from_checkpoint (true, or a checkpoint's folder), --report_to. Flags may be written with dashes
or underscores. Lists are separated by blanks (device numbers by commas), dictionaries are JSON.
"""


def build_parser() -> argparse.ArgumentParser:
    """The arguments of the script itself: what to train on what, for which reward."""
    parser = argparse.ArgumentParser(
        prog="colocate_rl.grpo",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("What to train")
    add = group.add_argument
    add("-h", "--help", action="store_true", help="Show this text and exit.")
    add("--config", metavar="FILE", help="YAML file of any of these settings; flags win over it.")
    add("--model", "--model_name_or_path", metavar="NAME", help="Folder or hub name of a causal language model.")
    add(
        "--dataset",
        "--dataset_name",
        metavar="NAME",
        help="JSON, JSONL, Parquet or CSV file, saved folder, or hub name.",
    )
    add("--dataset_config", metavar="NAME", help="Configuration of a hub data set.")
    add("--dataset_train_split", metavar="NAME", default="train", help="Split to train on (default: train).")
    add(
        "--dataset_streaming",
        action="store_true",
        help="Read the training set while training, instead of all of it before; needs --max_steps.",
    )
    add("--eval_dataset", metavar="NAME", help="Like --dataset, to evaluate on.")
    add("--dataset_test_split", metavar="NAME", default="test", help="Split to evaluate on (default: test).")
    add(
        "--reward_funcs",
        metavar="PATH",
        nargs="+",
        help="Reward functions: package.module:function (the working directory is searched), or one of "
        "colocate_rl.rewards, such as accuracy_reward or 'get_soft_overlong_punishment(max_completion_len=512, "
        "soft_punish_cache=64)'.",
    )
    add(
        "--reward_model",
        "--reward_model_name_or_path",
        metavar="NAME",
        help="Folder or hub name of a reward model (a sequence classifier with one label), beside or instead of "
        "functions.",
    )
    add("--dtype", metavar="TYPE", help="Number type of the policy's weights (default: float32).")
    add("--attn_implementation", metavar="NAME", help="Attention implementation of the policy.")
    add("--live_table", action="store_true", help="Print one row per log instead of a progress bar.")
    peft_flags.add_flags(parser)
    return parser


def help_text() -> str:
    """The whole help, made without torch or transformers."""
    parser = build_parser()
    group: Any = parser
    for item in option_fields():
        if item.name in SECTIONS:
            group = parser.add_argument_group(SECTIONS[item.name])
        text = item.metadata["help"].replace("%", "%%") + f" (default: {item.default})"
        group.add_argument(f"--{item.name}", metavar="X", help=text)
    return parser.format_help()


def normalise_flags(arguments: Sequence[str]) -> list[str]:
    """Writes every long flag with underscores; values are left alone."""
    out = []
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            word = "--" + flag[2:].replace("-", "_") + equals + value
        out.append(word)
    return out


def parse_script(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The script's own arguments and the words that are left for the configuration, a ``--config`` file first.

    The namespace also has ``unset``, the names of settings that the file sets to null.

    Raises:
        ConfigError: for a file that cannot be used.
    """
    parser = build_parser()
    words = normalise_flags(arguments)
    script, rest = parser.parse_known_args(words)
    unset: list[str] = []
    if script.config:
        from colocate_rl.configfile import read_settings

        switches = [action.dest for action in parser._actions if action.nargs == 0]
        settings = read_settings(script.config, switches)
        script, rest = parser.parse_known_args([*settings.words, *words])
        unset = [name for name in settings.unset if name not in vars(script)]
    script.unset = unset
    return script, rest


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with status 1 and one message when something cannot work."""
    follow_launcher()
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        script, rest = parse_script(given)
        if script.help:
            print(help_text())
            return
        _check_cheaply(script)
        from colocate_rl.launch import ensure_ranks

        ensure_ranks("colocate_rl.grpo", given)
        _train(script, rest)
    except (ConfigError, DataError) as error:
        if int(os.environ.get("LOCAL_RANK", 0)) == 0 or is_only_here(error):
            print(f"colocate_rl: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except PeerError as error:
        print(f"colocate_rl: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None


def _check_cheaply(script: argparse.Namespace) -> None:
    for name in ("model", "dataset"):
        if not getattr(script, name):
            raise ConfigError(f"--{name} is missing. See --help for all of them.")
    peft_flags.check_flags(script)
    if not (script.reward_funcs or script.reward_model):
        raise ConfigError("--reward-funcs is missing, and so is --reward-model. See --help for all of them.")
    for flag, what in (
        ("model", "Model folder"),
        ("reward_model", "Reward model folder"),
        ("dataset", "Data set"),
        ("eval_dataset", "Data set"),
    ):
        if getattr(script, flag):
            _check_local(getattr(script, flag), what, "--" + flag.replace("_", "-"))


def _check_local(name: str, what: str, flag: str) -> None:
    """Refuses a name that can only be a local path when nothing is there."""
    path = Path(name).expanduser()
    if (looks_like_path(name) or path.suffix in FILE_FORMATS) and not path.exists():
        raise ConfigError(f"{what} {name!r} does not exist. Check {flag}.")


def _train(script: argparse.Namespace, rest: Sequence[str]) -> None:
    from colocate_rl.scoring.names import resolve_reward

    rewards: list[Any] = [script.reward_model] if script.reward_model else []
    rewards += [resolve_reward(path) for path in script.reward_funcs or ()]
    args = _parse_config(script, rest)
    from transformers import PrinterCallback

    from colocate_rl.collectives import Collectives, leave
    from colocate_rl.data import load_rows
    from colocate_rl.trainer import GRPOTrainer

    resume = _checkpoint(args)
    with Collectives(args.device).failing_together("reading the data sets"):
        train = load_rows(
            script.dataset, script.dataset_train_split, script.dataset_config, streaming=script.dataset_streaming
        )
        evaluation = None
        if script.eval_dataset:
            evaluation = load_rows(script.eval_dataset, script.dataset_test_split, script.dataset_config)
        elif args.do_eval and Path(script.dataset).suffix in FILE_FORMATS:
            raise ConfigError(
                f"Evaluation is on, but {script.dataset!r} is one file, all of which is trained on. Name rows that "
                "are held out with --eval-dataset."
            )
        elif args.do_eval:
            evaluation = load_rows(script.dataset, script.dataset_test_split, script.dataset_config)
    callbacks: list[Any] = []
    if script.live_table:
        from colocate_rl.report import LiveTable

        args.disable_tqdm = True
        callbacks.append(LiveTable())
    trainer = GRPOTrainer(
        script.model,
        rewards,
        args,
        train,
        evaluation,
        callbacks=callbacks,
        quantization_config=peft_flags.quantization_config(script),
        peft_config=peft_flags.lora_config(script),
    )
    if script.live_table:
        trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model()
    trainer.save_state()
    trainer.close()
    leave()


def _checkpoint(args: "GRPOConfig") -> bool | str | None:
    """Where to go on, checked before engines are built; True: at the last checkpoint in the output folder."""
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import get_last_checkpoint

    resume = args.resume_from_checkpoint
    if resume is None or str(resume).lower() == "false":
        return None
    if str(resume).lower() == "true":
        folder = Path(args.output_dir or ".")
        if not folder.is_dir() or get_last_checkpoint(str(folder)) is None:
            raise ConfigError(
                f"--resume-from-checkpoint true: there is no checkpoint in --output_dir {str(folder)!r} to go on from. "
                "Remove the flag to start a run, or check the folder."
            )
        return True
    if not Path(resume).is_dir():
        raise ConfigError(
            f"--resume-from-checkpoint {resume!r} is no folder. Name a checkpoint, or 'true' for the last one."
        )
    if not (Path(resume) / TRAINER_STATE_NAME).is_file():
        raise ConfigError(
            f"--resume-from-checkpoint {resume!r} is no checkpoint: it has no {TRAINER_STATE_NAME}. Name a "
            "checkpoint-... folder; to start a run from the weights of a folder, name it as --model."
        )
    return resume


def _check_names(
    script: argparse.Namespace, rest: Sequence[str], parser: argparse.ArgumentParser, types: Mapping[str, Any]
) -> None:
    """Refuses settings that there are none of, and null where a setting takes a value; takes the others' null."""
    names = {option for action in parser._actions for option in action.option_strings}
    flags = [word.partition("=")[0] for word in rest if word.startswith("--")]
    unknown = [flag for flag in [*flags, *(f"--{name}" for name in script.unset)] if flag not in names]
    if unknown:
        trl_only.check_names(flag.lstrip("-").replace("-", "_") for flag in unknown)
        own = {option for action in build_parser()._actions for option in action.option_strings}
        close = difflib.get_close_matches(unknown[0], names | own, n=1, cutoff=0.75)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(f"There is no setting {unknown[0]}.{hint} See --help.")
    for name in script.unset:
        if type(None) not in get_args(types[name]):
            raise ConfigError(f"{name} is null in --config {script.config!r}, but it takes a value. Remove the line.")
    parser.set_defaults(**dict.fromkeys(script.unset))


def _parse_config(script: argparse.Namespace, rest: Sequence[str]) -> "GRPOConfig":
    from transformers import HfArgumentParser

    from colocate_rl.config import GRPOConfig

    class Parser(HfArgumentParser):
        """Reports a value that does not fit as one message instead of the whole usage."""

        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"{message}. See --help.")

    parser = Parser(GRPOConfig, allow_abbrev=False)  # type: ignore[arg-type]
    _check_names(script, rest, parser, get_type_hints(GRPOConfig))
    words = list(rest)
    if "--output_dir" not in {word.partition("=")[0] for word in words}:
        words.append(f"--output_dir={Path(script.model).resolve().name}-GRPO")
    try:
        parsed: tuple[Any, ...] = parser.parse_args_into_dataclasses(args=words, return_remaining_strings=True)
    except json.JSONDecodeError as error:
        raise ConfigError(f"A setting that takes a dictionary is no valid JSON: {error}") from None
    except ColocateError:
        raise
    except (ImportError, TypeError, ValueError) as error:  # what transformers says of settings that are its own
        raise ConfigError(f"{str(error).rstrip('.')}. See --help.") from error
    args: GRPOConfig = parsed[0]
    if stray := parsed[-1]:
        raise ConfigError(
            f"{' '.join(stray)!r} belongs to no setting. Numbers of devices are separated by commas: "
            f"--vllm-devices 2,3."
        )
    chosen = {"dtype": script.dtype, "attn_implementation": script.attn_implementation}
    given = {name: value for name, value in chosen.items() if value is not None}
    if given:
        args.model_init_kwargs = {**dictionary(args.model_init_kwargs), **given}
    return args


if __name__ == "__main__":
    main()
