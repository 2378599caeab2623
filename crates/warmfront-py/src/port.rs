//! The live service as one Python object.

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyBytes, PyList};
use warmfront_core::config::CoreConfig;
use warmfront_core::error::CoreError;
use warmfront_core::log;
use warmfront_core::overlap::PoolOverlap;
use warmfront_core::runtime::Service;

use crate::errors::{detached, to_py};

/// Columns of `warmfront.types.Overlap`, in its field order.
pub(crate) type Columns<'py> = (
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Bound<'py, PyList>,
    Option<u64>,
);

/// Both queues of a running data process. All methods may be called from one thread at a time only.
#[pyclass(frozen)]
pub(crate) struct Port {
    service: Service,
}

#[pymethods]
impl Port {
    /// Binds, starts all threads and the control process.
    #[new]
    fn new(py: Python<'_>, config: &[u8]) -> PyResult<Self> {
        detached(py, || {
            let config: CoreConfig =
                serde_json::from_slice(config).map_err(|error| CoreError::Config(error.to_string()))?;
            log::init(&config.log)?;
            Ok(Self { service: Service::start(config)? })
        })
    }

    /// Waits for events, without the GIL; `None` once everything has drained. Raises when a thread of the core panicked.
    fn receive<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        match py.detach(|| self.service.receive()) {
            Some(batch) => Ok(Some(PyBytes::new(py, &batch))),
            None if self.service.has_panicked() => Err(to_py(CoreError::Panic)),
            None => match self.service.failure() {
                Some(reason) => Err(to_py(CoreError::Config(reason))),
                None => Ok(None),
            },
        }
    }

    /// Hands a batch of commands to the core.
    fn send(&self, py: Python<'_>, commands: &[u8]) -> PyResult<()> {
        detached(py, || self.service.command(commands))
    }

    /// What each replica of the request's pool holds of its prompt. Keeps the GIL: microseconds.
    fn overlap<'py>(&self, py: Python<'py>, id: u64) -> PyResult<Columns<'py>> {
        columns(py, &self.service.overlap(id).map_err(to_py)?)
    }

    /// Notes that `slot` will hold the request's prompt.
    fn predict(&self, id: u64, slot: u32) -> PyResult<()> {
        self.service.dispatched(id, slot).map_err(to_py)
    }

    /// Adds to a counter of the catalogue; counters count whole things.
    fn count(&self, name: &str, labels: Vec<PyBackedStr>, n: u64) {
        self.service.metrics().inc(name, &borrowed(&labels), n);
    }

    /// Adds one observation to a histogram of the catalogue.
    fn observe(&self, name: &str, labels: Vec<PyBackedStr>, value: f64) {
        self.service.metrics().observe(name, &borrowed(&labels), value);
    }

    /// Sets a gauge of the catalogue.
    fn set(&self, name: &str, labels: Vec<PyBackedStr>, value: f64) {
        self.service.metrics().set(name, &borrowed(&labels), value);
    }

    /// Address that clients reach, with the port that was really bound.
    #[getter]
    fn address(&self) -> String {
        self.service.address().to_string()
    }

    /// Begins to stop, as a termination signal does.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.service.stop());
        Ok(())
    }

    /// Waits, without the GIL, for the end of all threads once `receive` has said `None`: the last snapshot is written by
    /// one of them.
    fn join(&self, py: Python<'_>) {
        py.detach(|| self.service.join());
    }
}

fn borrowed(labels: &[PyBackedStr]) -> Vec<&str> {
    labels.iter().map(|label| &**label).collect()
}

/// Depths are usually the same in every tier, and then one list stands for all of them: nobody writes to a column.
pub(crate) fn columns<'py>(py: Python<'py>, found: &PoolOverlap) -> PyResult<Columns<'py>> {
    let device = PyList::new(py, &found.device)?;
    let depth = |column: &[u32]| if column == found.device { Ok(device.clone()) } else { PyList::new(py, column) };
    Ok((
        device.clone(),
        depth(&found.confirmed)?,
        depth(&found.host)?,
        depth(&found.disk)?,
        depth(&found.active)?,
        PyList::new(py, &found.active_tokens)?,
        PyList::new(py, &found.resident_tokens)?,
        PyList::new(py, &found.evicted_blocks)?,
        PyList::new(py, &found.regretted_blocks)?,
        PyList::new(py, &found.age_s)?,
        found.frontier_key,
    ))
}
