//! The clients' port, by its socket: any bytes end in answers and a closed connection, and nothing is left of them.

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::seeds;
use crate::world::{Act, Engine, Options, World, eventually, json_reply, stream_reply};

/// Clients at once in one case.
const CLIENTS: usize = 8;
const PATIENCE: Duration = Duration::from_secs(120);

/// Statuses that the front or the engine of these tests may answer with.
const STATUSES: [&str; 13] =
    ["100", "200", "204", "400", "404", "405", "408", "411", "413", "414", "431", "501", "505"];

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());

async fn world() -> World {
    let engine = Engine::start(|heard| {
        let is_stream = heard.body.windows(13).any(|part| part == b"\"stream\":true");
        Act::Say(if is_stream { stream_reply(&["data: {}\n\n", "data: [DONE]\n\n"]) } else { json_reply("{}") })
    })
    .await;
    let mut options = Options::new(&[&engine]);
    options.front.body_bytes_max = 16 * 1024;
    options.front.header_timeout_s = 0.05;
    options.front.body_timeout_s = 0.05;
    options.front.idle_timeout_s = 0.05;
    World::start(options).await
}

/// Sends everything and reads until the router closes.
async fn talk(router: SocketAddr, said: Vec<u8>) -> (Vec<u8>, Vec<u8>) {
    let mut socket = TcpStream::connect(router).await.unwrap();
    let mut heard = Vec::new();
    let _ = socket.write_all(&said).await; // the router may close before it has read all
    let ended = tokio::time::timeout(PATIENCE, socket.read_to_end(&mut heard)).await;
    assert!(
        ended.is_ok(),
        "no end after {:?} to {:?}",
        String::from_utf8_lossy(&heard),
        String::from_utf8_lossy(&said)
    );
    (said, heard)
}

fn is_an_answer(heard: &str) -> bool {
    let status = heard.strip_prefix("HTTP/1.1 ").or(heard.strip_prefix("HTTP/1.0 ")).and_then(|rest| rest.get(..3));
    heard.is_empty() || status.is_some_and(|status| STATUSES.contains(&status))
}

async fn attack(said: Vec<Vec<u8>>) {
    let world = world().await;
    let mut talks = JoinSet::new();
    for said in said {
        talks.spawn(talk(world.address, said));
    }
    for (said, heard) in talks.join_all().await {
        let (said, heard) = (String::from_utf8_lossy(&said), String::from_utf8_lossy(&heard));
        assert!(is_an_answer(&heard), "{heard:?} to {said:?}");
    }
    eventually(|| world.requests.is_empty() && world.mailbox.undecided() == 0).await;
    eventually(|| world.metrics.render().contains("warmfront_connections 0\n")).await;
    // Every request that the router heard of has one end.
    eventually(|| world.ends().len() == world.events("arrived").len()).await;
}

#[test]
fn every_kept_conversation_ends_in_answers() {
    RUNTIME.block_on(attack(seeds::corpus("http")));
}

proptest! {
    #![proptest_config(seeds::config(24))]

    // bug 105
    #[test]
    fn any_bytes_end_in_answers_and_leave_nothing(
        said in proptest::collection::vec(seeds::input("http"), CLIENTS..=CLIENTS)
    ) {
        RUNTIME.block_on(attack(said));
    }
}
