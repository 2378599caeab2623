//! The front with real sockets: scripted engines behind it, raw clients before it, a deciding thread beside it.

mod endings;
mod failures;
mod limits;
mod passing;
mod world;
