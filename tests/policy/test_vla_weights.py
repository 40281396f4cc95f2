"""Pretrained weights: read without running anything, fitted name by name, refused with what is wrong and what to do."""

import ast
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import palaestra.policy
from palaestra.errors import ConfigError
from palaestra.policy.vla.loading import fit_weights, read_weights
from palaestra.policy.vla.policy import match_prefix


class Small(nn.Module):
    def __init__(self, out=2):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.head = nn.Linear(4, out)


def _state(seed=0, **config):
    torch.manual_seed(seed)
    return Small(**config).state_dict()


def _same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth", ".bin"])
def test_a_state_dict_is_read_from_every_usual_file(suffix, tmp_path):
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(_state(), path)
    assert _same(read_weights(path), _state())
    assert _same(read_weights(tmp_path), _state())  # and from the directory that holds it alone


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "policy_state_dict"])
def test_a_state_dict_is_found_under_the_usual_names(key, tmp_path):
    torch.save({key: _state(), "epoch": 3}, tmp_path / "weights.pt")
    assert _same(read_weights(tmp_path / "weights.pt"), _state())


def test_shards_are_put_together_by_their_index(tmp_path):
    state = _state()
    names = sorted(state)
    shards = {"a.safetensors": names[:1], "b.safetensors": names[1:]}
    for shard, part in shards.items():
        save_file({name: state[name] for name in part}, tmp_path / shard)
    index = {"weight_map": {name: shard for shard, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert _same(read_weights(tmp_path), state)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"1 of the 2 shards it lists are not there \(b.safetensors\)"):
        read_weights(tmp_path)


def test_an_index_that_is_none_is_refused(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not an index of shards"):
        read_weights(tmp_path)


class Malicious:
    """Unpickling it makes a directory."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def _plain_pickle(content, path):
    path.write_bytes(pickle.dumps(content))


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (torch.save, r"would run code \(it asks for \w+.mkdir\); nothing was run"),
        (_plain_pickle, "is not an archive of tensors and nothing else"),
    ],
)
def test_a_file_that_would_run_code_is_refused_and_runs_none(write, reason, tmp_path):
    path, target = tmp_path / "model.pth", tmp_path / "proof"
    write({"state_dict": Malicious(target)}, path)
    with pytest.raises(ConfigError, match=f"{reason}. Re-save its weights as safetensors"):
        read_weights(path)
    assert not target.exists()
    pickle.loads(pickle.dumps(Malicious(target)))  # it is dangerous indeed
    assert target.exists()


def test_a_whole_pickled_module_is_refused_with_the_remedy(tmp_path):
    torch.save(Small(), tmp_path / "model.pt")
    with pytest.raises(ConfigError, match=r"run code .*Small.*Re-save its weights as safetensors"):
        read_weights(tmp_path / "model.pt")


def test_torch_archives_are_opened_for_tensors_only():
    """The text `torch.load` stands once in the package and once in the program for other interpreters, both times
    with weights_only=True."""
    found = []
    for path in Path(palaestra.policy.__file__).parents[1].rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        mentions = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and ast.unparse(n) == "torch.load"]
        bound = [
            call
            for call in calls
            if any(ast.unparse(a) == "torch.load" for a in (call.func, *call.args))
            and any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in call.keywords)
        ]
        assert len(mentions) == len(bound), path
        found += [path.name] * len(bound)
    assert sorted(found) == ["loading.py", "policy_program.py"]


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
@pytest.mark.parametrize("keep", [0, 7, 300])
def test_a_truncated_file_is_refused(suffix, keep, tmp_path):
    path = tmp_path / f"weights{suffix}"
    (save_file if suffix == ".safetensors" else torch.save)(_state(), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=r"cannot be read|not an archive of tensors") as caught:
        read_weights(path)
    assert "\n" not in str(caught.value)


def test_a_wrong_path_is_answered_with_what_is_there(tmp_path):
    save_file(_state(), tmp_path / "pretrained_vla.safetensors")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ConfigError, match=r"no such file. In .* there is pretrained_vla.safetensors\."):
        read_weights(tmp_path / "pretrained_vla.pth")
    with pytest.raises(ConfigError, match=r"there is no directory .*nowhere"):
        read_weights(tmp_path / "nowhere" / "weights.pt")
    with pytest.raises(ConfigError, match=r"\.txt is not read \(only \.safetensors, \.pt"):
        read_weights(tmp_path / "notes.txt")


def test_a_directory_without_or_with_too_many_candidates_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no .safetensors"):
        read_weights(tmp_path)
    save_file(_state(), tmp_path / "a.safetensors")
    save_file(_state(), tmp_path / "b.safetensors")
    with pytest.raises(ConfigError, match=r"several files \(a.safetensors, b.safetensors\) and no index. Name one"):
        read_weights(tmp_path)


@pytest.mark.parametrize("content", [{"epoch": 3, "loss": 0.5}, [torch.zeros(2)], {}, {"model": {"lr": 0.1}}])
def test_a_file_without_a_state_dict_is_refused(content, tmp_path):
    torch.save(content, tmp_path / "weights.pt")
    with pytest.raises(ConfigError, match=r"holds no state dict.*Save model.state_dict\(\)"):
        read_weights(tmp_path / "weights.pt")


def test_weights_that_fit_are_loaded_bit_for_bit():
    model = Small()
    report = fit_weights(model, _state(7), path="w")
    assert (report.loaded, report.fits) == (4, True)
    assert _same(model.state_dict(), _state(7))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_the_prefix_of_a_wrapper_is_taken_off_and_told(prefix):
    model = Small()
    report = fit_weights(model, {f"{prefix}{name}": value for name, value in _state(7).items()}, path="w")
    assert report.stripped == prefix
    assert _same(model.state_dict(), _state(7))


def test_what_does_not_fit_is_told_in_counts_and_names_and_changes_nothing():
    state = _state(7, out=5)
    state["encodr.weight"] = state.pop("encoder.weight")
    model = Small()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    message = (
        r"1 of 4 weights fit, 1 missing \('encoder.weight'; nearest in the file: 'encodr.weight'\), "
        r"1 unexpected \('encodr.weight'\), 2 of another shape "
        r"\('head.bias' is \(5,\) in the file and \(2,\) in the model\). Use the class .*strict=false"
    )
    with pytest.raises(ConfigError, match=message):
        fit_weights(model, state, path="w")
    assert _same(model.state_dict(), before)


def test_without_strict_what_fits_is_loaded_and_the_rest_reported():
    model = Small()
    first = model.head.weight.clone()
    report = fit_weights(model, {**_state(7, out=5), "extra": torch.zeros(1)}, path="w", strict=False)
    assert (report.loaded, report.missing, report.unexpected) == (2, (), ("extra",))
    assert report.reshaped == ("head.bias", "head.weight")
    assert torch.equal(model.encoder.weight, _state(7)["encoder.weight"])
    assert torch.equal(model.head.weight, first)


def test_not_even_without_strict_is_a_file_accepted_of_which_nothing_fits():
    with pytest.raises(ConfigError, match="0 of 4 weights fit"):
        fit_weights(Small(), {"a": torch.zeros(1)}, path="w", strict=False)


def test_a_part_that_is_known_to_be_new_is_not_missed():
    state = {name: value for name, value in _state(7).items() if name.startswith("encoder")}
    assert fit_weights(Small(), state, path="w", fresh=("head",)).fits
    with pytest.raises(ConfigError, match="2 missing"):
        fit_weights(Small(), state, path="w", fresh=("hea",))


def test_weights_that_are_not_finite_are_refused_by_name():
    state = _state()
    state["head.weight"][1, 2] = float("nan")
    with pytest.raises(ConfigError, match=r"1 of 4 tensors hold numbers that are not finite \('head.weight'\)"):
        fit_weights(Small(), state, path="w")


def test_a_prefix_ends_where_a_dot_is_and_the_longest_counts():
    assert match_prefix("encoder.layer.weight", ("encoder", "encoder.layer")) == "encoder.layer"
    assert match_prefix("encoder2.weight", ("encoder",)) is None
    assert match_prefix("encoder.weight", ("encoder.",)) == "encoder."
    assert match_prefix("log_std", ("log_std",)) == "log_std"
