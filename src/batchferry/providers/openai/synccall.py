"""One row at the ordinary endpoint of an OpenAI-shaped server, at the lane's own address and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from batchferry.domain.dialect import Dialect
from batchferry.domain.rows import SyncAnswer
from batchferry.providers.calls import path_segment
from batchferry.providers.synccall import SyncCaller, endpoint_address


def _for_lane(body: bytes, models: Mapping[str, str]) -> tuple[bytes, str]:
    """The body with the lane's model in place of the row's, and that model; without a ``model`` member as it was."""
    members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if "model" not in members:
        return body, ""
    model = msgspec.json.decode(members["model"], type=str)
    if model not in models:
        return body, model
    members["model"] = msgspec.Raw(msgspec.json.encode(models[model]))
    return msgspec.json.encode(members), models[model]


@dataclass(frozen=True, slots=True)
class LaneCaller:
    """Makes the calls of one account as its dialect wants them."""

    caller: SyncCaller
    dialect: Dialect

    async def call(self, endpoint: str, body: bytes, timeout_s: float) -> SyncAnswer:
        """As ``BatchProvider.answer`` says."""
        base_url = self.caller.base_url
        if self.dialect.sync_models or self.dialect.deployment_paths:
            body, model = _for_lane(body, self.dialect.sync_models)
            if self.dialect.deployment_paths:
                base_url = f"{base_url}/deployments/{path_segment(model)}"
        address = endpoint_address(base_url, self.dialect.endpoint(endpoint))
        return await self.caller.call(endpoint, body, timeout_s, address)
