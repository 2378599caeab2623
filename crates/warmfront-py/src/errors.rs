//! The one way a core error becomes a Python exception.

use pyo3::PyErr;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use warmfront_core::error::CoreError;

/// Turns a core error into the class of the same meaning in `warmfront.errors`.
pub(crate) fn to_py(error: CoreError) -> PyErr {
    let class = match error {
        CoreError::Config(_) | CoreError::Listen { .. } | CoreError::File { .. } => "ConfigError",
        CoreError::EventStream(_) => "EventStreamError",
        CoreError::UnknownRequest(_) => "UnknownRequestError",
        CoreError::Command(_) | CoreError::Panic => "CoreError",
    };
    Python::attach(|py| match py.import("warmfront.errors").and_then(|module| module.getattr(class)) {
        Ok(class) => match class.call1((error.to_string(),)) {
            Ok(instance) => PyErr::from_value(instance),
            Err(failure) => failure,
        },
        Err(failure) => PyRuntimeError::new_err(format!("{error} ({failure})")),
    })
}

/// Runs core work without the GIL and turns its error into ours.
pub(crate) fn detached<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T, CoreError> + Send) -> PyResult<T> {
    py.detach(work).map_err(to_py)
}
