"""Processes for the fault tests: those of the integration tests."""

from integration.conftest import start

__all__ = ["start"]
