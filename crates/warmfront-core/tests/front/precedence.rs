//! Who is served first when much is ready at once.

use std::io::{Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Instant;

use socket2::SockRef;

use crate::world::{CHAT_STREAM, Client, Options, PATIENCE, SSE_HEAD, World, chunk, post};

const STREAMS: usize = 200;
const EVENT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"x\"}}]}\n\n";

/// An engine that begins every stream with one event and leaves the rest to the test. On a thread of its own, so that
/// the test can write to all its sockets while nothing else of the test's own thread moves.
fn engine() -> (SocketAddr, Receiver<TcpStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, receiver) = sync_channel(STREAMS);
    std::thread::spawn(move || {
        for socket in listener.incoming().map(Result::unwrap) {
            let sender = sender.clone();
            std::thread::spawn(move || begin(socket).map(|socket| sender.send(socket)));
        }
    });
    (address, receiver)
}

fn begin(mut socket: TcpStream) -> Option<TcpStream> {
    let mut request = Vec::new();
    while !request.ends_with(CHAT_STREAM.as_bytes()) {
        let mut buffer = [0; 4096];
        let count = socket.read(&mut buffer).ok().filter(|count| *count > 0)?;
        request.extend_from_slice(&buffer[..count]);
    }
    socket.write_all(&[SSE_HEAD.as_bytes(), &chunk(EVENT)].concat()).ok()?;
    Some(socket)
}

/// Whether the kernel has bytes for a client, without reading them.
fn has_bytes(client: &Client) -> bool {
    matches!(SockRef::from(&client.socket).peek(&mut [MaybeUninit::uninit()]), Ok(1..))
}

/// The front runs on the test's own thread: between two of our looks it has a bounded number of turns.
#[tokio::test]
async fn a_new_request_does_not_wait_for_a_burst_of_tokens() {
    let (address, sockets) = engine();
    let mut options = Options::new(&[]);
    options.engines.push(address);
    let world = World::start(options).await;
    let mut late = world.client().await;
    late.send("GET /health HTTP/1.1\r\nhost: router\r\n\r\n").await; // so that its connection is being served
    assert_eq!(late.answer().await.status, 200);
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        let mut client = world.client().await;
        client.send(post("/v1/chat/completions", CHAT_STREAM)).await;
        client.until(EVENT).await;
        streams.push(client);
    }
    let mut sockets: Vec<TcpStream> = sockets.iter().take(STREAMS).collect();
    for socket in &mut sockets {
        socket.write_all(&chunk(EVENT)).unwrap();
    }
    SockRef::from(&late.socket).send(b"GET /health HTTP/1.1\r\nhost: router\r\n\r\n").unwrap();
    let start = Instant::now();
    while !has_bytes(&late) {
        assert!(start.elapsed() < PATIENCE);
        tokio::task::yield_now().await;
    }
    let before = streams.iter().filter(|client| has_bytes(client)).count();
    assert!(before < STREAMS / 2, "{before} of {STREAMS} streams went first");
    while !streams.iter().all(has_bytes) {
        assert!(start.elapsed() < PATIENCE, "some stream got nothing");
        tokio::task::yield_now().await;
    }
}
