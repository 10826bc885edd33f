"""A rendered release, as objects to ask."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from support.helm import CHART, KUBE_VERSIONS, render_templates

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VALUES_FILES = tuple(sorted((*CHART.glob("examples/*.yaml"), *CHART.glob("ci/*.yaml"))))
# The controller of LeaderWorkerSets labels pods with their set's name.
GROUPS_LABEL = "leaderworkerset.sigs.k8s.io/name"
_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _StrictLoader(_Loader):
    """Refuses a key that is given twice, of which YAML would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(set(keys)) == len(keys), f"a key twice: {keys} at {node.start_mark}"
        mapping: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return mapping


def load_yaml(text: str) -> list[Any]:
    """Return the documents of a text, without empty ones."""
    return [each for each in yaml.load_all(text, Loader=_StrictLoader) if each]


def values_of(name: str) -> dict[str, Any]:
    """Return the values of a file in examples/ or ci/."""
    (path,) = (path for path in VALUES_FILES if path.name == name)
    return (load_yaml(path.read_text()) or [{}])[0]


@dataclass(frozen=True)
class Pod:
    """A pod that the release makes: of a Deployment, of a LeaderWorkerSet, or by itself.

    Attributes:
        name: The name of the object that makes it.
        metadata: Its labels and annotations.
        spec: The rest.
    """

    name: str
    metadata: Mapping[str, Any]
    spec: Mapping[str, Any]

    @property
    def labels(self) -> Mapping[str, str]:
        labels: Mapping[str, str] = self.metadata["labels"]
        return labels

    @property
    def role(self) -> str:
        """Return what it serves as; `part`: it serves nothing, and helps another pod."""
        if self.labels["app.kubernetes.io/name"] == "paceline-part":
            return "part"
        return self.labels.get("app.kubernetes.io/component", "test")

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def server(self) -> Mapping[str, Any]:
        """Return the container that it is for: the first one."""
        server: Mapping[str, Any] = self.spec["containers"][0]
        return server

    @property
    def flags(self) -> list[str]:
        flags: list[str] = self.server["args"]
        return flags

    @property
    def environment(self) -> dict[str, str]:
        """Return its server's variables; those with a value from elsewhere are empty."""
        return {each["name"]: each.get("value", "") for each in self.server.get("env", ())}

    def flag(self, name: str) -> str:
        """Return the value of a flag that is given once."""
        (value,) = (each.partition("=")[2] for each in self.flags if each.startswith(f"--{name}="))
        return value


@dataclass(frozen=True)
class Release:
    """All objects of a release, hooks included."""

    objects: list[dict[str, Any]] = field(repr=False)
    notes: str = field(repr=False)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [each for each in self.objects if each["kind"] == kind]

    def one(self, kind: str, name: str) -> dict[str, Any]:
        """Return an object by the end of its name."""
        (found,) = (each for each in self.of(kind) if each["metadata"]["name"].endswith(name))
        return found

    @property
    def pods(self) -> list[Pod]:
        return list(self._pods())

    def pod(self, name: str) -> Pod:
        """Return a pod by the end of its maker's name."""
        (found,) = (pod for pod in self.pods if pod.name.endswith(name))
        return found

    def _pods(self) -> Iterator[Pod]:
        for each in self.objects:
            name = each["metadata"]["name"]
            if each["kind"] == "Pod":
                yield Pod(name, each["metadata"], each["spec"])
            elif each["kind"] == "Deployment":
                template = each["spec"]["template"]
                yield Pod(name, template["metadata"], template["spec"])
            elif each["kind"] == "LeaderWorkerSet":
                groups = each["spec"]["leaderWorkerTemplate"]
                for kind, suffix in (("leaderTemplate", ""), ("workerTemplate", "-part")):
                    template = groups[kind]
                    labels = {**template["metadata"]["labels"], GROUPS_LABEL: name}
                    metadata = {**template["metadata"], "labels": labels}
                    yield Pod(name + suffix, metadata, template["spec"])


def install(
    values: Mapping[str, Any] | None = None,
    *,
    release: str = "demo",
    namespace: str = "serving",
    kube_version: str = KUBE_VERSIONS[-1],
) -> Release:
    """Render a release.

    Raises:
        RefusedError: the chart refuses the values.
    """
    templates = render_templates(
        values or {}, release=release, namespace=namespace, kube_version=kube_version
    )
    notes = templates.pop("NOTES.txt")
    return Release([each for text in templates.values() for each in load_yaml(text)], notes)
