//! The engine's own answers as the measure, and properties of cuts and cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;
use serde_json::Value as Reference;

use super::*;
use crate::http::request::parse;

const TINY_TOKENIZER: &str = include_str!("../../../../tests/fixtures/tokenizer/tiny.json");

fn fixture(name: &str) -> Reference {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/vllm").join(name);
    serde_json::from_str(&std::fs::read_to_string(path).expect("fixture")).expect("JSON")
}

/// The real tokenizer, where the environment names one: ids are compared then, and text always.
fn real_tokenizer() -> Option<PathBuf> {
    std::env::var_os("WARMFRONT_TEST_TOKENIZER").map(PathBuf::from)
}

/// A model directory with the tiny tokenizer (or the one given), the special tokens of a fixture and a template.
struct Model {
    directory: tempfile::TempDir,
}

impl Model {
    fn new(bos: &str, eos: &str, template: &str) -> Self {
        Self::with(real_tokenizer(), bos, eos, template)
    }

    /// For what needs no vocabulary: loading the real one takes seconds.
    fn tiny(bos: &str, eos: &str, template: &str) -> Self {
        Self::with(None, bos, eos, template)
    }

    fn with(tokenizer: Option<PathBuf>, bos: &str, eos: &str, template: &str) -> Self {
        let directory = tempfile::tempdir().expect("directory");
        match tokenizer {
            Some(path) => drop(std::fs::copy(path, directory.path().join("tokenizer.json")).expect("copied")),
            None => std::fs::write(directory.path().join("tokenizer.json"), TINY_TOKENIZER).expect("written"),
        }
        let config = serde_json::json!({"bos_token": bos, "eos_token": eos, "chat_template": template});
        std::fs::write(directory.path().join("tokenizer_config.json"), config.to_string()).expect("written");
        Self { directory }
    }

    fn load(&self, options: &TemplateOptions) -> Tokenizer {
        let noon: LocalTime = Arc::new(|| CivilTime::of_unix_s(1_796_029_200));
        let load = LoadOptions { local_time: noon, ..LoadOptions::default() };
        Tokenizer::load_with(self.directory.path(), options, load).expect("loads")
    }
}

fn newest() -> TemplateOptions {
    TemplateOptions { engine_version: Some("0.32.0".into()), max_model_len: Some(4096), ..TemplateOptions::default() }
}

fn body(endpoint: Endpoint, request: &Reference) -> ParsedBody {
    parse(endpoint, &Bytes::from(request.to_string())).expect("an object")
}

fn ids(value: &Reference) -> Option<Vec<u32>> {
    serde_json::from_value(value.clone()).ok()
}

/// Requests that the engine refused for flags of its own, which a router cannot know.
fn is_refused_for_parser_flags(error: &str) -> bool {
    error.contains("requires --enable-auto-tool-choice")
}

#[test]
fn chat_requests_render_and_tokenize_as_in_the_engine() {
    let fixture = fixture("chat_tokens.json");
    let text_of = |key: &str| fixture[key].as_str().expect("text").to_owned();
    let mut compared = 0;
    for (name, source) in fixture["templates"].as_object().expect("templates") {
        let source = source.as_str().expect("template");
        let model = Model::new(&text_of("bos_token"), &text_of("eos_token"), source);
        let tokenizer = model.load(&newest());
        for case in fixture["cases"].as_array().expect("cases").iter().filter(|case| case["template"] == *name) {
            let label = format!("{} with {name}", case["case"]);
            let body = body(Endpoint::Chat, &case["request"]);
            let rendered = tokenizer.render(Endpoint::Chat, &body);
            match case["chat"]["prompt_text"].as_str() {
                Some(text) => assert_eq!(rendered.as_deref(), Ok(text), "{label}"),
                None if is_refused_for_parser_flags(&case["chat"]["error"].to_string()) => {}
                None => assert!(rendered.is_err(), "{label}: engine refuses, we render {rendered:?}"),
            }
            if let Some(expected) = ids(&case["render_token_ids"]).filter(|_| real_tokenizer().is_some()) {
                assert_eq!(tokenizer.prompt(Endpoint::Chat, &body), Ok(Prompts { ids: vec![expected] }), "{label}");
            }
            compared += 1;
        }
    }
    assert_eq!(compared, 128);
}

