//! Requests that come before the fleet is known.

use std::sync::Arc;

use warmfront_core::fleet::FleetView;

use crate::world::{Act, CHAT, Client, Engine, Options, World, eventually, json_reply, post};

const MODELS: &str = "GET /v1/models HTTP/1.1\r\nhost: r\r\n\r\n";

/// A world whose fleet nobody has told yet, and the fleet that will be told.
async fn before_the_fleet(fleet_wait_s: f64) -> (World, FleetView) {
    let engine = Engine::start(|_| Act::Say(json_reply(r#"{"choices":[]}"#))).await;
    let mut options = Options::new(&[&engine]);
    options.front.fleet_wait_s = fleet_wait_s;
    let world = World::start(options).await;
    let known = world.fleet.swap(Arc::new(FleetView::unknown()));
    let fleet =
        FleetView { version: 1, pools: known.pools.clone(), by_model: known.by_model.clone(), ..FleetView::default() };
    (world, fleet)
}

/// Sends a request and returns once its body was read.
async fn ask(world: &World, model: &str) -> Client {
    let before = world.metrics.rows("warmfront_relayed_bytes_total").len();
    let mut client = world.client().await;
    client.send(post("/v1/chat/completions", &CHAT.replace("\"m\"", &format!("\"{model}\"")))).await;
    eventually(|| world.metrics.rows("warmfront_relayed_bytes_total").len() > before).await;
    client
}

#[tokio::test]
async fn a_request_that_comes_before_the_fleet_is_known_waits_for_it() {
    let (world, fleet) = before_the_fleet(20.0).await;
    let mut client = ask(&world, "m").await;
    world.fleet.store(Arc::new(fleet));
    assert_eq!(world.events("arrived").len(), 0, "the router does not know this fleet");
    world.outset.tell(1);
    assert_eq!(client.answer().await.status, 200);
    world.expect_ends(&["finished"]).await;
}

#[tokio::test]
async fn a_model_that_nobody_serves_is_known_only_when_every_server_was_asked() {
    let (world, fleet) = before_the_fleet(20.0).await;
    let mut client = ask(&world, "other").await;
    let whole =
        FleetView { version: 2, pools: fleet.pools.clone(), by_model: fleet.by_model.clone(), ..FleetView::default() };
    world.fleet.store(Arc::new(FleetView { is_partial: true, ..fleet }));
    world.outset.tell(1);
    let mut served = world.client().await;
    served.send(post("/v1/chat/completions", CHAT)).await;
    assert_eq!(served.answer().await.status, 200, "what is known already is served");
    world.fleet.store(Arc::new(whole));
    world.outset.tell(2);
    assert_eq!(client.answer().await.status, 404);
}

#[tokio::test]
async fn the_list_of_models_is_told_once_it_is_whole() {
    let (world, fleet) = before_the_fleet(20.0).await;
    let mut client = world.client().await;
    client.send(MODELS).await;
    let whole =
        FleetView { version: 2, pools: fleet.pools.clone(), by_model: fleet.by_model.clone(), ..FleetView::default() };
    world.fleet.store(Arc::new(FleetView { version: 1, is_partial: true, ..FleetView::default() }));
    world.outset.tell(1);
    world.fleet.store(Arc::new(whole));
    world.outset.tell(2);
    assert_eq!(client.answer().await.json()["data"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn who_waits_in_vain_is_told_to_come_back() {
    let (world, _) = before_the_fleet(0.05).await;
    for round in ["while others wait", "when the time is over"] {
        let answer = world.chat(CHAT).await;
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{round}");
        assert_eq!(answer.json()["error"]["code"], "no_ready_replica");
    }
    assert!(world.metrics.render().contains("outcome=\"shed\"} 2\n"));
}

#[tokio::test]
async fn nobody_waits_longer_than_its_client() {
    let (world, _) = before_the_fleet(3600.0).await;
    let mut client = world.client().await;
    let request = post("/v1/chat/completions", CHAT).replace("host:", "x-warmfront-timeout-s: 0.05\r\nhost:");
    client.send(request).await;
    assert_eq!(client.answer().await.status, 503);
}
