"""What must never be shown is not shown, and what may be is left alone."""

import numpy as np
import pytest

from palaestra.errors import ConfigError
from palaestra.redaction import Redactor, is_secret_key, is_secret_name, redact_command, redact_environment


@pytest.mark.parametrize(
    "name",
    ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "db_passwd", "GITHUB_PAT", "X_AUTH", "COOKIE"],
)
def test_these_names_hold_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["PATH", "HOME", "SSH_AUTH_SOCK", "XAUTHORITY", "TOKENIZERS_PARALLELISM", "PYTHONHASHSEED", "PATIENCE"]
)
def test_these_do_not(name):
    assert not is_secret_name(name)


def test_an_environment_is_shown_in_order_with_secrets_hidden_wherever_their_value_turns_up():
    environment = {"URL": "http://h/?k=abcdef0123456789", "API_KEY": "abcdef0123456789", "A": "1"}
    shown = redact_environment(environment)
    assert list(shown.items()) == [("A", "1"), ("API_KEY", "***"), ("URL", "http://h/?k=***")]


def test_a_short_value_is_hidden_by_its_name_but_not_hunted_for_elsewhere():
    # A password of "test" must not turn every test into three stars.
    assert redact_environment({"PASSWORD": "test", "MODE": "test"}) == {"PASSWORD": "***", "MODE": "test"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer ***"),
        ("clone https://me:hunter2secret@host/x", "clone https://me:***@host/x"),
        ("login hf_abcdefghijklmnop", "login ***"),
        ("key sk-abcdefghijklmnop", "key ***"),
        ("AKIAABCDEFGHIJKLMNOP", "***"),
        ("0123456789abcdef0123456789abcdef01234567 is the wandb key", "*** is the wandb key"),
        ("commit 0123456789abcdef0123456789abcdef01234567", "commit 0123456789abcdef0123456789abcdef01234567"),
        ("loss 0.123, step 4000", "loss 0.123, step 4000"),
        ("hf-internal-testing/tiny-random-LlamaModel", "hf-internal-testing/tiny-random-LlamaModel"),
    ],
)
def test_tokens_are_known_by_their_shape(text, shown):
    assert Redactor()(text) == shown


def test_the_longer_of_two_secrets_goes_first():
    assert Redactor(["password1", "password1-and-more"])("use password1-and-more") == "use ***"


def test_a_value_with_special_characters_is_taken_literally():
    assert Redactor(["a.c+d(e)f"])("a.c+d(e)f axc+d(e)f") == "*** axc+d(e)f"


@pytest.mark.parametrize(
    "name",
    ["api_key", "wandb.api_key", "--api-key", "password", "db_passwd", "token", "hf_token", "MY_TOKEN", "secret"],
)
def test_these_keys_hold_secrets(name):
    assert is_secret_key(name)


@pytest.mark.parametrize(
    "name", ["max_tokens", "pad_token", "tokenizer", "author", "keys", "token_file", "key", "env.id"]
)
def test_these_keys_do_not(name):
    assert not is_secret_key(name)


def test_a_refusal_hides_what_a_secret_key_holds_and_tokens_in_any_text():
    assert str(ConfigError("wandb.api_key", "abc", "unknown key")) == "wandb.api_key = '***': unknown key."
    nested = ConfigError(
        "spec", {"environment": {"MY_TOKEN": "abc", "A": "1"}, "list": ["--api-key=abc", 3]}, "is wrong"
    )
    assert nested.value == {"environment": {"MY_TOKEN": "***", "A": "1"}, "list": ["--api-key=***", 3]}
    assert ConfigError("url", "http://me:abc@host", "does not answer").value == "http://me:***@host"
    assert ConfigError("override", "a.password=abc", "is wrong").value == "a.password=***"
    assert ConfigError("steps", 3, "is wrong").value == 3


def test_a_command_line_is_shown_without_what_its_options_hide():
    words = ["python", "x.py", "--api-key", "abc", "--token=abc", "--max-tokens", "5", "--password", "--seed", "3"]
    shown = ["python", "x.py", "--api-key", "***", "--token=***", "--max-tokens", "5", "--password", "--seed", "3"]
    assert redact_command(words) == shown


def test_an_error_about_deeply_nested_data_is_made_without_recursion():
    value = []
    for _ in range(5000):
        value = [value]

    assert "***" in str(ConfigError("action", value, "is nested too deeply").value)


def test_an_error_about_an_array_shows_it():
    error = ConfigError("observation", np.array([0.5, 2.0]), "is too large")
    assert str(error) == "observation = array([0.5, 2. ]): is too large."
    assert "***" in str(ConfigError("api_key", np.array([1, 2]), "is an array"))
