"""Engines that misbehave: one message that names the engine and the remedy, nothing lost, nothing left behind."""

import re
import socket
import threading

import pytest
from tests.policy.vlm.serving.conftest import MODEL, move, request, tokens

from palaestra.errors import CollectorFailed, ConfigError
from palaestra.policy.vlm import ModelConfig, VLMPolicy
from palaestra.policy.vlm.sampler import InferenceConfig
from palaestra.policy.vlm.serving.server_sampler import ServerSampler
from palaestra.policy.vlm.serving.small_server import SmallServer


def refused(sampler, policy):
    """What the check says, in one line."""
    with pytest.raises(ConfigError) as caught:
        sampler.check(policy.trainable_state())
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_an_engine_that_is_not_there_is_named_with_the_reason(connect, policy):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        text = refused(connect(url), policy)
    assert text.startswith(f"inference.urls = '{url}': the engine does not answer (GET /v1/models: ")
    assert text.endswith("Start it, or correct its address.")


def test_an_engine_that_serves_another_name_says_which_it_serves(connect, policy):
    text = refused(connect(model="Qwen/Qwen2.5-VL-3B-Instruct"), policy)
    assert text.startswith("inference.model = 'Qwen/Qwen2.5-VL-3B-Instruct': ")
    assert text.endswith("serves no model of this name. It serves tiny.")


def test_an_engine_that_serves_other_weights_under_the_right_name_is_refused(policy, tmp_path):
    other = VLMPolicy.from_config(ModelConfig(name="tiny", lora_rank=4), seed=2)
    move(other, seed=3, by=0.1)
    other.export_merged(tmp_path / "other")
    with SmallServer(ModelConfig(name=str(tmp_path / "other"), lora_rank=4)) as server:
        config = InferenceConfig(backend="server", urls=server.url)
        with ServerSampler(policy, config, temperature=1.0, max_new_tokens=8) as sampler:
            text = refused(sampler, policy)
    assert "it answers a probe of tiny with other log-probabilities than the learner" in text
    assert "the engine serves another model, other weights or pictures that it prepares differently" in text


def test_an_engine_with_a_smaller_vocabulary_is_refused(policy, directories):
    with SmallServer(ModelConfig(name=str(directories["qwen3_vl"]), lora_rank=4)) as server:
        config = InferenceConfig(backend="server", urls=server.url)
        with ServerSampler(policy, config, temperature=1.0, max_new_tokens=8) as sampler:
            text = refused(sampler, policy)
    assert "status 400" in text
    assert "out of vocabulary" in text


def test_an_engine_without_log_probabilities_is_refused(connect, server, policy):
    server.fault = "no log-probs"
    assert "tokens. Use an engine that returns those of sampled tokens" in refused(connect(), policy)


def test_an_engine_that_makes_other_tokens_of_a_prompt_is_refused(connect, server, policy):
    server.fault = "other prompt"
    text = refused(connect(), policy)
    made, ours, place = (int(number) for number in re.findall(r"made (\d+) .* of (\d+), .* number (\d+) on", text)[0])
    assert (made, place) == (ours + 1, ours)  # one token more, at the end


def test_an_engine_without_the_route_for_pictures_is_refused_with_the_flag_that_adds_it(
    connect, server, policy, monkeypatch
):
    real = server.answer

    def answer(method, route, body, headers):
        return real(method, "/nowhere" if "generate" in route else route, body, headers)

    monkeypatch.setattr(server, "answer", answer)
    text = refused(connect(), policy)
    assert text.endswith("Start the engine with --enable-scale-out, which pictures need.")


def test_an_engine_that_refuses_adapters_is_refused_with_the_flags_to_start_it_with(connect, server, policy):
    server.fault = "refuses adapters"
    text = refused(connect(), policy)
    assert "did not load adapter palaestra-" in text
    assert "--max-lora-rank of at least model.lora_rank" in text


def test_an_engine_that_ignores_adapters_is_refused_though_a_new_adapter_changes_nothing(connect, server):
    fresh = VLMPolicy.from_config(MODEL, seed=1)
    server.fault = "ignores adapters"
    assert "the engine answers with the model without an adapter" in refused(connect(), fresh)


def test_an_engine_that_reports_log_probabilities_from_before_the_temperature_is_refused(connect, server, policy):
    server.fault = "raw log-probs"
    text = refused(connect(temperature=0.5), policy)
    assert "from before the temperature 0.5; start it with --logprobs-mode processed_logprobs" in text