#[test]
fn server_options_change_the_ids_as_in_the_engine() {
    let Some(_) = real_tokenizer() else { return };
    let fixture = fixture("chat_tokens.json");
    let (bos, eos) = (fixture["bos_token"].as_str().expect("bos"), fixture["eos_token"].as_str().expect("eos"));
    for run in fixture["chat_template_flag_runs"]["differences"].as_array().expect("runs") {
        let template = run["template"].as_str().expect("template");
        let mut options = newest();
        options.chat_template = Some(fixture["templates"][template].as_str().expect("source").to_owned());
        if template == "mistral_style" {
            options.exclude_tools_when_none = true;
            options.default_kwargs = Some(r#"{"enable_thinking": false}"#.to_owned());
        }
        let tokenizer = Model::new(bos, eos, "{{ messages }}").load(&options);
        let body = body(Endpoint::Chat, &run["request"]);
        if let Some(expected) = ids(&run["render_token_ids"]) {
            assert_eq!(tokenizer.prompt(Endpoint::Chat, &body), Ok(Prompts { ids: vec![expected] }), "{}", run["case"]);
        }
    }
}

#[test]
fn the_tokenize_endpoint_is_reproduced_with_what_it_ignores() {
    let Some(_) = real_tokenizer() else { return };
    let fixture = fixture("chat_tokens.json");
    let (bos, eos) = (fixture["bos_token"].as_str().expect("bos"), fixture["eos_token"].as_str().expect("eos"));
    let source = fixture["templates"]["qwen_style"].as_str().expect("source");
    let tokenizer = Model::new(bos, eos, source).load(&newest());
    for case in fixture["cases"].as_array().expect("cases").iter().filter(|case| case["template"] == "qwen_style") {
        let is_plain = case["request"].as_object().is_some_and(|request| request.len() == 1);
        let Some(expected) = ids(&case["tokenize"]["tokens"]).filter(|_| is_plain) else {
            continue;
        };
        let messages = case["request"]["messages"].to_string();
        assert_eq!(tokenizer.tokenize_like_engine_endpoint(&messages), Ok(expected), "{}", case["case"]);
    }
}

#[test]
fn responses_and_messages_requests_render_as_in_the_engine() {
    let fixture = fixture("conversions.json");
    let sources = self::fixture("chat_tokens.json");
    let text_of = |key: &str| fixture[key].as_str().expect("text").to_owned();
    for (name, source) in sources["templates"].as_object().expect("templates") {
        let model = Model::tiny(&text_of("bos_token"), &text_of("eos_token"), source.as_str().expect("template"));
        let tokenizer = model.load(&newest());
        for case in fixture["cases"].as_array().expect("cases").iter().filter(|case| case["template"] == *name) {
            let label = format!("{} {} with {name}", case["path"], case["case"]);
            let endpoint = Endpoint::of(case["path"].as_str().expect("path"));
            let rendered = tokenizer.render(endpoint, &body(endpoint, &case["request"]));
            match case["text"].as_str() {
                Some(text) => assert_eq!(rendered.as_deref(), Ok(text), "{label}"),
                None => {
                    assert!(rendered.is_err(), "{label}: engine refuses ({}), we render {rendered:?}", case["error"]);
                }
            }
        }
    }
}

fn simple() -> Tokenizer {
    Model::tiny("<s>", "</s>", "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}").load(&newest())
}

fn prompt(tokenizer: &Tokenizer, endpoint: Endpoint, request: &str) -> Result<Vec<Vec<u32>>, Fallback> {
    let body = parse(endpoint, &Bytes::copy_from_slice(request.as_bytes())).expect("an object");
    tokenizer.prompt(endpoint, &body).map(|prompts| prompts.ids)
}

#[test]
fn completions_take_texts_and_ids_and_lists_of_either() {
    let tokenizer = simple();
    let hello = tokenizer.encode("Hello", true).expect("ids");
    let of = |request: &str| prompt(&tokenizer, Endpoint::Completions, request);
    assert_eq!(of(r#"{"prompt":"Hello"}"#), Ok(vec![hello.clone()]));
    assert_eq!(of(r#"{"prompt":["Hello","Hello"]}"#), Ok(vec![hello.clone(), hello]));
    assert_eq!(of(r#"{"prompt":[5,6,7]}"#), Ok(vec![vec![5, 6, 7]]));
    assert_eq!(of(r#"{"prompt":[[5],[6,7]]}"#), Ok(vec![vec![5], vec![6, 7]]));
    assert_eq!(of(r#"{"prompt":[5,6,7,8],"truncate_prompt_tokens":2}"#), Ok(vec![vec![7, 8]]));
    assert_eq!(
        of(r#"{"prompt":[5,6,7,8],"truncate_prompt_tokens":3,"truncation_side":"right"}"#),
        Ok(vec![vec![5, 6, 7]])
    );
}

#[test]
fn what_cannot_be_reproduced_says_why() {
    let tokenizer = simple();
    let chat = |request: &str| prompt(&tokenizer, Endpoint::Chat, request).expect_err("a fallback").reason();
    let image = r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#;
    assert_eq!(chat(image), "media");
    assert_eq!(chat(r#"{"messages":[{"role":"user","content":"a"}],"chat_template":"{{ 1 }}"}"#), "untrusted_template");
    assert_eq!(chat(r#"{"messages":[]}"#), "invalid_request");
    assert_eq!(chat("{}"), "invalid_request");
    assert_eq!(chat(r#"{"messages":[{"role":"user","content":"\udc00"}]}"#), "unreadable_text");
    let responses = r#"{"input":"a","previous_response_id":"r"}"#;
    assert_eq!(prompt(&tokenizer, Endpoint::Responses, responses), Err(Fallback::StoredHistory));
    assert_eq!(prompt(&tokenizer, Endpoint::Completions, r#"{"prompt_embeds":"x"}"#), Err(Fallback::Media));
    assert_eq!(prompt(&tokenizer, Endpoint::Other, "{}"), Err(Fallback::NoPrompt));
}

#[test]
fn token_ids_that_come_with_a_request_are_taken_unless_it_has_media() {
    let tokenizer = simple();
    let request = r#"{"messages":[{"role":"user","content":"a"}],"kv_transfer_params":{"prompt_token_ids":[3,1,2]}}"#;
    assert_eq!(prompt(&tokenizer, Endpoint::Chat, request), Ok(vec![vec![3, 1, 2]]));
    let mut older = newest();
    older.engine_version = Some("0.26.0".into());
    let older = Model::tiny("<s>", "</s>", "{{ messages[0].content }}").load(&older);
    assert_eq!(prompt(&older, Endpoint::Chat, request), Ok(vec![older.encode("a", false).expect("ids")]));
}

#[test]
fn a_request_template_is_used_when_it_is_trusted() {
    let options = TemplateOptions { trust_request_template: true, ..newest() };
    let tokenizer = Model::tiny("<s>", "</s>", "own").load(&options);
    let request =
        r#"{"messages":[{"role":"user","content":"a"}],"chat_template":"{{ bos_token }}{{ messages[0].content }}!"}"#;
    let body = parse(Endpoint::Chat, &Bytes::copy_from_slice(request.as_bytes())).expect("an object");
    assert_eq!(tokenizer.render(Endpoint::Chat, &body).as_deref(), Ok("<s>a!"));
}

#[test]
fn older_engines_keep_their_rules() {
    let system = r#"{"messages":[{"role":"system","content":"x-anthropic-billing-header: 1\nS"},{"role":"user","content":"u"}]}"#;
    let effort = r#"{"messages":[{"role":"user","content":"u"}],"reasoning_effort":"none"}"#;
    let template = "{{ messages[0].content }}|{{ enable_thinking is defined }}";
    let render = |version: &str, request: &str| {
        let options = TemplateOptions { engine_version: Some(version.into()), ..newest() };
        let tokenizer = Model::tiny("<s>", "</s>", template).load(&options);
        let body = parse(Endpoint::Chat, &Bytes::copy_from_slice(request.as_bytes())).expect("an object");
        tokenizer.render(Endpoint::Chat, &body).expect("renders")
    };
    assert_eq!(render("0.32.0", system), "S|False");
    assert_eq!(render("0.31.0", system), "x-anthropic-billing-header: 1\nS|False");
    assert_eq!((render("0.22.0", effort), render("0.21.0", effort)), ("u|True".into(), "u|False".into()));
}

#[test]
fn agreement_samples_carry_their_answers() {
    let tokenizer = simple();
    let samples = tokenizer.agreement_samples();
    assert_eq!(samples.len(), 4);
    for sample in &samples {
        assert!(serde_json::from_str::<Reference>(&sample.body).is_ok() && !sample.expected.is_empty());
    }
}

#[test]
fn a_long_shared_prefix_is_not_tokenized_twice() {
    let tokenizer = simple();
    let shared: String = (0..20_000).map(|word| format!("word{} ", word % 977)).collect();
    let before = tokenizer.encode(&(shared.clone() + "one end"), false).expect("ids");
    let misses = tokenizer.cache_stats().misses;
    let after = tokenizer.encode(&(shared + "another end"), false).expect("ids");
    assert!(tokenizer.cache_stats().misses - misses <= 2);
    assert_eq!(before[..before.len() - 64], after[..before.len() - 64]);
}

/// Text in which everything happens that could move the boundaries of tokens.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-z]{1,8} ",
        2 => "[ \\n\\r\\t]{1,4}",
        2 => "\\n[A-Z]?[a-z]{0,3}",
        1 => "[0-9]{1,5}",
        1 => "[\\p{L}\\p{M}\\p{N}\\p{P}\\p{S}]{1,6}",
        1 => "('s|'ll|<s>|</s>|<\\|im_start\\|>|\\u{4e2d}\\u{6587}|\\u{301}|/\\n|\\.\\n\\n)",
    ];
    proptest::collection::vec(piece, 0..400).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn cuts_and_cache_give_the_ids_of_the_whole(text in text(), tail in text()) {
        static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
        let tokenizer = TOKENIZER.get_or_init(|| Model::new("<s>", "</s>", "{{ messages }}").load(&newest()));
        for whole in [text.clone(), text.clone() + &tail, text] {
            prop_assert_eq!(tokenizer.encode(&whole, false), tokenizer.encode_whole(&whole));
        }
    }

    #[test]
    fn any_conversation_gives_ids_or_a_reason(body in "\\{\"messages\":\\[(\\{\"role\":\"(user|system|tool|assistant)\",\"content\":(null|\"x\"|\\[\\]|3|\\[\\{\"type\":\"text\"\\}\\])\\},?){0,3}\\]\\}") {
        static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
        let tokenizer = TOKENIZER.get_or_init(simple);
        for endpoint in [Endpoint::Chat, Endpoint::Messages, Endpoint::Responses] {
            if let Ok(body) = parse(endpoint, &Bytes::from(body.clone())) {
                let _ = tokenizer.prompt(endpoint, &body);
            }
        }
    }
}
