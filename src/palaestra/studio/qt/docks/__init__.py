"""The docks at the sides of the window and their panels."""
