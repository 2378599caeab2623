//! The bytes that the fixed upstream answers with, made once.

use std::collections::HashMap;
use std::fmt::Write as _;

/// Head of a streamed answer; every event after it is a chunk of its own.
pub const STREAM_HEAD: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n\
    cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
/// Last event and last chunk of a stream.
pub const STREAM_END: &[u8] = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
/// Bytes of English that one token stands for in rendered prompts.
const TOKEN_BYTES: usize = 4;
/// Rendered prompts are rounded to this many tokens, so that few different ones are kept.
const RENDER_STEP: usize = 256;
const RENDERED_MAX: usize = 64;

/// Prepared answers by path.
pub struct Answers {
    chat: Vec<u8>,
    event: Vec<u8>,
    fixed: HashMap<&'static str, Vec<u8>>,
    not_found: Vec<u8>,
    forbidden: Vec<u8>,
    renders: bool,
    rendered: HashMap<usize, Vec<u8>>,
    model: String,
}

impl Answers {
    /// `renders`: answer the render endpoint; otherwise 403, as vLLM does without `--enable-scale-out`.
    pub fn new(model: &str, renders: bool) -> Self {
        let event = format!(
            r#"data: {{"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"{model}","choices":[{{"index":0,"delta":{{"content":" token"}},"logprobs":null,"finish_reason":null}}]}}"#
        ) + "\n\n";
        Self {
            chat: json(&chat(model)),
            event: format!("{:x}\r\n{event}\r\n", event.len()).into_bytes(),
            fixed: fixed(model),
            not_found: answer("404 Not Found", "application/json", r#"{"detail":"Not Found"}"#),
            forbidden: answer("403 Forbidden", "application/json", r#"{"error":"Forbidden"}"#),
            renders,
            rendered: HashMap::new(),
            model: model.to_owned(),
        }
    }

    /// One event in its chunk.
    pub fn event(&self) -> &[u8] {
        &self.event
    }

    /// Appends the whole answer to a request for `path`, whose query is ignored.
    pub fn append(&mut self, path: &str, body_bytes: usize, out: &mut Vec<u8>) {
        let path = path.split('?').next().unwrap_or_default();
        let bytes = match path {
            "/v1/chat/completions" | "/v1/completions" | "/generate" => &self.chat,
            "/v1/chat/completions/render" if self.renders => self.render(body_bytes),
            "/v1/chat/completions/render" => &self.forbidden,
            _ => self.fixed.get(path).unwrap_or(&self.not_found),
        };
        out.extend_from_slice(bytes);
    }

    fn render(&mut self, body_bytes: usize) -> &Vec<u8> {
        let tokens = (body_bytes / TOKEN_BYTES).next_multiple_of(RENDER_STEP);
        if self.rendered.len() >= RENDERED_MAX {
            self.rendered.clear();
        }
        let model = &self.model;
        self.rendered.entry(tokens).or_insert_with(|| json(&render(model, tokens)))
    }
}

fn chat(model: &str) -> String {
    format!(
        r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"{model}","choices":[{{"index":0,"message":{{"role":"assistant","content":" token token token","tool_calls":[]}},"logprobs":null,"finish_reason":"length"}}],"usage":{{"prompt_tokens":256,"total_tokens":272,"completion_tokens":16,"prompt_tokens_details":null}}}}"#
    )
}

/// As vLLM 0.32 answers `POST /v1/chat/completions/render`.
fn render(model: &str, tokens: usize) -> String {
    let mut ids = String::with_capacity(tokens * 7);
    for position in 0..tokens {
        let comma = if position == 0 { "" } else { "," };
        let _ = write!(ids, "{comma}{}", position * 7919 % 120_000);
    }
    format!(
        r#"{{"request_id":"chatcmpl-1","token_ids":[{ids}],"token_offsets":null,"features":null,"sampling_params":{{"max_tokens":16}},"model":"{model}","stream":false,"stream_options":null,"cache_salt":null,"priority":0,"kv_transfer_params":null}}"#
    )
}

fn fixed(model: &str) -> HashMap<&'static str, Vec<u8>> {
    let models = format!(
        r#"{{"object":"list","data":[{{"id":"{model}","object":"model","created":1,"owned_by":"upstream","root":"{model}","parent":null,"max_model_len":131072}}]}}"#
    );
    let server_info = format!(
        r#"{{"status":"ready","model_path":"{model}","served_model_name":"{model}","tokenizer_path":"{model}","is_generation":true,"tp_size":1,"dp_size":1,"max_total_num_tokens":4000000,"version":"0.5.0"}}"#
    );
    let load = r#"{"load":0,"num_reqs":0,"num_waiting_reqs":0,"num_tokens":0}"#;
    HashMap::from([
        ("/v1/models", json(&models)),
        ("/version", json(r#"{"version":"0.32.0"}"#)),
        ("/kv_event_sources", json("{}")),
        ("/get_server_info", json(&server_info)),
        ("/server_info", json(&server_info)),
        ("/get_model_info", json(&server_info)),
        ("/model_info", json(&server_info)),
        ("/get_load", json(load)),
        ("/load", json(r#"{"server_load":0}"#)),
        ("/health", answer("200 OK", "text/plain", "")),
        ("/health_generate", answer("200 OK", "text/plain", "")),
        ("/ping", answer("200 OK", "text/plain", "")),
        ("/metrics", answer("200 OK", "text/plain; version=0.0.4", &metrics(model))),
    ])
}

fn metrics(model: &str) -> String {
    let labels = format!(r#"engine="0",model_name="{model}""#);
    format!(
        "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{{{labels}}} 0\n\
         # TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{{{labels}}} 0\n\
         # TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{{{labels}}} 0\n\
         # TYPE vllm:cache_config_info gauge\n\
         vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"262144\",{labels}}} 1\n"
    )
}

fn json(body: &str) -> Vec<u8> {
    answer("200 OK", "application/json", body)
}

fn answer(status: &str, content_type: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
}
