"""`palaestra runs tensorboard --stop` without a running TensorBoard."""

from palaestra.files.home import Home


def test_no_service_is_started_to_hear_that_none_is_open(palaestra, tmp_path):
    result = palaestra("runs", "tensorboard", "--stop")

    assert (result.code, result.out) == (0, "No such TensorBoard is running.\n")
    assert palaestra("runs", "tensorboard", "--stop", "--json").out == "[]\n"
    assert not Home(tmp_path.resolve() / "var" / "training").service.exists()


def test_without_a_run_there_is_nothing_to_show(palaestra):
    result = palaestra("runs", "tensorboard")

    assert result.code == 2
    assert "no run given" in result.err
