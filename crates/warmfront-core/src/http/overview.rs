//! What `GET` shows of the router itself: models, readiness, metrics, version.

use std::collections::BTreeMap;

use http::Response;
use serde_json::{Value, json};

use super::answer::{self, Reply, Shape};
use crate::error::MODEL_NOT_FOUND;
use crate::fleet::{FleetView, Pool};
use crate::mailbox::{Standing, Standings};

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
    let body = json!({"ready": is_ready, "pools": pools, "degraded": fleet.degraded});
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

pub(crate) fn version() -> Response<Reply> {
    answer::json(200, json!({"version": env!("CARGO_PKG_VERSION")}).to_string())
}
