"""The query language: what matches, in which order, and where a mistake is."""

from dataclasses import replace

import pytest

from palaestra.errors import ConfigError
from palaestra.runs.analysis.query import RunValues, parse_query, select_runs
from palaestra.runs.phase import Phase
from palaestra.runs.record import RunRecord

RUN = RunRecord(
    run_id="a",
    runner="palaestra",
    agent_id="palaestra/ppo",
    env_id="CartPole-v1",
    phase=Phase.SUCCEEDED,
    episode_return=450.5,
    env_step=50_000,
    seed=3,
    tags=("paper", "Base line"),
    notes="Diverged once",
)


class Facts(RunValues):
    """A run whose configuration and metrics are given."""

    def __init__(self, record, config=None, metrics=None):
        self.record, self._config, self._given = record, config or {}, metrics or {}

    def _metric(self, name):
        return self._given.get(name)


def matches(text, config=None, metrics=None, **changes):
    return parse_query(text).matches(Facts(replace(RUN, **changes), config, metrics))


@pytest.mark.parametrize(
    "text",
    [
        "env=CartPole-v1 and return>400",
        "env == CartPole-v1",
        "return>=450.5 and return<=450.5 and not return<450.5",
        "step=50_000 and step=5e4",
        "phase!=failed",
        "tag=paper and tag='Base line' and tag~base",
        "notes~DIVERGED and notes!~nan",
        "favorite=false and not favorite=true",
        "runner=cleanrl or seed=3",
        "not (runner=cleanrl or seed=4)",
        "runner=cleanrl and seed=4 or seed=3",  # and binds more tightly
        "runner=cleanrl AND seed=4 OR NOT seed=4",
        "lr<1e-3 and net.hidden='[64, 64]' and norm=true and limit=null",
        "loss<0.5 and metric.loss<0.5 and config.lr=0.0005",
        "missing!=3 and missing!~x and not missing>0",
    ],
)
def test_these_queries_match(text):
    config = {"lr": 5e-4, "net.hidden": "[64, 64]", "norm": True, "limit": None}
    assert matches(text, config, {"loss": 0.25})


@pytest.mark.parametrize("text", ["return>450.5", "env=cartpole-v1", "env~acrobot", "missing=1", "seed=33", "phase>3"])
def test_these_queries_do_not(text):
    assert not matches(text)


def test_a_configuration_key_wins_over_a_metric_of_the_same_name_unless_it_is_named():
    assert matches("loss=1 and metric.loss=2", {"loss": 1}, {"loss": 2.0})


def test_nan_is_neither_above_nor_below_and_equals_itself():
    assert matches("loss=nan and not loss>0 and not loss<0", None, {"loss": float("nan")})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("env=", "expected a value after = at the end"),
        ("env CartPole", r"expected =, .* after env at character 5 \('CartPole'\)"),
        ("env=a return>1", r"expected and, or, or the end at character 7 \('return'\)"),
        ("return>high", r"> needs a number at character 8 \('high'\)"),
        ("(env=a", r"expected \) at the end"),
        ("env=a)", r"expected and, or, or the end at character 6 \('\)'\)"),
        ("env='a", "a quote is left open at character 5"),
        ("env=a and", "expected a name, such as env or return at the end"),
        ("and env=a", r"expected a name, such as env or return at character 1 \('and'\)"),
        ("env = ! a", "'!' is not expected at character 7"),
        ("((" * 40 + "env=a", "inside each other"),
    ],
)
def test_a_mistake_is_named_with_its_position(text, problem):
    with pytest.raises(ConfigError, match=problem):
        parse_query(text)


def test_nothing_of_a_query_is_executed():
    with pytest.raises(ConfigError, match="character"):
        parse_query("__import__('os').system('true')=1")


def test_runs_are_sorted_by_value_with_the_largest_first_and_those_without_last(home):
    from palaestra.runs.reader import RunReader

    reader = RunReader(home)
    runs = [
        replace(RUN, run_id=name, episode_return=value) for name, value in zip("abcd", (1, None, 3, 2), strict=True)
    ]

    def order(sort, **options):
        return "".join(run.run_id for run in select_runs(reader, runs, sort=sort, **options))

    assert order("return") == order("return:desc") == "cdab"
    assert order("return:asc") == "adcb"
    assert order("id:asc", limit=2) == "ab"
    assert order("return", where="return>1") == "cd"
    with pytest.raises(ConfigError, match=r"sort = 'retrun': no run has such a field.*Nearest: return"):
        order("retrun")
    with pytest.raises(ConfigError, match=r"where = 'setp': no run has such a field.*Nearest: step"):
        order("", where="setp>1")
