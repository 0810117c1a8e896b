"""The local disk: a SQLite index of accepted rows, spool segments of ready request lines, and result files.

Everything here is a cache of Kafka, wiped at every start and never believed over it, so nothing is synced and
nothing is migrated. The room knows offsets, keys and bytes; it must NOT know Kafka, a provider, the ledger or
what a batch may do next. SQLite is imported here and nowhere else.
"""

from batchferry.store.state import LocalState

__all__ = ["LocalState"]
