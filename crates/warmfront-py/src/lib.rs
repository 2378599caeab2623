//! Python bindings of the core: conversions and nothing else.

mod tokenizer;

use pyo3::prelude::*;

#[pymodule(gil_used = false)]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<tokenizer::Tokenizer>()
}
