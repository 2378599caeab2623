//! HTTP towards clients and engines.
