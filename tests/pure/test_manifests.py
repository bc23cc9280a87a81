"""The manifests of deploy/kubernetes fit the schemas of Kubernetes, JobSet and Kubeflow Trainer.

Core objects are checked against the JSON schemas that kubernetes-validate carries, the others
against the models of kubeflow-trainer-api, which are made from the OpenAPI documents of their
releases. Neither knows what a controller does with a field; what this project relies on beyond the
schema is checked here, with its reason.
"""

import copy
import re
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import yaml
from kubernetes_validate.utils import schema_contents
from lazy import Lazy
from pydantic import ValidationError
from referencing import Registry, Resource

from elastic.config.options import parse
from elastic.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_NOTHING_LOADS, EXIT_USAGE

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
OLDEST = "1.33.0"  # successPolicy of a Job is stable from this version on
MODELS = Lazy("kubeflow_trainer_api.models")
CUSTOM = {
    "JobSet": ("JobsetV1alpha2JobSet", "jobset.x-k8s.io/v1alpha2"),
    "TrainJob": ("TrainerV1alpha1TrainJob", "trainer.kubeflow.org/v1alpha1"),
    "TrainingRuntime": ("TrainerV1alpha1TrainingRuntime", "trainer.kubeflow.org/v1alpha1"),
}
KILLED = 137
OUTAGE_S = 600  # of a file server, which holds up every agent; to restart them loses the snapshots


def objects(path):
    return list(yaml.safe_load_all(path.read_text()))


def name(value):
    return value.stem if isinstance(value, Path) else None


