"""The published contract: what may be produced to the input topic, and what is found on the output topics.

The models here describe what ``domain.requests`` reads and what ``domain.envelope`` writes; the files in ``schemas/``
are generated from them. Nothing here runs in the service: rendering and reading are done by ``domain`` on the hot
path, and tests hold the two together. This room must not know Kafka, providers or settings.
"""

from batchferry.messages.documents import asyncapi, check_schemas, schemas, write_schemas
from batchferry.messages.models import EventMessage, FailureMessage, RequestRecord, ResultMessage, SplitMessage

__all__ = [
    "EventMessage",
    "FailureMessage",
    "RequestRecord",
    "ResultMessage",
    "SplitMessage",
    "asyncapi",
    "check_schemas",
    "schemas",
    "write_schemas",
]
