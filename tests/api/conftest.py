"""An empty state directory for each test, in which the API stores its runs."""

import pytest

from palaestra.files.home import Home


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PALAESTRA_HOME", raising=False)
    return Home.default()
