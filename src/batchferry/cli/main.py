"""The ``batchferry`` command: every subcommand by name, and what becomes of errors nobody caught."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from batchferry import __version__
from batchferry.cli import (
    demo,
    doctor,
    hold,
    plan,
    produce,
    replay,
    report,
    results,
    run,
    schemas,
    settings,
    simulate,
    status,
    sweep,
    validate,
)
from batchferry.cli.console import complain
from batchferry.cli.exits import Exit, epilog
from batchferry.domain.errors import BatchferryError, ConfigError, GateRefused, KafkaRefused, KafkaUnavailable

cli = typer.Typer(
    name="batchferry",
    help="LLM requests on a Kafka topic become half-price provider batch jobs and come back as results.",
    epilog=epilog(),
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"batchferry {__version__}")
        raise typer.Exit


@cli.callback()
def _root(
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    pass


for _name, _command in (
    ("run", run.run),
    ("demo", demo.demo),
    ("validate", validate.validate),
    ("produce", produce.produce),
    ("results", results.results),
    ("status", status.status),
    ("batches", status.batches),
    ("show", status.show),
    ("hold", hold.hold),
    ("release", hold.release),
    ("flush", hold.flush),
    ("cancel", hold.cancel),
    ("rescue", hold.rescue),
    ("replay", replay.replay),
    ("report", report.report),
    ("plan", plan.plan),
    ("doctor", doctor.doctor),
    ("sweep", sweep.sweep),
    ("settings", settings.settings),
    ("schemas", schemas.schemas),
    ("simulate", simulate.simulate),
):
    cli.command(_name, epilog=epilog())(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and leave the process with one of the codes in ``exits``.

    What is expected to go wrong ends in a message with a remedy; a traceback means a bug.
    """
    raise SystemExit(call(arguments))


def call(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    # What libraries warn of is told by the commands in their own words, with a remedy; `run` sets its own log up.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        answer = cli(arguments, standalone_mode=False)
    except typer.Exit as left:
        return left.exit_code
    except ConfigError as error:
        complain("the settings cannot be used:", *error.faults)
        return Exit.USAGE
    except GateRefused as error:
        complain("a start-up check refuses:", *error.findings)
        return Exit.REFUSED
    except KafkaRefused as error:  # it is up and was reached: what helps stands in the error
        complain(f"Kafka refuses: {error}")
        return Exit.FAILED
    except KafkaUnavailable as error:
        complain(
            f"Kafka cannot be used: {error}",
            "remedy: start the cluster or correct kafka.bootstrap_servers (KAFKA_BOOTSTRAP_SERVERS); "
            "'batchferry doctor' looks at everything",
        )
        return Exit.FAILED
    except BatchferryError as error:
        complain(str(error))
        return Exit.FAILED
    except (typer.Abort, KeyboardInterrupt):
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left (as ``head`` does). Nothing may be written at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK
    except Exception as error:
        if (shown := _usage(error)) is not None:
            return shown
        raise
    return answer if isinstance(answer, int) else Exit.OK


def _usage(error: Exception) -> int | None:
    """The exit code of an error in the flags, shown as the command line library would; None for any other."""
    show = getattr(error, "show", None)
    code = getattr(error, "exit_code", None)
    if not callable(show) or not isinstance(code, int):
        return None
    show()
    return code


if __name__ == "__main__":
    main()
