"""The reference of the HTTP API is what the service says of itself."""

from benchmarks.api_reference import PAGE, description, page


def test_the_reference_is_what_the_description_says():
    assert PAGE.read_text() == page(description()), "docs/http-api.md is old: python -m benchmarks.api_reference"


def test_every_operation_is_explained_and_has_a_subject():
    document = description()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"], f"{method} {path}"
            assert len(operation["tags"]) == 1, f"{method} {path}"
            assert f"`{method.upper()} {path}`" in PAGE.read_text()
