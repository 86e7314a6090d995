"""The Kubernetes files of launch/, against the schemas that their projects publish.

kubeflow_trainer_api has models of TrainJob, JobSet, Job and Pod, made from the schemas of Trainer.
A model drops what it does not know: a file with a wrong field does not come back as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet as JobSet
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import (
    TrainerV1alpha1TrainJob as TrainJob,
)

FOLDER = Path(__file__).parents[1] / "launch" / "kubernetes"
MODELS: dict[str, Any] = {"trainjob.yaml": TrainJob, "jobset.yaml": JobSet}


def read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    return document


def known(model: Any, document: dict[str, Any]) -> Any:
    """What of a document the schema knows; quantities, such as 32Gi, have a model of their own."""
    return plain(model.from_dict(document).to_dict())


def plain(value: Any) -> Any:
    match value:
        case dict():
            return {k: plain(v) for k, v in value.items()}
        case list():
            return [plain(v) for v in value]
    return getattr(value, "actual_instance", value)


@pytest.mark.parametrize("name", MODELS)
def test_the_schema_knows_every_field(name: str) -> None:
    document = read(name)
    assert known(MODELS[name], document) == document


@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_field_does_not_come_back(name: str) -> None:
    document = read(name)
    document["spec"]["sped"] = 1
    assert known(MODELS[name], document) != document


def test_every_file_is_checked() -> None:
    assert {p.name for p in FOLDER.iterdir()} == MODELS.keys()


def test_the_number_of_pods_stands_in_three_places() -> None:
    (job,) = read("jobset.yaml")["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert f"--nnodes={spec['completions']}" in container["command"]
    assert spec["parallelism"] == spec["completions"]


def test_pods_meet_at_the_first_one() -> None:
    """JobSet's name of a pod: set, job, index of the job, index of the pod; then the network."""
    document = read("jobset.yaml")
    (job,) = document["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    name = document["metadata"]["name"]
    assert f"--master-addr={name}-{job['name']}-0-0.{name}" in container["command"]


@pytest.mark.parametrize("name", MODELS)
def test_shared_memory_is_mounted(name: str) -> None:
    text = str(read(name))
    assert "'mountPath': '/dev/shm'" in text and "'medium': 'Memory'" in text
