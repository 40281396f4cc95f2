"""The read-only web page of the run service: its files, its access by link and cookie, and its headers."""
