"""The real router process between official, raw and hostile clients and an engine that keeps every byte."""
