"""Pure decisions: which replica serves a request. No I/O, no clock, no unseeded random number."""
