"""The engine model on the wall clock, behind the HTTP surface of a vLLM server."""
