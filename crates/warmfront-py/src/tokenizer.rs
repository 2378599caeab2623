//! The core's tokenizer for tests that compare it with the engine's answers.

use std::path::Path;

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use warmfront_core::fleet::TemplateOptions;
use warmfront_core::http::request::{Endpoint, ParsedBody, parse};
use warmfront_core::tokenize::{Fallback, Tokenizer as CoreTokenizer};

/// `Tokenizer(path, options)`: `options` is the JSON of `TemplateOptions`; loading takes seconds.
#[pyclass(frozen)]
pub struct Tokenizer {
    inner: CoreTokenizer,
}

#[pymethods]
impl Tokenizer {
    #[new]
    #[pyo3(signature = (path, options = "{}"))]
    fn new(py: Python<'_>, path: &str, options: &str) -> PyResult<Self> {
        let options: TemplateOptions = serde_json::from_str(options).map_err(value_error)?;
        let inner = py.detach(|| CoreTokenizer::load(Path::new(path), &options)).map_err(value_error)?;
        Ok(Self { inner })
    }

    /// Token ids of each prompt in a body sent to `path`. Raises `ValueError` with the reason of a fallback.
    fn prompt(&self, py: Python<'_>, path: &str, body: Vec<u8>) -> PyResult<Vec<Vec<u32>>> {
        let (endpoint, body) = read(path, body)?;
        py.detach(|| self.inner.prompt(endpoint, &body)).map(|prompts| prompts.ids).map_err(reason)
    }

    /// The text that the template makes of a body sent to `path`. Raises like `prompt`.
    fn render(&self, py: Python<'_>, path: &str, body: Vec<u8>) -> PyResult<String> {
        let (endpoint, body) = read(path, body)?;
        py.detach(|| self.inner.render(endpoint, &body)).map_err(reason)
    }

    /// Ids of a text: cut and cached if `cut`, in one piece otherwise.
    #[pyo3(signature = (text, *, cut = true))]
    fn encode(&self, py: Python<'_>, text: &str, cut: bool) -> PyResult<Vec<u32>> {
        py.detach(|| if cut { self.inner.encode(text, false) } else { self.inner.encode_whole(text) }).map_err(reason)
    }

    /// Ids that the engine's `/tokenize` gives for a JSON list of messages.
    fn tokenize(&self, py: Python<'_>, messages: &str) -> PyResult<Vec<u32>> {
        py.detach(|| self.inner.tokenize_like_engine_endpoint(messages)).map_err(reason)
    }
}

fn read(path: &str, body: Vec<u8>) -> PyResult<(Endpoint, ParsedBody)> {
    let endpoint = Endpoint::of(path);
    let body = parse(endpoint, &Bytes::from(body)).map_err(value_error)?;
    Ok((endpoint, body))
}

fn reason(fallback: Fallback) -> PyErr {
    PyValueError::new_err(fallback.reason())
}

fn value_error(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}
