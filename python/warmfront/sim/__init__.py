"""The embedded engine: one model of what a router can see of vLLM, for the wall clock and for virtual time.

`engine.Engine` is the model: a plain state machine without I/O and without a clock. `server` runs it behind OpenAI
HTTP on the wall clock. What is faithful and what is simplified: docs/explanation/engine-model.md.
"""
