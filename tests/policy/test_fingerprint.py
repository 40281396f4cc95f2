"""The fingerprint of weights follows from names, shapes, dtypes and numbers alone."""

import torch

from palaestra.policy.fingerprint import LARGEST, weights_fingerprint


def test_equal_weights_in_other_memory_and_order_have_the_same_fingerprint():
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    found = weights_fingerprint({"a": a, "b": b})
    assert len(found) == 64
    assert weights_fingerprint({"b": b.clone(), "a": a.t().contiguous().t()}) == found


def test_another_number_shape_name_or_dtype_gives_another_fingerprint():
    a = torch.arange(6.0)
    changed = a.clone()
    changed[5] += 1e-6
    others = [{"a": changed}, {"a": a.reshape(2, 3)}, {"b": a}, {"a": a.double()}, {"a": a.bfloat16()}, {}]
    assert len({weights_fingerprint(one) for one in [{"a": a}, *others]}) == 7


def test_a_large_tensor_is_told_from_one_that_a_step_moved():
    a = torch.zeros(3 * LARGEST + 5)
    assert weights_fingerprint({"a": a}) != weights_fingerprint({"a": a + 1e-3})
    assert weights_fingerprint({"a": a}) != weights_fingerprint({"a": a[:-1]})


def test_an_empty_set_an_empty_tensor_and_a_scalar_have_fingerprints():
    found = {weights_fingerprint(one) for one in ({}, {"a": torch.zeros(0)}, {"a": torch.tensor(1.0)})}
    assert len(found) == 3
