"""Recording of demonstrations: actions of oracles and people, written as replies of a model."""
