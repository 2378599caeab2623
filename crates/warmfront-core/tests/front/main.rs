//! The front with real sockets: scripted engines behind it, raw clients before it, a deciding thread beside it.

mod access;
mod endings;
mod failures;
mod leaving;
mod limits;
mod passing;
mod world;
