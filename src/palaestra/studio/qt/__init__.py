"""The views of the studio. Only this package imports Qt."""
