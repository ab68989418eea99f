"""ray-cluster.yaml is what Ray's launcher takes."""

import json
from pathlib import Path

import yaml

FILE = Path(__file__).parents[1] / "ray-cluster.yaml"


def test_the_cluster_file_is_valid_by_rays_own_schema():
    import jsonschema
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = yaml.safe_load(FILE.read_text())
    jsonschema.validate(cluster, schema)
    assert {*cluster} <= {*schema["properties"]}


def test_every_node_of_the_cluster_file_asks_for_the_token():
    cluster = yaml.safe_load(FILE.read_text())
    started = [
        line for kind in ("head", "worker") for line in cluster[f"{kind}_start_ray_commands"] if "ray start" in line
    ]
    assert len(started) == 2 and all(line.startswith("RAY_AUTH_MODE=token ") for line in started)
    assert "~/.ray/auth_token" in cluster["file_mounts"]
