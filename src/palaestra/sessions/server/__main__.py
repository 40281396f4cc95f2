"""`python -m palaestra.sessions.server`: run a session server."""

from palaestra.sessions.server.process import main

if __name__ == "__main__":
    raise SystemExit(main())
