//! Reading a model directory: tokenizer, special tokens, chat templates.
//!
//! Follows `transformers`: `chat_template.jinja` (or `.json`) wins over the template inside `tokenizer_config.json`, a
//! list of named templates gives `default` and `tool_use`, added tokens may be declared in the configuration only.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use thiserror::Error;

/// Larger files are refused: no tokenizer is so large.
const FILE_BYTES_MAX: u64 = 512 << 20;

/// Named special tokens that templates see as variables.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Model types whose prompts the engine builds without a Jinja template.
const OWN_RENDERERS: &[&str] =
    &["gpt_oss", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k3", "inkling", "kimi_audio", "terratorch"];

/// Why a tokenizer cannot be used. Names the file.
#[derive(Debug, Error)]
pub enum TokenizeError {
    #[error("{path}: cannot be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{path}: is larger than {FILE_BYTES_MAX} bytes")]
    TooLarge { path: PathBuf },
    #[error("{path}: is not valid JSON: {source}")]
    Json { path: PathBuf, source: serde_json::Error },
    #[error("{path}: no tokenizer.json in this directory")]
    NoTokenizer { path: PathBuf },
    #[error("{path}: {reason}")]
    Tokenizer { path: PathBuf, reason: String },
    #[error("{path}: chat template: {reason}")]
    Template { path: PathBuf, reason: String },
    #[error("option {option}: {reason}")]
    Option { option: &'static str, reason: String },
}

/// What the files say.
#[derive(Debug)]
pub(super) struct Files {
    /// The `tokenizer.json`, for error messages.
    pub(super) path: PathBuf,
    pub(super) tokenizer: Value,
    /// Name → source. A single template is named `default`.
    pub(super) templates: Vec<(String, String)>,
    /// `bos_token` and so on → text.
    pub(super) named_tokens: Vec<(Arc<str>, Arc<str>)>,
    /// `add_bos_token` and `add_eos_token`, which replace the post-processor when the configuration has either.
    pub(super) adds: Option<(bool, bool)>,
    /// The engine renders this model's prompts with code of its own.
    pub(super) own_renderer: bool,
}

impl Files {
    /// Reads a model directory, or a `tokenizer.json` with what lies beside it.
    pub(super) fn read(path: &Path) -> Result<Self, TokenizeError> {
        let is_directory = path.is_dir();
        let directory = if is_directory { path } else { path.parent().unwrap_or(path) };
        let tokenizer_path = if is_directory { path.join("tokenizer.json") } else { path.to_owned() };
        if is_directory && !tokenizer_path.exists() {
            return Err(TokenizeError::NoTokenizer { path: path.to_owned() });
        }
        let mut tokenizer = json(&tokenizer_path)?;
        if !tokenizer["model"].is_object() {
            return Err(TokenizeError::Tokenizer { path: tokenizer_path, reason: "has no `model` object".to_owned() });
        }
        let config = optional_json(&directory.join("tokenizer_config.json"))?.unwrap_or_default();
        let special = optional_json(&directory.join("special_tokens_map.json"))?.unwrap_or_default();
        add_declared_tokens(&mut tokenizer, &config);
        Ok(Self {
            templates: templates(directory, &config)?,
            named_tokens: NAMED_TOKENS.iter().filter_map(|name| named_token(name, &config, &special)).collect(),
            adds: adds(&config),
            own_renderer: has_own_renderer(directory)?,
            path: tokenizer_path,
            tokenizer,
        })
    }
}

fn text(path: &Path) -> Result<String, TokenizeError> {
    let read = |source| TokenizeError::Read { path: path.to_owned(), source };
    if std::fs::metadata(path).map_err(read)?.len() > FILE_BYTES_MAX {
        return Err(TokenizeError::TooLarge { path: path.to_owned() });
    }
    std::fs::read_to_string(path).map_err(read)
}

fn json(path: &Path) -> Result<Value, TokenizeError> {
    serde_json::from_str(&text(path)?).map_err(|source| TokenizeError::Json { path: path.to_owned(), source })
}

fn optional_json(path: &Path) -> Result<Option<Value>, TokenizeError> {
    if path.exists() { json(path).map(Some) } else { Ok(None) }
}

fn templates(directory: &Path, config: &Value) -> Result<Vec<(String, String)>, TokenizeError> {
    let mut found = named_templates(&config["chat_template"]);
    let standalone = directory.join("chat_template.jinja");
    let wrapped = directory.join("chat_template.json");
    if standalone.exists() {
        found = vec![("default".to_owned(), text(&standalone)?)];
        found.extend(additional_templates(&directory.join("additional_chat_templates"))?);
    } else if wrapped.exists() {
        found = named_templates(&json(&wrapped)?["chat_template"]);
    }
    Ok(found)
}

fn named_templates(field: &Value) -> Vec<(String, String)> {
    match field {
        Value::String(source) => vec![("default".to_owned(), source.clone())],
        Value::Array(entries) => entries
            .iter()
            .filter_map(|entry| Some((entry["name"].as_str()?.to_owned(), entry["template"].as_str()?.to_owned())))
            .collect(),
        _ => Vec::new(),
    }
}

fn additional_templates(directory: &Path) -> Result<Vec<(String, String)>, TokenizeError> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Ok(Vec::new());
    };
    let mut found = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            found.push((name, text(&path)?));
        }
    }
    found.sort();
    Ok(found)
}

