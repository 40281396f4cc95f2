"""What the API server's refusals mean, and when it is asked again."""

import pytest

from palaestra.errors import ConfigError
from palaestra.gateway.pods.api import (
    ApiStatusError,
    ApiUnreachable,
    config_error,
    is_conflict,
    is_retryable,
    retry_delay_s,
    session_failure,
)
from palaestra.gateway.pods.informer import WatchRetry, plan_retry

RIGHTS = 'pods is forbidden: User "gateway" cannot create resource "pods" in API group "" in the namespace "lab"'


@pytest.mark.parametrize(
    ("status", "reason", "message", "word", "remedy"),
    [
        (403, "Forbidden", 'pods "a" is forbidden: exceeded quota: few', "quota_exceeded", "ResourceQuota"),
        (403, "Forbidden", RIGHTS, "forbidden", "Role in deploy/"),
        (403, "Forbidden", "unable to create in namespace lab because it is being terminated", "namespace_missing", ""),
        (403, "Forbidden", "maximum memory usage per Container is 1Gi, but limit is 2Gi", "manifest_rejected", "2Gi"),
        (401, "Unauthorized", "Unauthorized", "unauthorized", "have expired"),
        (404, "NotFound", 'namespaces "lab" not found', "namespace_missing", "kubectl create namespace lab"),
        (422, "Invalid", 'Pod "a" is invalid: spec.containers[0].image: Required', "manifest_rejected", "Required"),
        (400, "BadRequest", "json: cannot unmarshal", "manifest_rejected", "unmarshal"),
        (429, "TooManyRequests", "too many requests", "api_overloaded", "429"),
        (500, "InternalError", "etcdserver: request timed out", "api_failed", "500"),
    ],
)  # fmt: skip
def test_a_refusal_has_a_word_for_programs_and_says_what_was_wanted_where(status, reason, message, word, remedy):
    failure = session_failure(ApiStatusError(status, reason, message), "create pods", "lab")
    assert failure.reason == word
    assert failure.detail.startswith("create pods in namespace lab: ")
    assert message in failure.detail
    assert remedy in failure.detail


def test_no_answer_is_a_failure_of_the_api_and_at_the_start_of_the_configuration():
    trouble = ApiUnreachable("connection refused")
    assert session_failure(trouble, "create pods", "lab").reason == "api_unreachable"
    error = config_error(trouble, "list pods", "lab", "https://10.0.0.1:6443")
    assert isinstance(error, ConfigError)
    assert "'https://10.0.0.1:6443': the API server cannot be reached (connection refused)" in str(error)


def test_only_what_may_be_granted_a_moment_later_is_asked_for_again():
    again = [status for status in (400, 401, 403, 404, 409, 410, 422, 429, 500, 503, 504)
             if is_retryable(ApiStatusError(status, "", ""))]  # fmt: skip
    assert again == [429, 500, 503, 504]
    assert is_retryable(ApiUnreachable(""))
    assert is_conflict(ApiStatusError(409, "Conflict", ""))
    assert not is_conflict(ApiStatusError(409, "AlreadyExists", ""))


def test_asking_again_waits_ever_longer_or_as_long_as_was_asked():
    assert [retry_delay_s(None, failures) for failures in (1, 2, 3, 5, 6, 50)] == [0.2, 0.4, 0.8, 3.2, 5.0, 5.0]
    assert retry_delay_s(ApiStatusError(429, "", "", retry_after_s=7.0), 1) == 7.0
    assert retry_delay_s(ApiStatusError(503, "", "", retry_after_s=0.0), 2) == 0.4


@pytest.mark.parametrize(
    ("trouble", "failures", "step"),
    [
        (None, 0, WatchRetry(relist=False, wait_s=0.0)),
        (None, 1, WatchRetry(relist=False, wait_s=0.0)),
        (None, 2, WatchRetry(relist=False, wait_s=0.4)),
        (ApiStatusError(410, "Expired", "too old"), 1, WatchRetry(relist=True, wait_s=0.0)),
        (ApiStatusError(410, "Expired", "too old"), 3, WatchRetry(relist=True, wait_s=0.8)),
        (ApiStatusError(429, "TooManyRequests", "", retry_after_s=3.0), 1, WatchRetry(relist=False, wait_s=3.0)),
        (ApiStatusError(503, "", ""), 2, WatchRetry(relist=False, wait_s=0.4)),
        (ApiStatusError(504, "", "Too large resource version"), 3, WatchRetry(relist=True, wait_s=0.8)),
        (ApiUnreachable("connection refused"), 1, WatchRetry(relist=False, wait_s=0.2)),
        (ApiUnreachable("connection refused"), 50, WatchRetry(relist=False, wait_s=5.0)),
    ],
)
def test_a_watch_is_taken_up_where_it_ended_unless_that_moment_is_forgotten(trouble, failures, step):
    assert plan_retry(trouble, failures) == step
