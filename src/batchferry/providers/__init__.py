"""Provider adapters: one folder each, every one playing ``ports.BatchProvider`` for one API family.

A folder holds the same files: ``adapter`` (the calls), ``synccall`` (one row at the ordinary endpoint), ``account``
(its settings), ``wire`` (payload shapes), ``errors`` (refused calls), ``statuses`` (status words), ``lines`` (result
lines) and ``classes`` (how a row's end is judged). What all need stands beside them: ``retries`` (which call is
repeated when) and ``http`` (bounded reading, server hints, the provider's clock, saving a download).

This room must not know batches of ours, ledgers, Kafka, or what is done about a failure; it translates once, at
its edge, and hands out values. Provider messages and answers are payload: never logged, never in an exception.
"""

from batchferry.providers.retries import DEFAULT_RETRIES, Call, CallRetries

__all__ = ["DEFAULT_RETRIES", "Call", "CallRetries"]