def test_a_key_is_sent_and_a_missing_one_is_asked_for_and_no_message_shows_it(
    connect, server, policy, tmp_path, monkeypatch
):
    server.api_key = "engine-key-12345"
    assert "Give its key: inference.api_key_file, or PALAESTRA_INFERENCE_API_KEY" in refused(connect(), policy)
    monkeypatch.setenv("PALAESTRA_INFERENCE_API_KEY", "wrong-key-54321")
    assert "wrong-key" not in refused(connect(), policy)
    (tmp_path / "key").write_text("engine-key-12345\n")
    connect(api_key_file=tmp_path / "key").check(policy.trainable_state())
    with pytest.raises(ConfigError, match=r"inference\.api_key_file = .*cannot be read"):
        connect(api_key_file=tmp_path / "missing")


def test_a_key_that_no_header_can_hold_is_refused_without_being_shown(connect, monkeypatch):
    monkeypatch.setenv("PALAESTRA_INFERENCE_API_KEY", "first-line\nsecond-line")
    with pytest.raises(ConfigError, match=r"PALAESTRA_INFERENCE_API_KEY .*holds characters") as caught:
        connect()
    assert "line" not in str(caught.value).replace("in one line", "")
    assert not [thread for thread in threading.enumerate() if thread.name == "palaestra-engines"]


def test_an_engine_that_repeats_the_key_in_its_error_does_not_make_us_show_it(connect, server, policy, monkeypatch):
    monkeypatch.setenv("PALAESTRA_INFERENCE_API_KEY", "engine-key-12345")
    server.api_key = "another"
    monkeypatch.setattr(server, "answer", lambda *request: {}["Authorization: Bearer engine-key-12345"])
    text = refused(connect(), policy)
    assert "Authorization: Bearer ***" in text
    assert "engine-key" not in text


def test_a_version_that_the_engine_answers_with_the_old_adapter_is_refused_and_the_old_one_goes_on(
    connect, server, policy
):
    sampler = connect()
    sampler.publish(1, policy.trainable_state())
    before = sampler.sample([request(1)], temperature=1.0)
    move(policy, seed=5)
    server.fault = "keeps old adapter"
    with pytest.raises(CollectorFailed, match=r"answers with the adapter of version 1\. Version 2 is refused"):
        sampler.publish(2, policy.trainable_state())
    assert sampler.version == 1
    assert len(server.adapters) == 1
    assert tokens(sampler.sample([request(1)], temperature=1.0)) == tokens(before)
    server.fault = ""
    sampler.publish(2, policy.trainable_state())
    assert sampler.sample([request(1)], temperature=1.0)[0].completion.versions[0] == 2


def test_an_old_adapter_is_noticed_even_if_the_update_changes_less_than_the_tolerance(connect, server, policy):
    sampler = connect(probe_tolerance=0.1)
    sampler.publish(1, policy.trainable_state())
    move(policy, seed=5, by=0.0005)
    server.fault = "keeps old adapter"
    with pytest.raises(
        CollectorFailed, match=r"differs .* answers with the adapter of version 1\. Version 2"
    ) as caught:
        sampler.publish(2, policy.trainable_state())
    difference = float(re.findall(r"learner by ([\d.]+) nats", str(caught.value))[0])
    assert 0.001 < difference < 0.1
    assert sampler.version == 1
    server.fault = ""
    sampler.publish(2, policy.trainable_state())
    assert sampler.version == 2


def test_an_adapter_that_fails_to_load_in_training_is_refused_with_the_engines_words(connect, server, policy):
    sampler = connect()
    sampler.publish(1, policy.trainable_state())
    server.fault = "refuses adapters"
    with pytest.raises(CollectorFailed, match=r"did not load adapter .*its rank or layers do not fit this model"):
        sampler.publish(2, policy.trainable_state())
    assert sampler.version == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": [5, 10**12]}, "returned token 1000000000000, which may not be drawn"),
        ({"token_ids": [5, -1]}, "returned token -1, which may not be drawn"),
        ({"token_ids": list(range(20, 29))}, "returned 9 tokens for a reply of at most 8"),
        ({"token_ids": [5, float("inf")]}, "returned no token ids"),
        ({"token_ids": None}, "returned no token ids"),
        ({"prompt_token_ids": 5}, "returned no token ids"),
        ({"logprobs": {"content": [{"logprob": float("nan")}] * 2}}, "returned unusable log-probabilities for 2"),
        ({"logprobs": {"content": [{"logprob": 1.0}] * 2}}, "returned unusable log-probabilities for 2"),
        ({"logprobs": {"content": [{"logprob": -1.0}] * 3}}, "returned unusable log-probabilities for 2"),
        ({"logprobs": [3]}, "returned no log-probabilities for 2"),
    ],
)
def test_an_answer_that_the_learner_cannot_use_ends_the_request_in_words(
    connect, server, policy, monkeypatch, change, message
):
    sampler, real = connect(), server._reply
    sampler.publish(1, policy.trainable_state())

    def reply(*request):
        answer = real(*request)
        (choice,) = answer["choices"]
        choice["token_ids"] = [20, 21]
        choice |= {"logprobs": {"content": [{"logprob": -1.0}] * len(change.get("token_ids") or [20, 21])}} | change
        return answer

    monkeypatch.setattr(server, "_reply", reply)
    with pytest.raises(CollectorFailed, match=f"^{server.url} {message}"):
        sampler.sample([request(1)], temperature=1.0)


