"""The page on pretrained models: its code runs and its configurations load."""

import re
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file

from palaestra.config import parse_section
from palaestra.policy import PolicyConfig
from palaestra.policy.config import VLAConfig
from palaestra.policy.vla.conformance import METHODS
from palaestra.train import config_from

PAGE = (Path(__file__).parents[2] / "docs" / "vla.md").read_text()


def _blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, resave = _blocks("python")
    scope = {}
    exec(model, scope)
    weights = scope["TinyVLA"](action_dim=2).state_dict()
    torch.save({"state_dict": weights, "notes": Path("here")}, "trusted.pth")
    exec(resave, {})
    assert load_file("weights.safetensors").keys() == weights.keys()


def test_the_configurations_load():
    for block in _blocks("yaml"):
        config = config_from(yaml.safe_load(block))
        assert config.policy.vla_config is not None
    assert len(_blocks("yaml")) == 2


def test_every_key_and_method_is_on_the_page():
    keys = VLAConfig.model_json_schema()["properties"]
    assert all(f"| `{key}` |" in PAGE for key in keys)
    assert all(f"| `{name}(" in PAGE for name in METHODS)
    listed = PolicyConfig.model_fields["vla_config"].description
    assert all(f"`{key}`" in listed for key in keys)
    fresh = re.search(r"`model_config: (\{policy: .*\}\})`", PAGE)[1]
    parse_section(VLAConfig, {"model_class": "x:Y", "model_config": yaml.safe_load(fresh)})
