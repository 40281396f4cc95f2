"""Sessions as pods of a Kubernetes cluster, one new pod per session. Never imports torch."""