def test_a_reply_that_goes_on_after_its_end_is_refused(connect, server, policy, monkeypatch):
    sampler, real, end = connect(), server._reply, min(policy.rules.ends)
    sampler.publish(1, policy.trainable_state())

    def reply(*request):
        answer = real(*request)
        answer["choices"][0] |= {"token_ids": [end, 21], "logprobs": {"content": [{"logprob": -1.0}] * 2}}
        return answer

    monkeypatch.setattr(server, "_reply", reply)
    with pytest.raises(CollectorFailed, match="went on with a reply after an end token"):
        sampler.sample([request(1)], temperature=1.0)


def test_an_answer_without_end_is_not_read_to_its_end(connect, server, policy, monkeypatch):
    monkeypatch.setattr("palaestra.policy.vlm.serving.engine.MAX_ANSWER_BYTES", 1000)
    monkeypatch.setattr(server, "served_name", "x" * 2000)
    assert "it sends an answer of more than 1,000 bytes" in refused(connect(), policy)


def test_a_broken_connection_repeats_the_request_and_its_answer_enters_once(connect, server, policy):
    sampler = connect()
    sampler.publish(1, policy.trainable_state())
    expected = tokens(sampler.sample([request(1)], temperature=1.0))
    sampler.publish(2, policy.trainable_state())
    server.served.clear()
    server.fault = "breaks connection once"
    (reply,) = sampler.sample([request(1)], temperature=1.0)
    assert tokens([reply]) == expected
    # Sampled twice with the same name and seed, and answered once.
    assert len(server.served) == 2
    assert len(set(server.served)) == 1
    assert sampler.counts.retries == 1
    # The answer is kept: the same request is not sent again.
    assert tokens(sampler.sample([request(1), request(1)], temperature=1.0)) == expected * 2
    assert len(server.served) == 2


def test_an_engine_that_breaks_every_connection_is_given_up_after_the_allowed_retries(connect, server, policy):
    sampler = connect(retries=2)
    sampler.publish(1, policy.trainable_state())
    server.served.clear()
    server.fault = "breaks connection"
    with pytest.raises(CollectorFailed, match="failed 3 times to answer a request"):
        sampler.sample([request(1)], temperature=1.0)
    assert len(server.served) == 3


def test_an_engine_that_was_restarted_gets_its_adapter_again_and_answers_the_same(connect, server, policy):
    sampler = connect()
    sampler.publish(1, policy.trainable_state())
    expected = tokens(sampler.sample([request(1), request(2)], temperature=1.0))
    sampler.publish(2, policy.trainable_state())
    server.forget_adapters()
    assert tokens(sampler.sample([request(1), request(2)], temperature=1.0)) == expected
    assert sampler.counts.reloads == 1
    assert "had lost adapter" in sampler.notices[0]


def test_without_any_engine_a_batch_fails_after_the_time_limit_and_says_what_to_do(policy):
    server = SmallServer(MODEL)
    config = InferenceConfig(backend="server", urls=server.url, unreachable_s=0.2)
    with ServerSampler(policy, config, temperature=1.0, max_new_tokens=8) as sampler:
        sampler.publish(1, policy.trainable_state())
        server.close()
        with pytest.raises(CollectorFailed, match=r"no inference engine has answered for 0\.2 s .*resume the run"):
            sampler.sample([request(number) for number in range(8)], temperature=1.0)
    assert not [thread for thread in threading.enumerate() if thread.name == "palaestra-engines"]


def test_a_model_that_is_trained_as_a_whole_cannot_be_served():
    config = InferenceConfig(backend="server", urls="http://127.0.0.1:1")
    policy = VLMPolicy.from_config(ModelConfig(name="tiny", use_lora=False))
    with pytest.raises(ConfigError, match="engines take LoRA adapters"):
        ServerSampler(policy, config, temperature=1.0, max_new_tokens=8)
