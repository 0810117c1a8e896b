"""The OpenAI-shaped batch API: files and batches at OpenAI and at the many servers that speak like it.

Must not know which server it talks to: every deviation is either accepted silently (unknown statuses, absent or
null members, other error bodies) or a setting of ``OpenAIAccount``.
"""

from batchferry.providers.openai.account import CallTimeouts, OpenAIAccount
from batchferry.providers.openai.adapter import OpenAIProvider

__all__ = ["CallTimeouts", "OpenAIAccount", "OpenAIProvider"]
