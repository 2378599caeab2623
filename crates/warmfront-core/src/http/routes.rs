//! The paths that exist, in one table. Everything else is 404: an engine's admin routes are not reachable through here.

use http::Method;

use super::request::Endpoint;

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// By what replicas hold of the prompt.
    ByPrefix(Endpoint),
    /// By load alone.
    ByLoad,
    Models,
    Model,
    Health,
    Ready,
    Backlog,
    Metrics,
    Version,
}

/// Engine paths that are routed by load, with the reason why not by prefix.
const BY_LOAD: &[&str] = &[
    // Pooling models keep no prefix cache worth routing for: one forward pass, no decoding.
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/v1/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/generative_scoring",
    // The prompt is audio: its tokens are not ours to compute.
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    // Answered by the engine's API server without touching the cache.
    "/tokenize",
    "/detokenize",
    "/v1/messages/count_tokens",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/v1/responses/render",
    "/v1/messages/render",
    // Several conversations in one request: no single prefix to follow.
    "/v1/chat/completions/batch",
];

/// A path, and the method it wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub target: Target,
    /// Value of `Allow`.
    pub allow: &'static str,
}

impl Found {
    pub(crate) fn accepts(self, method: &Method) -> bool {
        match self.allow {
            "POST" => method == Method::POST,
            _ => method == Method::GET || method == Method::HEAD,
        }
    }
}

/// The route of a path without its query. One trailing slash is forgiven: clients differ in it.
pub(crate) fn find(path: &str) -> Option<Found> {
    let path = canonical(path);
    let post = |target| Some(Found { target, allow: "POST" });
    let get = |target| Some(Found { target, allow: "GET, HEAD" });
    match path {
        "/v1/chat/completions" | "/v1/completions" | "/v1/responses" | "/v1/messages" => {
            post(Target::ByPrefix(Endpoint::of(path)))
        }
        "/v1/models" => get(Target::Models),
        "/health" => get(Target::Health),
        "/ready" => get(Target::Ready),
        "/health/backlog" => get(Target::Backlog),
        "/metrics" => get(Target::Metrics),
        "/version" => get(Target::Version),
        _ if BY_LOAD.contains(&path) => post(Target::ByLoad),
        _ if model_name(path).is_some() => get(Target::Model),
        _ => None,
    }
}

pub(crate) fn is_ready(path: &str) -> bool {
    find(path).is_some_and(|found| found.target == Target::Ready)
}

pub(crate) fn canonical(path: &str) -> &str {
    if path.len() > 1 { path.strip_suffix('/').unwrap_or(path) } else { path }
}

/// The name in `/v1/models/{name}`; names may contain slashes.
pub(crate) fn model_name(path: &str) -> Option<&str> {
    canonical(path).strip_prefix("/v1/models/").filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    // bug 93
    #[test]
    fn engine_admin_paths_are_not_found() {
        for path in [
            "/reset_prefix_cache",
            "/sleep",
            "/v1/load_lora_adapter",
            "/abort_requests",
            "/inference/v1/generate",
            "/invocations",
            "/collective_rpc",
            "/kv_event_sources",
            "/openapi.json",
            "/v1/chat/completions/../../sleep",
            "//v1/chat/completions",
            "/",
            "",
        ] {
            assert_eq!(find(path), None, "{path}");
        }
    }

    #[test]
    fn a_trailing_slash_is_forgiven() {
        assert_eq!(find("/v1/models/"), find("/v1/models"));
        assert_eq!(find("/v1/chat/completions/").map(|found| found.target), Some(Target::ByPrefix(Endpoint::Chat)));
    }

    #[test]
    fn model_names_may_contain_slashes() {
        assert_eq!(model_name("/v1/models/org/model"), Some("org/model"));
        assert_eq!(find("/v1/models/org/model").map(|found| found.target), Some(Target::Model));
    }
}
