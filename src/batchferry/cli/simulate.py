"""``batchferry simulate``: a provider to rehearse with, and on request a broker beside it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from batchferry.cli.console import err, print_json, print_line, wants_json
from batchferry.cli.options import JsonOption
from batchferry.domain.errors import ConfigError


def simulate(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port; 0 takes a free one.")] = 8089,
    scenario: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE", help="One of --list-scenarios, or YAML or JSON: durations, outcomes, limits, faults."
        ),
    ] = None,
    list_scenarios: Annotated[bool, typer.Option("--list-scenarios", help="List the library and end.")] = False,
    show_scenario: Annotated[
        str | None, typer.Option(metavar="NAME", help="Print a scenario's file, to be changed and given as FILE.")
    ] = None,
    faults: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML or JSON: a list of transport faults.")
    ] = None,
    speed: Annotated[float, typer.Option(help="How many virtual seconds pass in one real second.")] = 1.0,
    origin: Annotated[
        str | None,
        typer.Option(
            metavar="INSTANT",
            help="What the clock showed when it was --started (ISO 8601). Let a fast one begin in the past: Kafka "
            "refuses records that are an hour ahead.",
        ),
    ] = None,
    started: Annotated[
        str | None, typer.Option(metavar="INSTANT", help="Wall-clock instant of --origin; left out: now.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keeps files, batches and bill; left out: a folder that goes with the end."),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option(metavar="KEY[=PROJECT]", help="API key to accept; may be given again.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal outcomes.")] = 0,
    idle_exit_s: Annotated[
        float | None, typer.Option(min=1, help="End after so many real seconds without a call; left out: never.")
    ] = None,
    webhook_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Send webhooks there, instead of where the scenario says."),
    ] = None,
    webhook_secret_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the secret that proves them, instead of the scenario's."),
    ] = None,
    with_broker: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run an embedded Kafka broker beside it, with its data in this folder."),
    ] = None,
    as_json: JsonOption = None,
) -> None:
    """Serve batches and calls of five providers' APIs from a script, with a bill of every row it ran.

    Prints its address when it is ready: with --json as one line of JSON. Ends by SIGTERM, Ctrl-C or idleness.
    """
    from batchferry import app  # noqa: PLC0415 - see run
    from batchferry.simulator import Scenario, load_scenario, scenarios, with_webhooks  # noqa: PLC0415 - see run
    from batchferry.simulator.surfaces import SURFACES  # noqa: PLC0415 - see run

    show_json = wants_json(as_json)
    if list_scenarios:
        _list(show_json)
        return
    if show_scenario is not None:
        print_line(scenarios.path_of(show_scenario).read_text(encoding="utf-8").rstrip("\n"))
        return
    scenario_file = None if scenario is None else scenarios.path_of(scenario)
    clock = _clock(speed, origin, started)
    scripted = Scenario() if scenario_file is None else load_scenario(scenario_file)
    played = with_webhooks(scripted, webhook_url, webhook_secret_file)
    idle = {surface: members for surface, members in played.not_played().items() if surface in played.surfaces}
    hook = played.webhooks

    def ready(base_url: str, bootstrap: str | None) -> None:
        if show_json:
            line: dict[str, object] = {
                "event": "ready",
                "base_url": base_url,
                "admin_url": base_url.removesuffix("/v1") + "/_sim",
                "surfaces": list(played.surfaces),
                "not_played": idle,
                "webhooks_to": None if hook is None else hook.receiver,
            }
            print_json(line if bootstrap is None else {**line, "kafka_bootstrap_servers": bootstrap}, indent=False)
            return
        print_line(f"simulator: {base_url}  (bill and faults: {base_url.removesuffix('/v1')}/_sim)")
        if bootstrap is not None:
            print_line(f"broker:    {bootstrap}")
        if hook is not None:
            print_line(f"webhooks:  to {hook.receiver}  (how each fared: {base_url.removesuffix('/v1')}/_sim/webhooks)")
        if len(played.surfaces) < len(SURFACES):
            err().print(f"This scenario is meant for {', '.join(played.surfaces)}.")
        for surface, members in idle.items():
            err().print(f"{surface} has nothing for {', '.join(members)}: without effect there.")
        err().print("Ctrl-C ends it.")

    app.run_simulator(
        host=host,
        port=port,
        scenario_file=scenario_file,
        faults_file=faults,
        clock=clock,
        data_dir=data_dir,
        keys=_keys(key or []),
        seed=seed,
        idle_exit_s=idle_exit_s,
        broker_dir=with_broker,
        webhook_url=webhook_url,
        webhook_secret_file=webhook_secret_file,
        on_ready=ready,
    )


def _list(show_json: bool) -> None:
    """The library: name and title, with --json all that is said of each."""
    from batchferry.simulator import scenarios  # noqa: PLC0415 - see run

    found = {name: scenarios.load(name) for name in scenarios.names()}
    if show_json:
        print_json(
            [
                {
                    "name": name,
                    "title": one.title,
                    "about": one.about,
                    "client_must": one.client_must,
                    "surfaces": list(one.surfaces),
                }
                for name, one in found.items()
            ]
        )
        return
    width = max(map(len, found))
    for name, one in found.items():
        print_line(f"{name:<{width}}  {one.title}")


def _clock(speed: float, origin: str | None, started: str | None) -> dict[str, object]:
    """The three numbers of the clock.

    Raises:
        ConfigError: with every fault.
    """
    clock: dict[str, object] = {"speed": speed}
    faults = []
    for name, text in (("origin", origin), ("started", started)):
        if text is None:
            continue
        try:
            instant = datetime.fromisoformat(text)
        except ValueError:
            instant = None
        if instant is None or instant.tzinfo is None:
            faults.append(f"--{name}: {text!r} is no ISO 8601 instant with a zone, such as 2026-01-31T18:00:00Z")
            continue
        clock[name] = instant
    if not speed > 0:
        faults.append(f"--speed: {speed:g} is not above 0; 3600 makes an hour of each second")
    if faults:
        raise ConfigError(faults)
    return clock


def _keys(given: list[str]) -> dict[str, str]:
    """API keys and their projects; keys without a project share one."""
    return {name: project or "proj_simulated" for name, _, project in (one.partition("=") for one in given)}
