//! How long a step takes. The formula and the sources of its constants are told in `warmfront/sim/latency.py`.

use serde::Deserialize;

/// Constants of the formula, in seconds per unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Latency {
    pub base_s: f64,
    pub prefill_token_s: f64,
    pub attention_pair_s: f64,
    pub decode_sequence_s: f64,
    pub context_token_s: f64,
    /// One pass over the weights, hidden behind the linear layers' work once that takes longer.
    pub weights_s: f64,
    /// Linear layers, for each token of the step.
    pub linear_token_s: f64,
    /// A step with prompt tokens at all.
    #[serde(default)]
    pub prefill_step_s: f64,
    /// Square of the step's prompt tokens.
    #[serde(default)]
    pub prefill_square_s: f64,
    /// A step with decoding sequences at all.
    #[serde(default)]
    pub decode_step_s: f64,
    /// Square of the context read; negative where decoding grows slower than its context.
    #[serde(default)]
    pub context_square_s: f64,
    /// More context than this costs no more; 0: there is no such bound.
    #[serde(default)]
    pub context_tokens_most: f64,
    /// A token of KV read back from host memory.
    pub host_token_s: f64,
    /// A token of KV read back from disk.
    pub disk_token_s: f64,
    /// An adapter brought onto the device.
    pub adapter_s: f64,
}

impl Latency {
    /// Duration of a step that computes `prefill` prompt tokens with `pairs` attention pairs beside `decodes` sequences
    /// that read `context` tokens. The order of the additions is that of the Python reference, so results are equal.
    #[must_use]
    pub fn step_s(&self, prefill: u64, pairs: f64, decodes: u64, context: u64) -> f64 {
        let most = if self.context_tokens_most > 0.0 { self.context_tokens_most } else { f64::INFINITY };
        let context = most.min(context as f64);
        let tokens = prefill as f64;
        let linear = self.base_s
            + self.weights_s.max(self.linear_token_s * (prefill + decodes) as f64)
            + self.prefill_token_s * tokens
            + self.attention_pair_s * pairs
            + self.decode_sequence_s * decodes as f64
            + self.context_token_s * context;
        let begun =
            if prefill > 0 { self.prefill_step_s } else { 0.0 } + if decodes > 0 { self.decode_step_s } else { 0.0 };
        linear + begun + self.prefill_square_s * tokens * tokens + self.context_square_s * context * context
    }
}
