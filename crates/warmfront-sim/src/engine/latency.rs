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
        self.base_s
            + self.weights_s.max(self.linear_token_s * (prefill + decodes) as f64)
            + self.prefill_token_s * prefill as f64
            + self.attention_pair_s * pairs
            + self.decode_sequence_s * decodes as f64
            + self.context_token_s * context as f64
    }
}
