//! Where counts and gauges go: the few calls that background parts need of the metric registry.

use std::collections::HashSet;

use crate::metrics::Metrics;

/// Writes values of the metric catalogue by name. `labels` are the values, in the order of the catalogue.
pub trait Meter: Send + Sync {
    fn add(&self, name: &'static str, labels: &[&str], by: u64);
    fn set(&self, name: &'static str, labels: &[&str], value: f64);
    /// Drops all series whose value of this label is none of `known`.
    fn retain(&self, label: &'static str, known: &HashSet<&str>);
}

impl Meter for Metrics {
    fn add(&self, name: &'static str, labels: &[&str], by: u64) {
        self.inc(name, labels, by);
    }

    fn set(&self, name: &'static str, labels: &[&str], value: f64) {
        Metrics::set(self, name, labels, value);
    }

    fn retain(&self, label: &'static str, known: &HashSet<&str>) {
        Metrics::retain(self, label, known);
    }
}

/// Keeps nothing; for tools and tests without a catalogue.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoMeter;

impl Meter for NoMeter {
    fn add(&self, _name: &'static str, _labels: &[&str], _by: u64) {}
    fn set(&self, _name: &'static str, _labels: &[&str], _value: f64) {}
    fn retain(&self, _label: &'static str, _known: &HashSet<&str>) {}
}

/// Name, kind and labels of the metrics written by these parts and, for whole-core tests, by the front.
#[cfg(test)]
pub(crate) const CATALOGUE: &[(&str, &str, &[&str])] = &[
    ("warmfront_requests_total", "counter", &["model", "outcome"]),
    ("warmfront_request_duration_seconds", "histogram", &["model"]),
    ("warmfront_ttft_seconds", "histogram", &["model"]),
    ("warmfront_itl_seconds", "histogram", &["model"]),
    ("warmfront_decision_duration_seconds", "histogram", &[]),
    ("warmfront_queue_duration_seconds", "histogram", &["model"]),
    ("warmfront_prompt_tokens_total", "counter", &["model"]),
    ("warmfront_predicted_cached_tokens_total", "counter", &["replica"]),
    ("warmfront_reported_cached_tokens_total", "counter", &["replica"]),
    ("warmfront_cached_tokens_error", "histogram", &["replica"]),
    ("warmfront_overlap_blocks", "histogram", &["model"]),
    ("warmfront_fallbacks_total", "counter", &["reason"]),
    ("warmfront_unconfirmed_predictions_total", "counter", &["replica"]),
    ("warmfront_kv_events_total", "counter", &["replica", "kind"]),
    ("warmfront_kv_event_lag_seconds", "gauge", &["replica"]),
    ("warmfront_kv_gaps_total", "counter", &["replica"]),
    ("warmfront_kv_replays_total", "counter", &["replica", "result"]),
    ("warmfront_kv_restarts_total", "counter", &["replica"]),
    ("warmfront_kv_malformed_total", "counter", &["replica"]),
    ("warmfront_kv_unknown_parents_total", "counter", &["replica"]),
    ("warmfront_kv_state", "gauge", &["replica", "state"]),
    ("warmfront_discovery_up", "gauge", &["source"]),
    ("warmfront_discovery_servers", "gauge", &["source"]),
    ("warmfront_discovery_age_seconds", "gauge", &["source"]),
    ("warmfront_draining", "gauge", &[]),
    ("warmfront_config_reloads_total", "counter", &["outcome"]),
    ("warmfront_index_blocks", "gauge", &["pool"]),
    ("warmfront_snapshot_age_seconds", "gauge", &[]),
    ("warmfront_snapshot_bytes", "gauge", &[]),
    ("warmfront_snapshot_write_seconds", "gauge", &[]),
    ("warmfront_snapshot_hold_seconds", "gauge", &[]),
    ("warmfront_snapshot_failures_total", "counter", &["reason"]),
    ("warmfront_snapshot_refusals_total", "counter", &["reason"]),
    ("warmfront_snapshot_restored_facts_total", "counter", &["pool"]),
    ("warmfront_index_facts", "gauge", &["pool", "kind"]),
    ("warmfront_index_bytes", "gauge", &["pool"]),
    ("warmfront_index_room_evictions_total", "counter", &["pool"]),
    ("warmfront_event_queue_depth", "gauge", &[]),
    ("warmfront_command_queue_depth", "gauge", &[]),
    ("warmfront_waiting_requests", "gauge", &["pool"]),
    ("warmfront_waiting_band_requests", "gauge", &["pool", "band"]),
    ("warmfront_oldest_wait_seconds", "gauge", &["pool"]),
    ("warmfront_pool_requests", "gauge", &["pool"]),
    ("warmfront_flow_limit", "gauge", &["limit"]),
    ("warmfront_held_total", "counter", &["pool", "reason"]),
    ("warmfront_shed_total", "counter", &["pool", "reason"]),
    ("warmfront_session_keys_total", "counter", &["source"]),
    ("warmfront_replica_requests", "gauge", &["replica"]),
    ("warmfront_replica_prefill_tokens", "gauge", &["replica"]),
    ("warmfront_replica_ready", "gauge", &["replica"]),
    ("warmfront_engine_running", "gauge", &["replica"]),
    ("warmfront_engine_waiting", "gauge", &["replica"]),
    ("warmfront_engine_kv_usage", "gauge", &["replica"]),
    ("warmfront_upstream_failures_total", "counter", &["replica", "kind"]),
    ("warmfront_upstream_connections", "gauge", &["replica"]),
    ("warmfront_connections", "gauge", &[]),
    ("warmfront_streams", "gauge", &[]),
    ("warmfront_relayed_bytes_total", "counter", &["direction"]),
    ("warmfront_policy_errors_total", "counter", &[]),
    ("warmfront_tokenize_duration_seconds", "histogram", &["model"]),
    ("warmfront_segment_cache_hits_total", "counter", &[]),
    ("warmfront_segment_cache_bytes", "gauge", &[]),
    ("warmfront_approximate_pools", "gauge", &[]),
    ("warmfront_control_restarts_total", "counter", &[]),
    ("warmfront_fleet_age_seconds", "gauge", &[]),
    ("warmfront_build_info", "gauge", &["version"]),
];
