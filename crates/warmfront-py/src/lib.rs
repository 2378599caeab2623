//! Python bindings: conversions and nothing else.
//!
//! Coarse calls only: a batch of events out, a batch of commands in, one configuration object. No callbacks into Python.

mod bounds;
mod errors;
mod index;
mod port;
mod samples;
mod sim;
mod tokenizer;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use warmfront_core::{cost, error, mailbox};

/// Of the core alone: Python's objects stay with Python's own allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `(status, type, code)` of every error the core answers with.
#[pyfunction]
fn error_faces() -> Vec<(u16, &'static str, &'static str)> {
    error::FACES.iter().map(|face| (face.status, face.kind, face.code)).collect()
}

/// One event of each kind, encoded as a batch: what the contract test decodes in Python.
#[pyfunction]
fn sample_events(py: Python<'_>) -> Bound<'_, PyBytes> {
    PyBytes::new(py, &mailbox::encode_events(&samples::events()))
}

/// Decodes a batch of commands and gives their debug form, one a command: what the contract test compares.
#[pyfunction]
fn read_commands(commands: &[u8]) -> PyResult<Vec<String>> {
    let commands = mailbox::decode_commands(commands).map_err(errors::to_py)?;
    Ok(commands.iter().map(|command| format!("{command:?}")).collect())
}

/// The complementary error function, to the last bit what the core computes with: platforms' libraries differ in it.
#[pyfunction]
fn erfc(x: f64) -> f64 {
    cost::erfc(x)
}

/// Version of the core, equal to the package's.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    index::register(module)?;
    sim::register(module)?;
    module.add_class::<bounds::Bounds>()?;
    module.add_class::<port::Port>()?;
    module.add_class::<tokenizer::Tokenizer>()?;
    module.add_function(wrap_pyfunction!(erfc, module)?)?;
    module.add_function(wrap_pyfunction!(error_faces, module)?)?;
    module.add_function(wrap_pyfunction!(sample_events, module)?)?;
    module.add_function(wrap_pyfunction!(read_commands, module)?)?;
    module.add_function(wrap_pyfunction!(version, module)?)?;
    Ok(())
}
