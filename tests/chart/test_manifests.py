"""Everything that is rendered, from every values file, for every API server that is supported."""

import re

import pytest

from support.api_schemas import violations
from support.helm import KUBE_VERSIONS, RefusedError, lint
from support.manifests import VALUES_FILES, install, values_of

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
LABEL_KEY = re.compile(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
)
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
# What a Deployment adds to its name for a pod's, and what a DNS label holds.
POD_SUFFIX, DNS_LABEL = len("-0123456789-abcde"), 63
# Image volumes are refused where there are none.
IMAGE_VOLUMES, IMAGE_VOLUMES_SINCE = "image-volume-values.yaml", "1.33.0"
LONG = "a-release-with-a-name-as-long-as-helm-allows-for-it-x"

NAMES = [file.name for file in VALUES_FILES]


def everything():
    """Return a release of each values file, for the newest API server."""
    return [install(values_of(name)) for name in NAMES]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kube_version", KUBE_VERSIONS)
def test_an_api_server_would_take_every_object_without_a_warning(name, kube_version):
    if name == IMAGE_VOLUMES and kube_version < IMAGE_VOLUMES_SINCE:
        with pytest.raises(RefusedError, match="use claim or download"):
            install(values_of(name), kube_version=kube_version)
        return
    for each in install(values_of(name), kube_version=kube_version).objects:
        assert violations(each, kube_version=kube_version) == [], each["metadata"]["name"]


def test_the_check_sees_a_typo_deep_in_an_object_and_one_in_a_custom_resource():
    release = install({"autoscaling": {"mode": "keda"}})
    deployment = release.one("Deployment", "-target-default")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    scaled = release.one("ScaledObject", "-target-default")
    scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behaviour"] = {}
    for each in (deployment, scaled):
        (violation,) = violations(each, kube_version="1.34.0")
        assert "was unexpected" in violation


def test_an_image_volume_is_a_typo_for_an_api_server_that_knows_none():
    release = install(values_of(IMAGE_VOLUMES))
    deployment = release.one("Deployment", "-target-default")
    assert violations(deployment, kube_version="1.30.0")
    assert not violations(deployment, kube_version=IMAGE_VOLUMES_SINCE)


@pytest.mark.parametrize("name", NAMES)
def test_helm_lint_has_nothing_to_say(name):
    assert lint(values_of(name)) == []


def test_names_are_unique_and_leave_room_for_a_pods():
    for release in everything():
        names = [(each["kind"], each["metadata"]["name"]) for each in release.objects]
        assert len(set(names)) == len(names)
        for _, name in names:
            assert NAME.fullmatch(name)
            assert len(name) <= DNS_LABEL - POD_SUFFIX or name.startswith("paceline-")


def test_everything_is_in_the_releases_namespace_and_nothing_is_null():
    def has_null(node):
        if isinstance(node, dict | list):
            return any(map(has_null, node.values() if isinstance(node, dict) else node))
        return node is None

    for release in everything():
        for each in release.objects:
            assert each["metadata"]["namespace"] == "serving"
            assert not has_null(each), each["metadata"]["name"]


def test_labels_and_annotations_are_well_formed():
    for release in everything():
        holders = [each["metadata"] for each in release.objects]
        holders += [pod.metadata for pod in release.pods]
        for metadata in holders:
            for key, value in metadata.get("labels", {}).items():
                assert LABEL_KEY.fullmatch(key)
                assert LABEL_VALUE.fullmatch(value)
            for key, value in metadata.get("annotations", {}).items():
                assert LABEL_KEY.fullmatch(key)
                assert isinstance(value, str)


def test_quantities_are_texts_that_the_api_server_can_read():
    for release in everything():
        for pod in release.pods:
            for container in pod.containers:
                for quantities in container["resources"].values():
                    for quantity in quantities.values():
                        assert QUANTITY.fullmatch(quantity)


@pytest.mark.parametrize("name", [LONG, "team.paceline", "p"])
def test_any_release_name_that_helm_allows_gives_valid_names(name):
    release = install({"target": {"pools": {"a" * 40: {}, "a" * 39: {}}}}, release=name)
    names = [(each["kind"], each["metadata"]["name"]) for each in release.objects]
    assert len(set(names)) == len(names)
    for _, each in names:
        assert NAME.fullmatch(each)
        assert len(each) <= DNS_LABEL - POD_SUFFIX


def test_a_long_name_is_one_and_the_same_wherever_it_is_used():
    release = install({"autoscaling": {"mode": "hpa"}}, release=LONG)
    (autoscaler,) = release.of("HorizontalPodAutoscaler")
    (target,) = (pod for pod in release.pods if pod.role == "target")
    assert autoscaler["spec"]["scaleTargetRef"]["name"] == target.name
    services = {each["metadata"]["name"] for each in release.of("Service")}
    accounts = {each["metadata"]["name"] for each in release.of("ServiceAccount")}
    for pod in release.pods:
        if pod.role == "orchestrator":
            for flag in ("target-service", "drafter-service", "peer-service"):
                assert pod.flag(flag).partition(":")[0] in services
        if pod.role != "test":
            assert pod.spec["serviceAccountName"] in accounts


@pytest.mark.parametrize("other", ["demo2", "demo-target", "demo-paceline", "dem"])
def test_two_releases_in_one_namespace_share_no_object_and_no_pod(other):
    ours, theirs = install(), install(release=other)
    names = [
        {(each["kind"], each["metadata"]["name"]) for each in release.objects}
        for release in (ours, theirs)
    ]
    assert not names[0] & names[1]
    for service in ours.of("Service"):
        for pod in theirs.pods:
            assert not service["spec"]["selector"].items() <= pod.labels.items()


def test_a_default_installation_is_as_reviewed():
    release = install()
    assert sorted((each["kind"], each["metadata"]["name"]) for each in release.objects) == [
        ("Deployment", "demo-drafter-default"),
        ("Deployment", "demo-orchestrator"),
        ("Deployment", "demo-target-default"),
        ("NetworkPolicy", "demo-drafter"),
        ("NetworkPolicy", "demo-orchestrator"),
        ("NetworkPolicy", "demo-target"),
        ("NetworkPolicy", "demo-test"),
        ("Pod", "demo-test"),
        ("PodDisruptionBudget", "demo-drafter-default"),
        ("PodDisruptionBudget", "demo-orchestrator"),
        ("PodDisruptionBudget", "demo-target-default"),
        ("Role", "demo-orchestrator"),
        ("RoleBinding", "demo-orchestrator"),
        ("Service", "demo-drafter-default"),
        ("Service", "demo-metrics"),
        ("Service", "demo-orchestrator"),
        ("Service", "demo-orchestrator-pods"),
        ("Service", "demo-target-default"),
        ("ServiceAccount", "demo-drafter"),
        ("ServiceAccount", "demo-orchestrator"),
        ("ServiceAccount", "demo-target"),
    ]
