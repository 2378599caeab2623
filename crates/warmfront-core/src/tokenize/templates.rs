//! The templates of one model, and which of them a request is rendered with.

use std::sync::Arc;

use parking_lot::Mutex;

use super::Fallback;
use super::load::{Files, TokenizeError};
use super::template::{LocalTime, Template};
use super::version::Version;
use crate::fleet::TemplateOptions;

/// Compiled templates that came with requests.
const REQUEST_TEMPLATES_MAX: usize = 8;

pub(super) struct Templates {
    /// Replaces all of the model's own.
    given: Option<Template>,
    default: Option<Template>,
    tool_use: Option<Template>,
    of_requests: Mutex<Vec<Arc<Template>>>,
    local_time: LocalTime,
}

impl Templates {
    /// Compiles what a model directory has, or the one template that an option gives.
    pub(super) fn compile(
        files: &Files,
        options: &TemplateOptions,
        local_time: &LocalTime,
        version: Version,
    ) -> Result<Self, TokenizeError> {
        let template = |source: &str| {
            Template::compile(source, local_time, version)
                .map_err(|reason| TokenizeError::Template { path: files.path.clone(), reason })
        };
        let named =
            |name: &str| files.templates.iter().find(|(key, _)| key == name).map(|(_, source)| template(source));
        let given = match &options.chat_template {
            None => None,
            Some(given) => Some(template(&given_source(given, &files.templates)?)?),
        };
        // Templates that are not used must not stop the tokenizer from loading.
        let own = |name: &str| {
            if given.is_some() { Ok(None) } else { named(name).transpose() }
        };
        Ok(Self {
            default: own("default")?,
            tool_use: own("tool_use")?,
            given,
            of_requests: Mutex::default(),
            local_time: Arc::clone(local_time),
        })
    }

    /// The template for a request with or without tools.
    pub(super) fn choose(&self, has_tools: bool) -> Option<&Template> {
        let tool_use = self.tool_use.as_ref().filter(|_| has_tools);
        self.given.as_ref().or(tool_use).or(self.default.as_ref())
    }

    /// The compiled template of a request; a few are kept.
    pub(super) fn of_request(&self, source: &Arc<str>, version: Version) -> Result<Arc<Template>, Fallback> {
        if let Some(known) = self.of_requests.lock().iter().find(|template| template.source == *source) {
            return Ok(Arc::clone(known));
        }
        let template = Template::compile(source, &self.local_time, version).map_err(|_| Fallback::TemplateError)?;
        let template = Arc::new(template);
        let mut known = self.of_requests.lock();
        if known.len() >= REQUEST_TEMPLATES_MAX {
            known.remove(0);
        }
        known.push(Arc::clone(&template));
        Ok(template)
    }
}

/// A template option is a file, the name of one of the model's templates, or Jinja itself.
fn given_source(given: &str, named: &[(String, String)]) -> Result<String, TokenizeError> {
    if let Some((_, source)) = named.iter().find(|(name, _)| name == given) {
        return Ok(source.clone());
    }
    if given.contains(['{', '}', '\n']) {
        return Ok(given.to_owned());
    }
    std::fs::read_to_string(given).map_err(|source| TokenizeError::Read { path: given.into(), source })
}
