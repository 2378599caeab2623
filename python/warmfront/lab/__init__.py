"""The lab: named regimes, the policies of others, and what they do to latency, on virtual time."""
