"""Provider adapters: one folder each, every one playing ``ports.BatchProvider`` for one API family.

A folder holds the same files: ``adapter`` (the calls), ``synccall`` (one row at the ordinary endpoint), ``account``
(its settings), ``wire`` (payload shapes), ``errors`` (refused calls), ``statuses`` (status words), ``lines`` (result
lines) and ``classes`` (how a row's end is judged). What several need stands beside them: ``retries`` (which call is
repeated when), ``http`` (bounded reading, server hints, the provider's clock, saving a download), ``connection`` and
``calls`` (an account's connections and the calls over them), ``filecalls`` (those of batches that are made of files),
``synccall`` (one row, whatever the provider), ``failures`` (broken and refused calls), ``shapes`` (readers of JSON
answers), ``rowlines`` (result lines of OpenAI's shape) and ``verdicts`` (the walk of the class tables).

This room must not know batches of ours, ledgers, Kafka, or what is done about a failure; it translates once, at
its edge, and hands out values. Provider messages and answers are payload: never logged, never in an exception.
"""

from batchferry.providers.retries import DEFAULT_RETRIES, Call, CallRetries

__all__ = ["DEFAULT_RETRIES", "Call", "CallRetries"]
