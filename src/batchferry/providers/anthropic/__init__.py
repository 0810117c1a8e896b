"""Anthropic's Message Batches: rows travel inside the create call, results come as one stream.

Must not know anything but this API. There are no files here, no metadata and no window to choose: a batch is known by
its rows' ids, its creation time and its counts. What stands for a result file outside this folder is
``results:<batch id>``; to delete it is to delete the batch.
"""

from batchferry.providers.anthropic.account import API_VERSION, AnthropicAccount
from batchferry.providers.anthropic.adapter import AnthropicProvider
from batchferry.providers.anthropic.params import check_params

__all__ = ["API_VERSION", "AnthropicAccount", "AnthropicProvider", "check_params"]
