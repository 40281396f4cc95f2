"""The session server: HTTP routes, their OpenAPI document, and the process that serves them."""
