//! The metric registry: families are registered from the catalogue in the configuration and found by name.
//!
//! Values come from here and, for what only the router knows, from Python. Label values are capped; the rest count under
//! `other`.
