"""A provider to rehearse with: a real HTTP server with OpenAI-shaped files, batches and synchronous calls.

Its batches live by a virtual clock and a script (``Scenario``), its connections break by plan (``FaultPlan``), and
it keeps a bill of every row it ran (``Bill``). It is a product feature and the test double of all tests that need
a provider.

This room must not know anything of the service: not Kafka, not the ledger, not what a wire id means. It knows the
provider's side only, from the provider's public documentation and published field reports.
"""

from batchferry.simulator.bill import Bill, RowCount
from batchferry.simulator.clock import ManualSimClock, SimClock
from batchferry.simulator.faults import CallName, FaultKind, FaultPlan, FaultRule
from batchferry.simulator.jsontext import body_digest
from batchferry.simulator.scenario import (
    TIER_1_ENQUEUED_TOKENS,
    BatchRule,
    Durations,
    JobError,
    Limits,
    Outage,
    Outcome,
    RowMatch,
    RowRule,
    RunCurve,
    Scenario,
    SyncScript,
    WebhookScript,
    WeightedOutcome,
    load_scenario,
    with_webhooks,
)
from batchferry.simulator.server import Simulator, create_app, run_forever, serve
from batchferry.simulator.settings import DEFAULT_KEY, ClockSettings, SimulatorSettings

__all__ = [
    "DEFAULT_KEY",
    "TIER_1_ENQUEUED_TOKENS",
    "BatchRule",
    "Bill",
    "CallName",
    "ClockSettings",
    "Durations",
    "FaultKind",
    "FaultPlan",
    "FaultRule",
    "JobError",
    "Limits",
    "ManualSimClock",
    "Outage",
    "Outcome",
    "RowCount",
    "RowMatch",
    "RowRule",
    "RunCurve",
    "Scenario",
    "SimClock",
    "Simulator",
    "SimulatorSettings",
    "SyncScript",
    "WebhookScript",
    "WeightedOutcome",
    "body_digest",
    "create_app",
    "load_scenario",
    "run_forever",
    "serve",
    "with_webhooks",
]
