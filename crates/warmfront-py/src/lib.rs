//! The extension module `warmfront._core`: conversions between Python and `warmfront-core`, and nothing else.

mod index;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<index::Index>()?;
    module.add_function(wrap_pyfunction!(index::hash_tokens, module)?)?;
    module.add_function(wrap_pyfunction!(index::decode_batch, module)?)?;
    Ok(())
}
