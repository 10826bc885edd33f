"""Write the generated parts of the chart, or check that they are fresh.

The table of values in README.md comes from the comments of values.yaml, and files/defaults.json,
which templates read, from its values. The settings in values.schema.json, with their limits, and
the names of a gateway's in files/gateway-settings.json, which templates read, come from the
servers' own settings classes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from paceline_gateway.settings import GatewaySettings
from paceline_model_server.settings import ModelServerSettings
from paceline_orchestrator.settings import OrchestratorSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline_serving.settings import Settings

CHART = Path(__file__).parent / "paceline"
# Settings that templates set, or that make no sense in a pod: its standard input is closed.
OWN_SETTINGS = frozenset(
    {
        *("drain_delay_seconds", "drain_seconds", "exit_with_parent", "health_listen", "insecure"),
        *("listen", "metrics_listen", "model", "tls_certificate", "tls_client_authority"),
        *("tls_key", "targets", "drafters", "discovery", "target_service", "drafter_service"),
        *("pool_tls_authority", "pool_tls_certificate", "pool_tls_key"),
        *("scaler_listen", "peer_service", "verifier_lookahead"),
        *("fixed_verifiers", "least_verifiers", "most_verifiers"),
        *("api_keys", "orchestrator_key_file", "orchestrators", "orchestrator_tls_authority"),
        *("orchestrator_tls_certificate", "orchestrator_tls_key", "orchestrator_tls_server_name"),
    }
)
# A number as text, or a reference to a pod's variable, which Kubernetes replaces.
_NUMBER = r"^([0-9]+(\.[0-9]+)?|\$\(.+\))$"
_VARIABLE = r"^\$\(.+\)$"
_TABLE = re.compile(r"(?<=<!-- values -->\n).*(?=<!-- /values -->)", re.DOTALL)


def value_rows(node: yaml.Node, lines: list[str], path: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield key, default and comment of every value: a key with a comment and without own keys."""
    assert isinstance(node, yaml.MappingNode), "values are mappings"
    for key, value in node.value:
        name = f"{path}.{key.value}" if path else key.value
        if isinstance(value, yaml.MappingNode) and value.value and not value.flow_style:
            yield from value_rows(value, lines, name)
        else:
            default = json.dumps(yaml.safe_load(yaml.serialize(value)))
            yield name, default, _comment_above(key.start_mark.line, lines)


def _comment_above(line: int, lines: list[str]) -> str:
    words: list[str] = []
    while line and lines[line - 1].strip().startswith("# "):
        line -= 1
        words.insert(0, lines[line].strip().removeprefix("# "))
    return " ".join(words)


def values_table(values: str) -> str:
    """Return the table of README.md."""
    tree = yaml.compose(values)
    assert tree is not None, "values.yaml is empty"
    rows = [
        f"| `{key}` | `{default}` | {text.replace('|', '/')} |"
        for key, default, text in value_rows(tree, values.splitlines())
    ]
    return "\n".join(["| value | default | what it is |", "| --- | --- | --- |", *rows, ""])


def readme(values: str, text: str) -> str:
    """Return README.md with the table of values.yaml."""
    return _TABLE.sub(lambda _: values_table(values), text)


def gateway_settings() -> list[str]:
    """Return the names of a gateway's options in `settings`."""
    return sorted(set(GatewaySettings.model_fields) - OWN_SETTINGS)


def setting_schemas(settings: type[Settings]) -> dict[str, dict[str, Any]]:
    """Return the schema of each setting, with the limits of its server.

    A number can also be given as text; then the server checks its limits.
    """
    schemas: dict[str, dict[str, Any]] = {}
    for name, field in settings.model_json_schema()["properties"].items():
        (known, *_) = field.get("anyOf", [field])
        if known.get("type") in {"integer", "number"}:
            number = {key: known[key] for key in known if key == "type" or "imum" in key}
            schemas[name] = {"anyOf": [number, {"type": "string", "pattern": _NUMBER}]}
        elif "enum" in known:
            variable = {"type": "string", "pattern": _VARIABLE}
            schemas[name] = {"anyOf": [{"enum": known["enum"]}, variable]}
        elif known.get("items", {}).get("type") == "string":
            schemas[name] = {"$ref": "#/definitions/settingTexts"}
        else:
            schemas[name] = {"$ref": "#/definitions/settingValue"}
    return {name: schemas[name] for name in sorted(schemas.keys() - OWN_SETTINGS)}


def schema(text: str) -> str:
    """Return values.schema.json with the settings that servers have."""
    content: dict[str, Any] = json.loads(text)
    orchestrator = setting_schemas(OrchestratorSettings)
    model_server = setting_schemas(ModelServerSettings)
    common = {name: it for name, it in orchestrator.items() if name in model_server}
    for name, properties in (
        ("orchestratorSettings", orchestrator),
        ("gatewaySettings", setting_schemas(GatewaySettings)),
        ("modelServerSettings", model_server),
        ("commonSettings", common),
    ):
        content["definitions"][name]["properties"] = properties
    return json.dumps(content, indent=2) + "\n"


def fresh_files() -> dict[Path, str]:
    """Return the right contents of the files."""
    values = (CHART / "values.yaml").read_text()
    return {
        CHART / "README.md": readme(values, (CHART / "README.md").read_text()),
        CHART / "values.schema.json": schema((CHART / "values.schema.json").read_text()),
        CHART / "files" / "defaults.json": json.dumps(yaml.safe_load(values), indent=2) + "\n",
        CHART / "files" / "gateway-settings.json": json.dumps(gateway_settings(), indent=2) + "\n",
    }


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = [path for path, text in fresh_files().items() if path.read_text() != text]
    if not check:
        for path in stale:
            path.write_text(fresh_files()[path])
        return 0
    if stale:
        print("The chart's files are stale; run `make chart`:", *stale, sep="\n  ")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
