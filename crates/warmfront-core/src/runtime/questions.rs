//! Questions of the control process: most go to the router; the core answers about tokens itself.
//!
//! `tokens` asks for the ids of a request by the very tokenizer that requests go through, so that the control process
//! compares with the engines what is used and loads none of its own. The question names the tokenizer; while another one
//! is loaded the answer is 409, since ids of the one before would prove nothing.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;

use super::{Shared, change};
use crate::control::{Answerer, Question, Reply};
use crate::fleet::{FleetView, TemplateOptions};
use crate::http::Ask;
use crate::http::request::{self, Endpoint};
use crate::tokenize::Tokenizer;

/// Payload of `tokens`, as JSON.
#[derive(Deserialize)]
struct Sample {
    /// Of the pool: path and options.
    tokenizer: String,
    template: TemplateOptions,
    /// The request, as a client would send it.
    body: String,
}

pub(super) fn answerer(shared: &Arc<Shared>) -> Arc<Answerer> {
    let shared = Arc::downgrade(shared);
    Arc::new(move |question| {
        let shared = shared.upgrade();
        Box::pin(async move {
            match shared {
                Some(shared) if question.question == "tokens" => {
                    tokens(&shared.view.load(), Endpoint::of(&question.path), &question.payload)
                }
                Some(shared) => match question.question.as_str() {
                    "drain" => change::drain(&shared, true),
                    "undrain" => change::drain(&shared, false),
                    "reload" => change::reload(&shared, &question.payload),
                    "reload_refused" => change::reload_refused(&shared),
                    "snapshot" => shared.memory.answer(&question.payload).await,
                    _ => ask(&shared, question).await,
                },
                None => failure(503, "the router is stopping"),
            }
        })
    })
}

/// The token ids of a request, a list a prompt.
fn tokens(view: &FleetView, endpoint: Endpoint, payload: &[u8]) -> Reply {
    let sample: Sample = match serde_json::from_slice(payload) {
        Ok(sample) => sample,
        Err(error) => return failure(400, &error.to_string()),
    };
    let is_meant = |tokenizer: &&Tokenizer| {
        tokenizer.path() == Path::new(&sample.tokenizer) && *tokenizer.options() == sample.template
    };
    let Some(tokenizer) = view.pools.iter().filter_map(|pool| pool.tokenizer.as_deref()).find(is_meant) else {
        return failure(409, "this tokenizer is not loaded");
    };
    match request::parse(endpoint, &Bytes::from(sample.body)) {
        Ok(parsed) => match tokenizer.prompt(endpoint, &parsed) {
            Ok(prompts) => (200, serde_json::json!(prompts.ids).to_string().into()),
            Err(fallback) => failure(422, fallback.reason()),
        },
        Err(error) => failure(400, &error.to_string()),
    }
}

/// Asks the router; about `explain` with the request that it is to explain.
async fn ask(shared: &Shared, question: Question) -> Reply {
    let Question { question, mut payload, path } = question;
    let mut request = None;
    let mut entered = None;
    if question == "explain" {
        let ask = Ask {
            id: shared.mailbox.next_id(),
            time_s: shared.clock.now_s(),
            endpoint: Some(Endpoint::of(&path)),
            headers: Arc::default(),
            body: std::mem::take(&mut payload), // the router is told facts: what it is told may be recorded
        };
        match shared.preparer.prepare(shared.view.load_full(), ask).await {
            Ok(prepared) => {
                entered = Some(shared.requests.visit(prepared.facts.id, prepared.prompt));
                request = Some(prepared.facts);
            }
            Err(refusal) => return (refusal.face.status, refusal.face.body(&refusal.message).into()),
        }
    }
    let reply = match shared.mailbox.ask(&question, request, payload) {
        Ok(answer) => {
            answer.await.map_or_else(|_| failure(503, "the router is stopping"), |answer| (answer.status, answer.body))
        }
        Err(full) => failure(503, &full.to_string()),
    };
    drop(entered);
    reply
}

pub(super) fn failure(status: u16, message: &str) -> Reply {
    (status, serde_json::json!({"error": {"message": message}}).to_string().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fleet::{Pool, Tokens};

    const TINY_TOKENIZER: &str = include_str!("../../../../tests/fixtures/tokenizer/tiny.json");

    fn options() -> TemplateOptions {
        let template = "{% for message in messages %}{{ message.content }}{% endfor %}";
        TemplateOptions { chat_template: Some(template.to_owned()), ..TemplateOptions::default() }
    }

    fn view(path: &Path) -> FleetView {
        let pool = Pool {
            name: "p".to_owned(),
            models: std::collections::BTreeMap::new(),
            model_cards: vec![],
            tokens: Tokens::Exact,
            tokenizer: Some(Arc::new(Tokenizer::load(path, &options()).unwrap())),
            replicas: vec![],
            block_sizes: vec![],
            indexes: std::collections::BTreeMap::new(),
        };
        FleetView { pools: vec![Arc::new(pool)], ..FleetView::default() }
    }

    fn asked(view: &FleetView, path: &Path, template: &TemplateOptions, body: &str) -> (u16, serde_json::Value) {
        let payload = serde_json::json!({"tokenizer": path, "template": template, "body": body}).to_string();
        let (status, body) = tokens(view, Endpoint::Chat, payload.as_bytes());
        (status, serde_json::from_slice(&body).unwrap())
    }

    #[test]
    fn ids_come_from_the_tokenizer_that_was_meant_or_not_at_all() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokenizer.json");
        std::fs::write(&path, TINY_TOKENIZER).unwrap();
        let view = view(&path);
        let body = r#"{"messages":[{"role":"user","content":"Hello"}]}"#;
        let expected = view.pools[0].tokenizer.as_ref().unwrap().encode("Hello", false).unwrap();
        assert_eq!(asked(&view, &path, &options(), body), (200, serde_json::json!([expected])));
        let others = TemplateOptions { engine_version: Some("0.20.0".to_owned()), ..options() };
        assert_eq!(asked(&view, &path, &others, body).0, 409);
        assert_eq!(asked(&view, Path::new("/elsewhere"), &options(), body).0, 409);
        assert_eq!(asked(&view, &path, &options(), "{}").0, 422);
        assert_eq!(asked(&view, &path, &options(), "{").0, 400);
        assert_eq!(tokens(&view, Endpoint::Chat, b"[]").0, 400);
    }
}
