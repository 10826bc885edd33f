"""Helm 3, which many still have, makes the same of the chart: no template needs a newer one."""

import subprocess

import pytest

from support.helm import CHART, KUBE_VERSIONS
from support.manifests import VALUES_FILES, install, load_yaml, values_of


@pytest.mark.parametrize("file", VALUES_FILES, ids=lambda file: file.name)
def test_helm_3_renders_the_same_objects(file, helm3):
    kube_version = KUBE_VERSIONS[-1]
    command = [helm3, "template", "demo", CHART, "-n", "serving", "-f", file]
    ran = subprocess.run(
        [*command, "--kube-version", kube_version], capture_output=True, text=True, check=True
    )

    def ordered(objects):
        return sorted(objects, key=lambda each: (each["kind"], each["metadata"]["name"]))

    release = install(values_of(file.name), kube_version=kube_version)
    assert ordered(load_yaml(ran.stdout)) == ordered(release.objects)
