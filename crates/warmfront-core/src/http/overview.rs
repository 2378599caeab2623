//! What `GET` shows of the router itself: models, readiness, backlog, metrics, version.

use std::collections::BTreeMap;

use http::Response;
use serde_json::{Value, json};

use super::answer::{self, Reply, Shape};
use crate::error::MODEL_NOT_FOUND;
use crate::fleet::{FleetView, Pool};
use crate::mailbox::{Standing, Standings};
use crate::metrics::Metrics;

/// `/v1/models`: the cards of all pools, as the engines gave them.
pub(crate) fn models(fleet: &FleetView) -> Response<Reply> {
    let cards: Vec<Value> = cards(fleet).collect();
    answer::json(200, json!({"object": "list", "data": cards}).to_string())
}

/// `/v1/models/{name}`.
pub(crate) fn model(fleet: &FleetView, name: &str) -> Response<Reply> {
    match cards(fleet).find(|card| card["id"] == name) {
        Some(card) => answer::json(200, card.to_string()),
        None => answer::error(Shape::OpenAi, MODEL_NOT_FOUND, "No such model is served here."),
    }
}

/// A card for every served name; one whose engine's card is not readable gets a plain one.
fn cards(fleet: &FleetView) -> impl Iterator<Item = Value> {
    let given: Vec<Value> = fleet
        .pools
        .iter()
        .flat_map(|pool| &pool.model_cards)
        .filter_map(|card| serde_json::from_str(card).ok())
        .filter(|card: &Value| card["id"].as_str().is_some_and(|id| fleet.by_model.contains_key(id)))
        .collect();
    let mut missing: Vec<&String> =
        fleet.by_model.keys().filter(|name| given.iter().all(|card| card["id"] != name.as_str())).collect();
    missing.sort_unstable();
    let plain: Vec<Value> =
        missing.iter().map(|name| json!({"id": name, "object": "model", "owned_by": "warmfront"})).collect();
    given.into_iter().chain(plain)
}

/// `/ready`: 200 while some replica of some pool can take a request, with every pool's state and what is missing.
pub(crate) fn ready(fleet: &FleetView, standings: &Standings) -> Response<Reply> {
    let standing_of = |pool: &Pool| standings.get(&pool.name).map_or(&[][..], Vec::as_slice);
    let is_ready = fleet.pools.iter().any(|pool| pool.is_ready() && serving(pool, standing_of(pool)) > 0);
    let pools: Vec<Value> = fleet.pools.iter().map(|pool| pool_state(pool, standing_of(pool))).collect();
    let body = json!({"ready": is_ready, "partial": fleet.is_partial, "pools": pools, "degraded": fleet.degraded});
    answer::json(if is_ready { 200 } else { 503 }, body.to_string())
}

/// `/ready` while this process takes leave: load balancers look elsewhere.
pub(crate) fn draining() -> Response<Reply> {
    answer::json(503, json!({"ready": false, "draining": true}).to_string())
}

/// Replicas that the control process finds ready and whose circuit is not open.
fn serving(pool: &Pool, standings: &[Standing]) -> usize {
    let is_open = |slot| standings.iter().any(|standing| standing.slot == slot && standing.state == "open");
    pool.occupied().filter(|replica| replica.ready && !is_open(replica.slot)).count()
}

fn pool_state(pool: &Pool, standings: &[Standing]) -> Value {
    let replicas: Vec<_> = pool.occupied().collect();
    let mut limited = BTreeMap::new();
    for standing in standings {
        *limited.entry(standing.state.as_str()).or_insert(0) += 1;
    }
    let (mut live, mut stale, mut none) = (0, 0, 0);
    for replica in &replicas {
        match replica.events.lock().state.as_str() {
            "live" => live += 1,
            "none" | "" => none += 1,
            _ => stale += 1,
        }
    }
    json!({
        "name": pool.name,
        "tokens": pool.tokens.name(),
        "reason": pool.tokens.reason(),
        "replicas": replicas.len(),
        "ready": replicas.iter().filter(|replica| replica.ready).count(),
        "serving": serving(pool, standings),
        "limited": limited,
        "events": {"live": live, "stale": stale, "none": none},
    })
}

/// `/health/backlog`: what waits and why, in the numbers that the router published last. It is not asked: a router that is
/// busy is just when this is read.
pub(crate) fn backlog(fleet: &FleetView, metrics: &Metrics) -> Response<Reply> {
    let numbers = Backlog::read(metrics);
    let pools: Vec<Value> = fleet.pools.iter().map(|pool| numbers.of_pool(&pool.name)).collect();
    let total = |field: &str| pools.iter().filter_map(|pool| pool[field].as_f64()).sum::<f64>() as u64;
    let body = json!({
        "in_flight_requests": total("in_flight"),
        "waiting_requests": total("waiting"),
        "limits": numbers.limits(),
        "pools": pools,
    });
    answer::json(200, body.to_string())
}

/// Rows of the metrics that tell of queues, each with its label values.
struct Backlog {
    waiting: Rows,
    by_band: Rows,
    oldest_s: Rows,
    in_flight: Rows,
    shed: Rows,
    held: Rows,
    limits: Rows,
}

type Rows = Vec<(Box<[String]>, f64)>;

impl Backlog {
    fn read(metrics: &Metrics) -> Self {
        Self {
            waiting: metrics.rows("warmfront_waiting_requests"),
            by_band: metrics.rows("warmfront_waiting_band_requests"),
            oldest_s: metrics.rows("warmfront_oldest_wait_seconds"),
            in_flight: metrics.rows("warmfront_pool_requests"),
            shed: metrics.rows("warmfront_shed_total"),
            held: metrics.rows("warmfront_held_total"),
            limits: metrics.rows("warmfront_flow_limit"),
        }
    }

    fn of_pool(&self, name: &str) -> Value {
        let one = |rows: &Rows| rows.iter().find(|(labels, _)| labels[0] == name).map_or(0.0, |(_, value)| *value);
        json!({
            "name": name,
            "waiting": one(&self.waiting) as u64,
            "waiting_by_band": split(&self.by_band, name),
            "oldest_wait_s": one(&self.oldest_s),
            "in_flight": one(&self.in_flight) as u64,
            "held_total": split(&self.held, name),
            "rejected_total": split(&self.shed, name),
        })
    }

    /// `null`: none.
    fn limits(&self) -> Value {
        let number = |limit: f64| if limit.is_finite() { Value::from(limit as u64) } else { Value::Null };
        self.limits.iter().map(|(labels, limit)| (labels[0].clone(), number(*limit))).collect()
    }
}

/// The rows of one pool that are above zero, by their second label.
fn split(rows: &Rows, pool: &str) -> Value {
    let own = rows.iter().filter(|(labels, value)| labels[0] == pool && *value > 0.0);
    own.map(|(labels, value)| (labels[1].clone(), Value::from(*value as u64))).collect()
}

pub(crate) fn version() -> Response<Reply> {
    answer::json(200, json!({"version": env!("CARGO_PKG_VERSION")}).to_string())
}
