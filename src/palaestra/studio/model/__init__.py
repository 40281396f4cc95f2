"""The state of the studio and its rules, without Qt. A model has a `revision` that grows with every change."""
