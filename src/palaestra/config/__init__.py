"""Configuration: typed sections that refuse unknown keys (`section`), and YAML or JSON files (`file`)."""

from palaestra.config.section import (
    Section,
    closest_names,
    import_address,
    import_own_module,
    parse_section,
    suggest_name,
)

__all__ = ["Section", "closest_names", "import_address", "import_own_module", "parse_section", "suggest_name"]
