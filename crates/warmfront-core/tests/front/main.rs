//! The front with real sockets: scripted engines behind it, raw clients before it, a deciding thread beside it.

mod access;
mod beginning;
mod endings;
mod failures;
mod leaving;
mod limits;
mod passing;
mod precedence;
#[allow(dead_code, reason = "a part is for tests that need a process of their own")]
mod world;
