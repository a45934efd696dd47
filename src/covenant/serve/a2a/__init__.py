"""The A2A surface: eleven operations, three bindings."""