@cache
def validator(kind, api_version, version=OLDEST):
    folder = f"kubernetes-json-schema/v{version}-local-strict"
    api = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api_version)
    schema = schema_contents(f"{folder}/{kind.lower()}-{api}.json", version)
    definitions = schema_contents(f"{folder}/_definitions.json", version)
    registry = Resource.from_contents(schema) @ (Resource.from_contents(definitions) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def problems(thing):
    """What a schema finds wrong with an object, those of the Jobs within it included."""
    kind = thing["kind"]
    if kind not in CUSTOM:
        return [error.message for error in validator(kind, thing["apiVersion"]).iter_errors(thing)]
    model, api_version = CUSTOM[kind]
    wrong = [] if thing["apiVersion"] == api_version else ["apiVersion"]
    try:
        read = getattr(MODELS, model).from_dict(copy.deepcopy(thing))
    except (ValidationError, ValueError) as error:
        return [*wrong, str(error)]
    if not is_kept(thing, read.to_dict()):
        wrong.append("a field that the model does not know, and leaves out")
    return wrong + [each for job in jobs_in(thing) for each in problems(job)]


def is_kept(thing, read):
    if isinstance(thing, dict):
        return all(key in read and is_kept(value, read[key]) for key, value in thing.items())
    if isinstance(thing, list):
        return len(thing) == len(read) and all(map(is_kept, thing, read))
    return thing == read


def jobs_in(thing):
    """The Jobs that come of an object, as objects of their own."""
    if thing["kind"] == "Job":
        return [thing]
    spec = thing["spec"]["template"]["spec"] if thing["kind"] == "TrainingRuntime" else thing["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job"}
    return [
        job | {"metadata": {"name": each["name"]}, "spec": each["template"]["spec"]}
        for each in (spec.get("replicatedJobs", []) if isinstance(spec, dict) else [])
    ]


@cache
def jobs():
    """(file, Job) of every manifest that starts nodes."""
    return [(path, job) for path in FILES for thing in objects(path) for job in jobs_in(thing)]


def command_of(path, job):
    """The words of the node's command: with Trainer they are in the TrainJob."""
    return (trainers_in(path) or [node_of(job)])[0]["command"]


def trainers_in(path):
    return [thing["spec"]["trainer"] for thing in objects(path) if thing["kind"] == "TrainJob"]


def node_of(job):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def options_of(path, job):
    program, *words = command_of(path, job)
    assert program == "elastic-train"
    return parse(words)


def nodes_of(path):
    """How many pods the manifest starts for one run."""
    numbers = [trainer["numNodes"] for trainer in trainers_in(path)]
    return numbers[0] if numbers else sum(job["spec"]["completions"] for file, job in jobs() if file == path)


def action_on(job, code, *conditions):
    """What the first rule that matches a failed pod says, as the Job controller reads them."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        patterns = rule.get("onPodConditions", [])
        if any(pattern["type"] in conditions and pattern["status"] == "True" for pattern in patterns):
            return rule["action"]
        exits = rule.get("onExitCodes")
        of_node = exits and exits["containerName"] == node_of(job)["name"] and exits["operator"] == "In"
        if of_node and code in exits["values"]:
            return rule["action"]
    return "Count"


def test_manifests_fit_their_schemas_and_a_wrong_field_does_not():
    every = [thing for path in FILES for thing in objects(path)]
    assert [problem for thing in every for problem in problems(thing)] == []
    for thing in every:
        thing["spec"]["noSuchField"] = "x"
        assert problems(thing), thing["kind"]


def test_an_object_in_the_guide_fits_its_schema():
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    thing = yaml.safe_load(block)
    (claim,) = objects(ROOT / "deploy" / "kubernetes" / "volume.yaml")
    (volume,) = thing["spec"]["volumes"]
    assert problems(thing) == []
    assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize(("path", "job"), jobs(), ids=name)
def test_each_exit_code_of_a_node_leads_to_what_it_means(path, job):
    assert action_on(job, EXIT_INTERRUPTED) == "Ignore"
    assert action_on(job, EXIT_USAGE) == action_on(job, EXIT_NOTHING_LOADS) == "FailJob"
    assert action_on(job, EXIT_FAILED) == action_on(job, KILLED) == "Count"
    for code in (EXIT_FAILED, EXIT_INTERRUPTED, KILLED):
        assert action_on(job, code, "DisruptionTarget") == "Ignore"


def test_what_goes_with_a_job_holds_nothing_that_must_stay():
    """`kubectl delete -f` and `kubectl replace --force -f` delete every object of a file: with a
    claim go the checkpoints of all runs, with a Secret or a policy what other runs use.
    """
    starting = {path for path, _ in jobs()}
    assert {path.stem for path in FILES} - {path.stem for path in starting} == {"network-policy", "volume"}
    for path in starting:
        assert {thing["kind"] for thing in objects(path)} <= {"Job", *CUSTOM}


@pytest.mark.parametrize(("path", "job"), jobs(), ids=name)
def test_a_job_is_one_that_the_server_takes(path, job):
    """Beside its schema the server asks for this: a failure policy and limits for each index need
    restartPolicy Never and the mode Indexed, a failure policy replaces pods once they failed, and
    exit codes are in order.
    """
    spec = job["spec"]
    asked = (spec["template"]["spec"]["restartPolicy"], spec["completionMode"], spec["podReplacementPolicy"])
    assert asked == ("Never", "Indexed", "Failed")
    assert spec.get("maxFailedIndexes", 0) <= spec.get("completions", 1)
    assert "backoffLimitPerIndex" in spec
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {}).get("values", [])
        assert codes == sorted(set(codes))


@pytest.mark.parametrize(("path", "job"), jobs(), ids=name)
def test_the_command_and_the_pods_agree(path, job):
    """As many pods as --max-nodes; fewer than --min-nodes end the Job; the grace has room."""
    options, spec = options_of(path, job), job["spec"]
    pod, node = spec["template"]["spec"], node_of(job)
    assert nodes_of(path) == options.max_nodes
    assert spec.get("parallelism") == spec.get("completions")
    spare = options.max_nodes - options.min_nodes
    assert spec.get("maxFailedIndexes", spare) == spare
    assert not options.fresh  # each new pod runs the same command
    assert options.grace_s < pod["terminationGracePeriodSeconds"]
    assert (ROOT / options.recipe).is_file()
    user = pod["securityContext"]["runAsUser"]
    assert f"useradd --create-home --uid {user} " in (ROOT / "Dockerfile").read_text()
    shared = tuple(mount["mountPath"] + "/" for mount in node["volumeMounts"] if mount["name"] == "runs")
    assert options.run_dir.startswith(shared) or "://" in options.run_dir


@pytest.mark.parametrize(("path", "job"), jobs(), ids=name)
def test_probes_ask_the_port_that_the_agent_serves(path, job):
    node = node_of(job)
    (port,) = node["ports"]
    assert f"--http=0.0.0.0:{port['containerPort']}" in command_of(path, job)
    asked = {probe: node[f"{probe}Probe"]["httpGet"] for probe in ("startup", "liveness", "readiness")}
    assert [get["path"] for get in asked.values()] == ["/healthz", "/healthz", "/readyz"]
    assert {get["port"] for get in asked.values()} == {port["name"]}
    alive = node["livenessProbe"]
    assert alive["periodSeconds"] * alive["failureThreshold"] >= OUTAGE_S


def test_the_network_policy_is_for_the_pods_of_every_manifest():
    (policy,) = objects(ROOT / "deploy" / "kubernetes" / "network-policy.yaml")
    wanted = policy["spec"]["podSelector"]["matchLabels"].items()
    assert policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"].items() == wanted
    for _, job in jobs():
        assert wanted <= job["spec"]["template"]["metadata"]["labels"].items()


def test_the_store_of_a_group_is_named_as_jobset_names_the_pod():
    """<JobSet>-<replicated job>-<job index>-<pod index>.<subdomain>, says `enableDNSHostnames`."""
    path = ROOT / "deploy" / "kubernetes" / "jobset.yaml"
    (jobset,) = objects(path)
    steady = jobset["spec"]["replicatedJobs"][0]["name"]
    wanted = f"{jobset['metadata']['name']}-{steady}-0-0.{jobset['spec']['network']['subdomain']}"
    assert {options_of(path, job).rdzv_endpoint for job in jobs_in(jobset)} == {wanted}
    assert jobset["spec"]["network"]["publishNotReadyAddresses"]
