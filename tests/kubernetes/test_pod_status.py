"""What pods say of themselves, read from statuses as schedulers and kubelets write them."""

import pytest

from palaestra.gateway.pods.controller import readiness_failure
from palaestra.gateway.pods.status import Failure, read_pod

SPEC = {"containers": [{"name": "session", "image": "shop/session:1"}, {"name": "recorder", "image": "shop/rec:2"}]}
LABELS = {"palaestra.dev/session": "s1", "palaestra.dev/session-type": "browser", "palaestra.dev/instance": "i1"}


def read(status, **metadata):
    identity = {"name": "session-s1", "uid": "u1", "resourceVersion": "7", "labels": LABELS, **metadata}
    return read_pod({"metadata": identity, "spec": SPEC, "status": status})


def container(name="session", **state):
    return {"name": name, "state": state}


def condition(kind, status, **words):
    return {"type": kind, "status": status, **words}


def test_a_pod_is_ready_when_it_says_so_and_has_an_address():
    ready = [condition("Ready", "True")]
    found = read({"phase": "Running", "podIP": "10.0.0.9", "conditions": ready})
    assert (found.ready, found.ip, found.failure) == (True, "10.0.0.9", None)
    assert (found.name, found.session_id, found.instance, found.version) == ("session-s1", "s1", "i1", "7")
    assert not read({"phase": "Running", "conditions": ready}).ready
    assert not read({"phase": "Running", "podIP": "10.0.0.9", "conditions": [condition("Ready", "False")]}).ready
    assert not read({}).ready


def test_a_pod_without_the_label_of_a_session_is_a_spare():
    assert read({}, labels={}).session_id is None


@pytest.mark.parametrize("word", ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"])
def test_an_image_that_cannot_be_had_is_named(word):
    waiting = {"reason": word, "message": "not\nfound"}
    assert read({"phase": "Pending", "containerStatuses": [container(waiting=waiting)]}).failure == Failure(
        "image_pull_failed", f"image 'shop/session:1': {word}: not found"
    )
    beside = [container(waiting={"reason": "ContainerCreating"}), container("recorder", waiting=waiting)]
    assert read({"phase": "Pending", "containerStatuses": beside}).failure.text.startswith("image 'shop/rec:2'")


@pytest.mark.parametrize(
    ("status", "reason", "text"),
    [
        (
            {"phase": "Failed", "containerStatuses": [container(terminated={"exitCode": 137, "reason": "OOMKilled"})]},
            "crashed", "container session was OOMKilled (exit code 137)",
        ),
        (
            {"phase": "Failed", "containerStatuses": [
                container(terminated={"exitCode": 1, "reason": "Error", "message": "no\nchromium"})]},
            "crashed", "container session ended with exit code 1: no chromium",
        ),
        (
            {"phase": "Succeeded", "containerStatuses": [container(terminated={"exitCode": 0, "reason": "Completed"})]},
            "crashed", "container session ended with exit code 0",
        ),
        (
            {"phase": "Failed", "reason": "Evicted", "message": "The node was low on resource: memory."},
            "evicted", "its pod: Evicted: The node was low on resource: memory.",
        ),
        (
            {"phase": "Failed", "reason": "DeadlineExceeded", "message": "Pod was active longer than its deadline"},
            "deadline_exceeded", "its pod: DeadlineExceeded: Pod was active longer than its deadline",
        ),
        (
            {"phase": "Failed", "reason": "OutOfcpu", "message": "Node didn't have enough resource: cpu"},
            "crashed", "its pod ended as Failed: OutOfcpu: Node didn't have enough resource: cpu",
        ),
        (
            {"phase": "Failed", "initContainerStatuses": [container("prepare", terminated={"exitCode": 2})]},
            "crashed", "container prepare ended with exit code 2",
        ),
        (
            {"phase": "Pending", "containerStatuses": [
                container(waiting={"reason": "CreateContainerConfigError", "message": "no secret"})]},
            "start_failed", "container session: CreateContainerConfigError: no secret",
        ),
    ],
)  # fmt: skip
def test_an_end_is_reported_with_what_the_cluster_knows_of_it(status, reason, text):
    assert read(status).failure == Failure(reason, text)


def test_the_end_of_a_companion_is_not_the_end_of_the_session():
    running = [container(running={}), container("recorder", terminated={"exitCode": 1})]
    assert read({"phase": "Running", "containerStatuses": running}).failure is None
    ended = [container(terminated={"exitCode": 0}), container("recorder", running={})]
    assert read({"phase": "Running", "containerStatuses": ended}).failure.reason == "crashed"


def test_a_pod_on_its_way_out_is_deleted_or_evicted():
    leaving = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    assert read({"phase": "Running"}, **leaving).failure.text == "its pod was deleted by another client"
    words = {"reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}
    target = {"phase": "Running", "conditions": [condition("DisruptionTarget", "True", **words)]}
    evicted = Failure("evicted", "its pod: EvictionByEvictionAPI: Eviction API: evicting")
    assert read(target, **leaving).failure == evicted


def test_what_finds_no_node_is_given_up_after_its_grace_and_what_does_not_get_ready_after_its_time():
    words = {"reason": "Unschedulable", "message": "0/3 nodes are available"}
    stuck = read({"phase": "Pending", "conditions": [condition("PodScheduled", "False", **words)]})
    limits = {"ready_s": 60.0, "unschedulable_s": 15.0}
    assert readiness_failure(stuck, waited_s=14.9, unschedulable_for_s=14.9, **limits) is None
    given_up = readiness_failure(stuck, waited_s=20.0, unschedulable_for_s=15.0, **limits)
    assert given_up == Failure("unschedulable", "no node took the pod within 15 s: 0/3 nodes are available")

    slow = read({"phase": "Pending", "containerStatuses": [container(waiting={"reason": "ContainerCreating"})]})
    assert readiness_failure(slow, waited_s=59.9, unschedulable_for_s=None, **limits) is None
    late = readiness_failure(slow, waited_s=60.0, unschedulable_for_s=None, **limits)
    assert late.reason == "ready_timeout"
    assert late.text.endswith("60 s: phase Pending, container session waits (ContainerCreating)")
    assert "it was not seen" in readiness_failure(None, waited_s=60.0, unschedulable_for_s=None, **limits).text
