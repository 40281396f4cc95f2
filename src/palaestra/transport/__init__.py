"""The two arrows between actor and learner: experience one way, versioned weights the other."""
