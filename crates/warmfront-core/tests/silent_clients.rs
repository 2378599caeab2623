//! What a stream costs whose client never reads. In a process of its own: memory is measured, and no other test may use any.

use std::sync::atomic::Ordering;
use std::time::Duration;

use world::{Act, CHAT_STREAM, World, eventually, in_time, post};

#[allow(dead_code, reason = "the front's own tests use the rest")]
#[path = "front/world.rs"]
mod world;

/// Resident memory of this process.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

// bug 94
#[tokio::test]
async fn clients_that_do_not_read_hold_back_their_engines_instead_of_filling_memory() {
    const STREAMS: usize = 64;
    let (world, engine) = World::with(|_| Act::Flood).await;
    let before = resident_bytes();
    let mut clients = Vec::new();
    for _ in 0..STREAMS {
        let mut client = world.client().await;
        client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
        clients.push(client);
    }
    eventually(|| engine.requests() == STREAMS).await;
    in_time(async {
        // Stalled: a while without a byte more.
        let mut last = 0;
        while last == 0 || engine.flooded.load(Ordering::Relaxed) > last {
            last = engine.flooded.load(Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    })
    .await;
    let stream_bytes = resident_bytes().saturating_sub(before) / STREAMS;
    assert!(stream_bytes < 256 * 1024, "{stream_bytes} bytes a stream");
    drop(clients);
    eventually(|| engine.dropped.load(Ordering::Relaxed) == STREAMS).await;
    world.expect_ends(&["cancelled"; STREAMS]).await;
}
