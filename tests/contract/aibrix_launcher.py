"""Starts AIBrix's batch server alone, its lines sent to one model address. Run by a Python that has ``aibrix``.

Its own command knows Kubernetes back ends and a dry run only; the library has a source for a plain address, which is
put in here. Files and jobs lie in the folder that ``STORAGE_LOCAL_PATH`` names.
"""

import argparse
import os

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--model-url", required=True)
wanted = parser.parse_args()
os.environ |= {"STORAGE_TYPE": "local", "METASTORE_TYPE": "local"}

import uvicorn  # noqa: E402 (the settings above are read at import)
from aibrix.batch.client import GatewayEndpointSource  # noqa: E402
from aibrix.metadata import app as metadata  # noqa: E402
from aibrix.metadata.setting import settings  # noqa: E402
from aibrix.storage import StorageType  # noqa: E402

settings.STORAGE_TYPE = settings.METASTORE_TYPE = StorageType.LOCAL
app = metadata.build_app(metadata.build_app_args(enable_k8s_support=False, dry_run=False))
app.state.batch_driver._endpoint_source = GatewayEndpointSource(wanted.model_url, capacity=8, timeout=30.0)
uvicorn.run(app, host="127.0.0.1", port=wanted.port, log_level="warning")
