"""The OpenAI-shaped batch API: files and batches at OpenAI and at the many servers that speak like it.

Must not know which server it talks to: every deviation is either accepted silently (unknown statuses, absent or
null members, other error bodies) or a setting of ``OpenAIAccount`` and its ``Dialect``.
"""

from batchferry.providers.openai.account import OpenAIAccount
from batchferry.providers.openai.adapter import OpenAIProvider

__all__ = ["OpenAIAccount", "OpenAIProvider"]
