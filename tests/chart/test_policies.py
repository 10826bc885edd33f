"""What a policy scanner finds, apart from what is on purpose."""

import json
import subprocess

from support.helm import render_templates
from support.manifests import values_of

ON_PURPOSE = {
    "CKV_K8S_8": "the pod of `helm test` ends by itself: nothing is to be restarted",
    "CKV_K8S_9": "the pod of `helm test` serves nobody",
    "CKV_K8S_11": "a limit of CPU throttles, which would show as latency; memory has one",
    "CKV_K8S_15": "a tag is a version: pulling it again at each start would only cost time",
    "CKV_K8S_38": "orchestrators watch EndpointSlices; no other pod has a token",
    "CKV_K8S_40": "the images' user is 10001; naming it here would keep OpenShift from choosing",
    "CKV_K8S_43": "whoever installs knows the digests, and can give them",
}


def test_a_policy_scanner_finds_what_is_on_purpose_and_nothing_else(tmp_path, checkov):
    files = ("empty-values.yaml", "every-model-source-values.yaml", "keda.yaml", "tls.yaml")
    for name in files:
        templates = render_templates(values_of(name))
        del templates["NOTES.txt"]
        (tmp_path / name).write_text("\n---\n".join(templates.values()))
    flags = ["--framework=kubernetes", "--skip-download", "--quiet", "--compact", "--output=json"]
    ran = subprocess.run(
        [checkov, *flags, "--directory", tmp_path], capture_output=True, text=True, timeout=240
    )
    report = json.loads(ran.stdout)
    assert report["summary"]["passed"] > 1000
    assert report["summary"]["parsing_errors"] == 0
    found = {each["check_id"] for each in report["results"]["failed_checks"]}
    assert found == set(ON_PURPOSE)