/// A special token is a string, or an object with the string under `content`.
fn named_token(name: &str, config: &Value, special: &Value) -> Option<(Arc<str>, Arc<str>)> {
    [config, special].into_iter().find_map(|file| {
        let token = file[name].as_str().or_else(|| file[name]["content"].as_str())?;
        Some((Arc::from(name), Arc::from(token)))
    })
}

fn adds(config: &Value) -> Option<(bool, bool)> {
    let flag = |name: &str| config[name].as_bool();
    let (bos, eos) = (flag("add_bos_token"), flag("add_eos_token"));
    (bos.is_some() || eos.is_some()).then(|| (bos.unwrap_or(false), eos.unwrap_or(false)))
}

/// Some models declare added tokens in `tokenizer_config.json` only.
fn add_declared_tokens(tokenizer: &mut Value, config: &Value) {
    let Some(declared) = config["added_tokens_decoder"].as_object() else {
        return;
    };
    let mut tokens = tokenizer["added_tokens"].as_array().cloned().unwrap_or_default();
    for (id, token) in declared {
        let Ok(id) = id.parse::<u64>() else { continue };
        let is_known = tokens.iter().any(|known| known["id"] == id || known["content"] == token["content"]);
        if is_known || !token["content"].is_string() {
            continue;
        }
        let mut token = token.clone();
        token["id"] = id.into();
        for flag in ["single_word", "lstrip", "rstrip", "normalized", "special"] {
            if token[flag].is_null() {
                token[flag] = false.into();
            }
        }
        tokens.push(token);
    }
    tokens.sort_by_key(|token| token["id"].as_u64());
    tokenizer["added_tokens"] = Value::Array(tokens);
}

/// Files and model types by which the engine leaves Jinja aside.
fn has_own_renderer(directory: &Path) -> Result<bool, TokenizeError> {
    if directory.join("tekken.json").exists() {
        return Ok(true);
    }
    let Some(config) = optional_json(&directory.join("config.json"))? else {
        return Ok(false);
    };
    Ok(config["model_type"].as_str().is_some_and(|kind| OWN_RENDERERS.contains(&kind)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, name: &str, contents: &str) {
        std::fs::write(directory.join(name), contents).expect("written");
    }

    fn world() -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("directory");
        write(
            directory.path(),
            "tokenizer.json",
            r#"{"model":{"type":"BPE"},"added_tokens":[{"id":0,"content":"<s>"}]}"#,
        );
        directory
    }

    #[test]
    fn templates_are_found_where_transformers_finds_them() {
        let directory = world();
        let config = r#"{"chat_template":[{"name":"default","template":"d"},{"name":"tool_use","template":"t"}]}"#;
        write(directory.path(), "tokenizer_config.json", config);
        let named = |files: &Files| files.templates.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(named(&Files::read(directory.path()).expect("files")), ["default", "tool_use"]);
        write(directory.path(), "chat_template.json", r#"{"chat_template":"wrapped"}"#);
        assert_eq!(Files::read(directory.path()).expect("files").templates[0].1, "wrapped");
        write(directory.path(), "chat_template.jinja", "alone");
        assert_eq!(Files::read(directory.path()).expect("files").templates, [("default".into(), "alone".into())]);
    }

    #[test]
    fn special_tokens_are_strings_or_objects() {
        let directory = world();
        let config = r#"{"bos_token":{"content":"<s>"},"eos_token":"</s>","pad_token":null,"add_bos_token":true,
            "added_tokens_decoder":{"0":{"content":"<s>"},"7":{"content":"<x>","special":true}}}"#;
        write(directory.path(), "tokenizer_config.json", config);
        write(directory.path(), "special_tokens_map.json", r#"{"pad_token":"<p>","eos_token":"<no>"}"#);
        let files = Files::read(&directory.path().join("tokenizer.json")).expect("files");
        let named: Vec<(&str, &str)> = files.named_tokens.iter().map(|(name, token)| (&**name, &**token)).collect();
        assert_eq!(named, [("bos_token", "<s>"), ("eos_token", "</s>"), ("pad_token", "<p>")]);
        assert_eq!(files.adds, Some((true, false)));
        assert_eq!(files.tokenizer["added_tokens"][1]["id"], 7);
    }

    #[test]
    fn models_that_the_engine_renders_by_code_are_recognised() {
        let directory = world();
        write(directory.path(), "config.json", r#"{"model_type":"gpt_oss"}"#);
        assert!(Files::read(directory.path()).expect("files").own_renderer);
        write(directory.path(), "config.json", r#"{"model_type":"qwen3"}"#);
        assert!(!Files::read(directory.path()).expect("files").own_renderer);
    }

    #[test]
    fn errors_name_the_file() {
        let directory = tempfile::tempdir().expect("directory");
        let error = Files::read(directory.path()).expect_err("empty").to_string();
        assert!(error.contains("no tokenizer.json"), "{error}");
        write(directory.path(), "tokenizer.json", "{");
        let error = Files::read(directory.path()).expect_err("broken").to_string();
        assert!(error.contains("tokenizer.json: is not valid JSON"), "{error}");
        assert!(Files::read(Path::new("/no/such/file")).expect_err("absent").to_string().contains("/no/such/file"));
    }
}
