from palaestra.studio.model.revision import Revised


def test_every_change_grows_the_revision():
    model = Revised()
    model.touch()
    model.touch()

    assert model.revision == 2
