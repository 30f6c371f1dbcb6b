"""Holds the manifests against Kubernetes' own schemas and against each other, without a cluster.

    pip install kubernetes-validate pyyaml
    python3 validate.py
"""

import pathlib
import sys

import kubernetes_validate
import yaml

VERSION = "1.33"
# Kinds that are installed with the Gateway API: their fields are checked below.
EXTENSIONS = {"InferencePool", "HTTPRoute", "Kustomization"}


def manifests():
    here = pathlib.Path(__file__).parent
    for path in sorted(here.glob("*.yaml")):
        for manifest in yaml.safe_load_all(path.read_text()):
            yield path.name, manifest


def check_links(all_of):
    """What manifests say of each other."""
    named = {(m["kind"], m["metadata"]["name"]): m for _, m in all_of if m["kind"] != "Kustomization"}
    labels = [m["spec"]["template"]["metadata"]["labels"] for (kind, _), m in named.items() if kind == "Deployment"]
    for (kind, name), manifest in named.items():
        spec = manifest.get("spec", {})
        selector = spec.get("selector")
        if selector:
            wanted = selector.get("matchLabels", selector)
            assert any(wanted.items() <= found.items() for found in labels), f"{kind} {name} selects no pod"
        if kind == "HorizontalPodAutoscaler":
            target = spec["scaleTargetRef"]
            assert (target["kind"], target["name"]) in named, target
        if kind == "InferencePool":
            assert ("Service", spec["endpointPickerRef"]["name"]) in named
            assert spec["targetPorts"][0]["number"] == 8000
        if kind == "HTTPRoute":
            for rule in spec["rules"]:
                for backend in rule["backendRefs"]:
                    assert (backend["kind"], backend["name"]) in named, backend
    pod = named["Deployment", "ferrum"]["spec"]["template"]["spec"]
    settings = named["ConfigMap", "ferrum"]["data"]["ferrum.toml"]
    numbers = dict(line.split(" = ") for line in settings.splitlines())
    drain = int(numbers["grace"]) + int(numbers["shutdown-timeout"])
    pause = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= drain + pause, "pods are killed while they drain"


def main():
    all_of = list(manifests())
    for file, manifest in all_of:
        if manifest["kind"] in EXTENSIONS:
            continue
        kubernetes_validate.validate(manifest, VERSION, strict=True)
        print(f"{file}: {manifest['kind']} is valid")
    check_links(all_of)


if __name__ == "__main__":
    sys.exit(main())
