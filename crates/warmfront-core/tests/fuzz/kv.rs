//! KV events: the decoder, and the framing of their sockets.

use std::sync::LazyLock;
use std::time::Duration;

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use warmfront_core::index::{Feed, Index, IndexOptions};
use warmfront_core::kv::replay::{self, Replay};
use warmfront_core::kv::wire;
use warmfront_core::kv::zmtp::{Kind, Socket};

use crate::seeds;
use crate::world::loopback;

const MESSAGE_BYTES_MAX: usize = 64 * 1024;
const PATIENCE: Duration = Duration::from_secs(10);
/// Longest that a conversation takes on a machine that is busy with other work.
const BUSY: Duration = Duration::from_secs(120);

/// Decodes, and applies what could be decoded to an index with little room.
fn take(payload: &[u8]) {
    let Ok(batch) = wire::decode(payload) else { return };
    let index = Index::new(IndexOptions { block_size: 16, facts_max: 64, ..IndexOptions::default() });
    index.add_slot(0, Feed::Exact, None);
    index.apply(0, &batch, 0.0);
    let stats = index.stats();
    assert!(stats.confirmed_facts + stats.predicted_facts <= 64, "{stats:?}");
}

#[test]
fn every_kept_payload_is_taken_or_refused() {
    for payload in seeds::corpus("kv") {
        take(&payload);
    }
}

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

/// A peer that says `said` whatever it hears, then closes.
async fn peer(said: Vec<u8>) -> String {
    let listener = TcpListener::bind(loopback()).await.unwrap();
    let endpoint = format!("tcp://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        if socket.write_all(&said).await.is_ok() && socket.shutdown().await.is_ok() {
            while matches!(socket.read(&mut [0; 1024]).await, Ok(1..)) {}
        }
    });
    endpoint
}

/// Follows a publisher and asks for a replay; both end, and no message is over the bound.
async fn follow(said: Vec<u8>) {
    let endpoint = peer(said.clone()).await;
    if let Ok(mut socket) = Socket::connect(&endpoint, Kind::Subscriber, MESSAGE_BYTES_MAX, PATIENCE).await {
        let _ = socket.subscribe(b"").await;
        while let Ok(message) = socket.receive().await {
            assert!(message.iter().map(bytes::Bytes::len).sum::<usize>() <= MESSAGE_BYTES_MAX);
            let _ = replay::parse_live(message);
        }
    }
    let endpoint = peer(said).await;
    if let Ok(mut replay) = Replay::start(&endpoint, 0, MESSAGE_BYTES_MAX, PATIENCE).await {
        while let Ok(answer) = replay.next().await {
            if matches!(answer, replay::Answer::End) {
                break;
            }
        }
    }
}

#[test]
fn every_kept_conversation_ends() {
    for said in seeds::corpus("zmtp") {
        RUNTIME.block_on(async { tokio::time::timeout(BUSY, follow(said)).await }).expect("it ends");
    }
}

proptest! {
    #![proptest_config(seeds::config(256))]

    #[test]
    fn any_payload_is_taken_or_refused(payload in seeds::input("kv")) {
        take(&payload);
    }

    #[test]
    fn any_conversation_ends(said in seeds::input("zmtp")) {
        RUNTIME.block_on(async { tokio::time::timeout(BUSY, follow(said)).await }).expect("it ends");
    }
}
