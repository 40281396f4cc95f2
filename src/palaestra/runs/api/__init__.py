"""The run service over HTTP: routes, documents, streams and the entrance that guards them."""
