"""The settings as people and tools are told about them."""

from __future__ import annotations

import jsonschema
import pytest
import yaml

from batchferry.config import example_text, explain_settings, load_settings, settings_schema
from batchferry.config.models import Settings


def test_every_setting_has_a_reason():
    """No setting is without words, so the table in the README has no gaps."""
    rows = explain_settings()
    assert len({row.name for row in rows}) == len(rows) > 100
    assert [row.name for row in rows if not row.why] == []


def test_rows_tell_type_default_and_variable():
    """A row shows how a value is written, what it is otherwise, and its variable."""
    rows = {row.name: row for row in explain_settings()}
    sla = rows["routes.<name>.sla_s"]
    assert (sla.type, sla.default, sla.env) == ("duration", "30 h", "BATCHFERRY_ROUTES__<name>__SLA_S")
    assert rows["limits.spool_high_bytes"].type == "size"
    assert rows["log.format"].type == "auto, json, human"
    assert rows["accounts.<name>.api_key"].type == "secret or null"
    assert rows["accounts.<name>.timeouts.connect_s"].default == "5 s"
    assert rows["routes.<name>.policies"].type == "mapping to retry, sync, review, split, fail, hold"
    assert rows["accounts.<name>.dialect.upload_way"].type == "form, signed_address"
    assert rows["accounts.<name>.dialect.cancel_conflicts"][1:3] == ("list", "none")
    assert rows["clock.origin"].type == "instant or null"


def test_what_is_off_by_default_is_told_too():
    """A section that need not be there is a row, and so is each setting in it."""
    rows = {row.name: row for row in explain_settings()}
    assert (rows["routes.<name>.canary"].type, rows["routes.<name>.canary"].default) == ("section or null", "null")
    assert rows["routes.<name>.canary.gather_s"].default == "5 min"
    assert rows["routes.<name>.long_row.lane"].type == "sync, own_batch"


def test_every_unit_stands_at_the_end_of_the_name():
    """Lengths of time end in _s and sizes in _bytes, so nobody has to guess."""
    for row in explain_settings():
        kinds = row.type.split(" or ")
        assert ("duration" in kinds) == row.name.endswith("_s"), row.name
        assert ("size" in kinds) == row.name.endswith("_bytes"), row.name


def test_the_schema_takes_the_example_and_refuses_unknown_names():
    """The JSON Schema agrees with the loader about the file that we ship."""
    schema = settings_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(yaml.safe_load(example_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"kafkaa": {}}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"log": {"level": "loud"}}, schema)


def test_every_variable_of_the_table_is_understood():
    """Each plain setting can be set by the variable that the table names, with its default."""
    rows = [row for row in explain_settings() if row.default not in {"null", "none"} and "<" not in row.name]
    choices = {"yes": "true", "no": "false"}
    env = {row.env: choices.get(row.default, row.default) for row in rows}
    env["OPENAI_API_KEY"] = "x"
    assert load_settings(None, env, dotenv_path=None) == load_settings(None, {"OPENAI_API_KEY": "x"}, dotenv_path=None)


def test_the_tree_has_no_names_that_collide_with_kubernetes():
    """Service links are told from settings by their names, so no setting may look like one."""
    assert not {"service", "port"} & set(Settings.model_fields)
