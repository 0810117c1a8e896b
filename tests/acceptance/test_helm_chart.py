"""The chart and the compose file, as far as they can be judged without a cluster or a container engine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from batchferry.config import Settings, load_settings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
TEMPLATES = sorted((CHART / "templates").glob("*"))
KEY = {"OPENAI_API_KEY": "sk-test"}


@pytest.fixture(scope="module")
def values() -> Any:
    """The chart's default values."""
    return yaml.safe_load((CHART / "values.yaml").read_text())


@pytest.fixture(scope="module")
def schema() -> Any:
    """The schema of the values."""
    return json.loads((CHART / "values.schema.json").read_text())


def skeleton(text: str) -> str:
    """A template without its actions: lines that hold only an action go, actions inside a line become a word."""
    text = re.sub(r"\{\{-?\s*/\*.*?\*/\s*-?\}\}", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not re.fullmatch(r"\s*(\{\{.*?\}\}\s*)+", line)]
    return re.sub(r"\{\{.*?\}\}", "x", "\n".join(lines))


def test_the_default_values_keep_their_schema(values: Any, schema: Any):
    """What the chart ships passes the check that it demands of others."""
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values, schema)
    assert set(values) <= set(schema["properties"])


@pytest.mark.parametrize(
    "wrong",
    [
        {"replicas": 3},
        {"replicaCount": "3"},
        {"settings": {"kafkaa": {}}},
        {"settings": {"kafka": {"sasl_password": "hunter2"}}},
        {"settings": {"accounts": {"default": {"api_key": "sk-x"}}}},
        {"settings": {"routes": {"default": {}}}},
        {"service": {"port": 80}},
        {"state": {"sizeLimit": "lots"}},
    ],
)
def test_wrong_values_are_refused(values: Any, schema: Any, wrong: dict[str, Any]):
    """Slips in names and types, and secrets in plain settings, are refused before anything is installed."""
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**values, **wrong}, schema)


def test_templates_ask_for_known_values_only(values: Any):
    """Every value that a template names is in values.yaml, and every value there is used."""
    used = set()
    for template in TEMPLATES:
        for path in re.findall(r"\.Values((?:\.[A-Za-z]+)+)", template.read_text()):
            names = path.strip(".").split(".")
            used.add(names[0])
            at: Any = values
            for name in names:
                if name == "requests" or at == {}:
                    break
                assert name in at, f"{template.name} asks for .Values{path}"
                at = at[name]
    assert used == set(values)


def test_includes_are_defined():
    """Every named template that is included exists."""
    text = "".join(template.read_text() for template in TEMPLATES)
    defined = set(re.findall(r'define "([^"]+)"', text))
    assert set(re.findall(r'include "([^"]+)"', text)) <= defined


@pytest.mark.parametrize("template", [one for one in TEMPLATES if one.suffix == ".yaml"], ids=lambda one: one.name)
def test_templates_balance_and_are_yaml(template: Path):
    """Blocks are closed, braces pair up, and what is left without actions is YAML of the kind it should be."""
    text = template.read_text()
    opened = len(re.findall(r"\{\{-?\s*(?:if|with|range|define)\b", text))
    assert opened == len(re.findall(r"\{\{-?\s*end\b", text))
    assert text.count("{{") == text.count("}}")
    document = yaml.safe_load(skeleton(text))
    assert {"apiVersion", "kind", "metadata"} <= set(document)


def test_the_pod_has_no_rights_it_does_not_need():
    """No root, read-only root file system, no capabilities, no token, and the three probes on the admin port."""
    deployment = yaml.safe_load(skeleton((CHART / "templates" / "deployment.yaml").read_text()))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "liveness", "readiness")}
    assert probes == {"startup": "/startupz", "liveness": "/livez", "readiness": "/readyz"}
    written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert written == {"/var/lib/batchferry", "/tmp"}
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_the_charts_settings_are_accepted_by_the_service(values: Any, schema: Any, tmp_path: Path):
    """The default settings start the service with the chart's own variables; the schema names real settings only."""
    path = tmp_path / "batchferry.yaml"
    path.write_text(yaml.safe_dump(values["settings"]))
    env = {
        **KEY,
        "BATCHFERRY_CONFIG": str(path),
        "BATCHFERRY_STATE_DIR": "/var/lib/batchferry/state",
        "BATCHFERRY_SERVER__HOST": "0.0.0.0",
        "BATCHFERRY_SERVER__PORT": str(values["service"]["port"]),
        "BATCHFERRY_SERVER__WEBHOOK_PORT": str(values["service"]["webhookPort"]),
    }
    deployment = (CHART / "templates" / "deployment.yaml").read_text()
    assert set(re.findall(r"- name: (BATCHFERRY_\w+)", deployment)) == set(env) - set(KEY)
    settings = load_settings(None, env, dotenv_path=None)
    assert set(schema["properties"]["settings"]["properties"]) <= set(Settings.model_fields)
    assert settings.stop_budget_s < values["terminationGracePeriodSeconds"]
    size, unit = re.fullmatch(r"(\d+)(Gi|Mi)", values["state"]["sizeLimit"]).groups()  # type: ignore[union-attr]
    held = settings.limits.spool_high_bytes + settings.limits.max_downloads * 400_000_000
    assert int(size) * {"Gi": 2**30, "Mi": 2**20}[unit] > held
    assert values["resources"]["requests"]["ephemeral-storage"] == values["state"]["sizeLimit"]


def test_the_compose_file_fits_the_settings():
    """The service's variables in the compose file are accepted, and Kafka is one that has transactions."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    assert re.fullmatch(r"apache/kafka:4\.\d+\.\d+", services["kafka"]["image"])
    assert set(services["batchferry"]["depends_on"]) == {"kafka", "simulator"}
    env = {
        name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))
        for name, value in services["batchferry"]["environment"].items()
    }
    settings = load_settings(None, env, dotenv_path=None)
    assert settings.kafka.bootstrap_servers == ("kafka:9092",)
    assert settings.wait_plan(settings.routes["default"]).max_wait_s == 30
    assert f":{settings.server.port}/readyz" in services["batchferry"]["healthcheck"]["test"][-1]
    grace = services["batchferry"]["stop_grace_period"]
    assert settings.stop_budget_s < float(grace.removesuffix("s"))
    assert services["batchferry"]["read_only"] is True


def test_dotenv_example_is_lawful(tmp_path: Path):
    """The example .env starts the service once the key is filled in, and every commented name is a real setting."""
    text = (ROOT / ".env.example").read_text()
    path = tmp_path / ".env"
    path.write_text(text)
    assert load_settings(None, KEY, dotenv_path=path).kafka.bootstrap_servers == ("localhost:9092",)
    for name in re.findall(r"^# (BATCHFERRY_\w+)=", text, re.MULTILINE):
        first, *rest = name.removeprefix("BATCHFERRY_").lower().split("__")
        assert first == "config" or first in Settings.model_fields, name
        assert len(rest) <= 3
