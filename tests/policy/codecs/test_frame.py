"""One function decides how large a picture is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policy.codecs.actions import SCREENS

from palaestra.errors import ConfigError
from palaestra.policy.codecs import CODECS, IMAGE_RULES, CoordinateFrame, ImageRule, image_size
from palaestra.sessions.action import Point
from palaestra.sessions.screen import Size


@pytest.mark.parametrize(
    ("screen", "factor", "least", "most", "image"),
    [
        ((1920, 1080), 28, 3136, 12_845_056, (1932, 1092)),
        ((1920, 1080), 32, 4096, 16_777_216, (1920, 1088)),
        ((1280, 720), 28, 3136, 12_845_056, (1288, 728)),
        ((160, 210), 28, 3136, 12_845_056, (168, 224)),  # 210 / 28 = 7.5, and 8 is the even one
        ((160, 210), 32, 65_536, 16_777_216, (224, 320)),  # enlarged to the least area
        ((1920, 1080), 28, 3136, 1_003_520, (1316, 728)),  # shrunk to the largest
        ((98, 98), 28, 3136, 12_845_056, (112, 112)),  # 3.5, and 4 is the even one
        ((126, 126), 28, 3136, 12_845_056, (112, 112)),  # 4.5, and 4 is the even one
        ((1, 1), 28, 3136, 12_845_056, (56, 56)),
        ((96, 96), 16, 256, 327_680, (96, 96)),
        ((4000, 20), 28, 3136, 12_544, (1568, 28)),  # the short side keeps one patch
        ((1024, 768), 1, 1, 1_049_088, (1024, 768)),
    ],
)
def test_the_size_of_a_picture(screen, factor, least, most, image):
    assert image_size(Size(*screen), factor=factor, min_pixels=least, max_pixels=most) == Size(*image)


@settings(deadline=None)
@given(screen=SCREENS, name=st.sampled_from(sorted(IMAGE_RULES)))
def test_both_sides_are_multiples_and_the_area_is_within_its_bounds(screen, name):
    rule = IMAGE_RULES[name]
    image = rule.frame(screen).image
    assert (image.width % rule.factor, image.height % rule.factor) == (0, 0)
    assert image.width * image.height >= rule.min_pixels
    # A side that would shrink to nothing keeps one patch, whatever the area then is.
    assert image.width * image.height <= rule.max_pixels or rule.factor in (image.width, image.height)


def test_a_screen_two_hundred_times_as_long_as_wide_is_the_limit():
    assert IMAGE_RULES["qwen2.5-vl"].frame(Size(2000, 10)).image == Size(1988, 28)
    with pytest.raises(ConfigError, match="one side is more than 200 times the other"):
        IMAGE_RULES["qwen2.5-vl"].frame(Size(2001, 10))


def test_sizes_and_rules_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match=r"screen = \(0, 10\)"):
        image_size(Size(0, 10), factor=28, min_pixels=1, max_pixels=9)
    with pytest.raises(ConfigError, match=r"frame.image"):
        CoordinateFrame(Size(1, 1), Size(0, 28))
    with pytest.raises(ConfigError, match=r"frame.pointer = \(5, 0\): is not on the screen of 5 x 5"):
        CoordinateFrame(Size(5, 5), Size(28, 28), pointer=Point(5, 0))
    with pytest.raises(ConfigError, match=r"image\.factor"):
        ImageRule(0, 1, 1)
    with pytest.raises(ConfigError, match="in this order"):
        ImageRule(28, 10, 9)


def test_every_family_has_a_rule():
    assert set(CODECS) < set(IMAGE_RULES)
    assert IMAGE_RULES["ui-tars-1.5"] == ImageRule(28, 78_400, 12_845_056)


def test_our_size_is_the_one_the_models_own_processor_chooses():
    processor = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    for width in range(40, 4000, 173):
        for height in range(40, 4000, 191):
            ours = image_size(Size(width, height), factor=28, min_pixels=3136, max_pixels=1_003_520)
            assert (ours.height, ours.width) == processor.smart_resize(height, width, 28, 3136, 1_003_520)
