"""The studio: a desktop window to play, train, use trained policies, look at runs and operate the run service.

`model` holds the state and the rules and knows no Qt; `feed` is the only module that crosses threads; `qt` draws.
"""
